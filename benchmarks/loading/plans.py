"""The plan of one rank's load of a checkpoint of thousands: `python -m benchmarks.loading.plans 4096 1000`.

Metadata and chunk tables are made in memory as a save of FSDP2 makes them. One rank then plans its load with
the shipped code, onto three numbers of ranks. Seconds are of the CPU, memory is what the process grows by.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_core.dcp import ChunkLocator, metadata_of
from ckpt_core.formats.chunks import ChunkColumns, ChunkTable, TableEntry, encode_table
from ckpt_core.formats.consistency import check
from ckpt_core.formats.index import Boxes, Index, Places, TensorIn, decode, encode
from ckpt_core.loading._checkpoint import CheckpointPart
from ckpt_core.loading._selection import Selection
from ckpt_core.loading._targets import PartLoad

_FORM = ("bfloat16", "torch.strided", False, 0, False)
_COLUMNS, _SHAPES, _RECORD = 16, 10, 1024


def _rows(tensor: int) -> int:
    return 1 + tensor % _SHAPES


@dataclass(frozen=True)
class Saved:
    """A checkpoint of `ranks` x `tensors` chunks: tensors of a few shapes, cut along their rows."""

    ranks: int
    tensors: int

    @cached_property
    def names(self) -> list[str]:
        """Its tensors."""
        return [f"model.layers.{number}.weight" for number in range(self.tensors)]

    @cached_property
    def content(self) -> bytes:
        """Its `.metadata`."""
        kinds: list[TensorIn] = []
        starts = np.zeros((self.ranks, 2), np.int64)
        for rows in range(1, _SHAPES + 1):
            starts = starts + [1, 0] * np.arange(self.ranks)[:, None]
            boxes = Boxes(starts, starts * 0 + [rows, _COLUMNS])
            kinds.append(TensorIn(_FORM, (rows * self.ranks, _COLUMNS), boxes))
        rank, tensor = (each.reshape(-1) for each in np.indices((self.ranks, self.tensors), np.int32))
        files = [f"__{number}_0.distcp" for number in range(self.ranks)]
        offset, length = tensor.astype(np.int64) * _RECORD, np.full(len(rank), _RECORD)
        places = Places(tensor, rank, rank, files, offset, length)
        entries = [kinds[number % _SHAPES] for number in range(self.tensors)]
        paths = [("model", name.removeprefix("model.")) for name in self.names]
        return b"".join(encode(Index(self.names, entries, paths, places)))

    def table(self, rank: int) -> ChunkTable:
        """The chunk table of a rank."""
        numbers, sizes = range(self.tensors), [2 * _COLUMNS * _rows(each) for each in range(self.tensors)]
        starts, offsets = (
            [[rank * _rows(each), 0] for each in numbers],
            [each * _RECORD for each in numbers],
        )
        columns = ChunkColumns(
            key=self.names, shard_offsets=starts, offset=offsets, size_bytes=[_RECORD] * self.tensors,
            payload_offset=offsets, payload_bytes=sizes, dtype=["bfloat16"] * self.tensors,
        )  # fmt: skip
        entry = TableEntry(
            path=f"__{rank}_0.distcp", size_bytes=self.tensors * _RECORD, num_chunks=self.tensors,
            columns=columns.encode(), crcs=bytes(4 * self.tensors),
        )  # fmt: skip
        return ChunkTable.from_bytes(encode_table([entry]), source=str(rank))


def _live(saved: Saved, ranks: int, rank: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh, found = init_device_mesh("cpu", (ranks,)), dict[str, Any]()
    for number, name in enumerate(saved.names):
        whole = _rows(number) * saved.ranks
        per_rank = -(-whole // ranks)
        local = torch.empty(max(0, min(per_rank, whole - rank * per_rank)), _COLUMNS, dtype=torch.bfloat16)
        size, stride = torch.Size((whole, _COLUMNS)), (_COLUMNS, 1)
        found[name.removeprefix("model.")] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride
        )
    dist.destroy_process_group()
    return found


def main(arguments: list[str]) -> None:
    """Print a line of a table for each number of ranks that load."""
    saved = Saved(*map(int, arguments))
    content = saved.content
    print(f".metadata: {len(content) >> 20} MiB; ranks | opened s | planned s | reads | MiB more")
    for ranks in (saved.ranks, saved.ranks // 2, saved.ranks * 3 // 4 - saved.ranks // 50):
        live = _live(saved, ranks, ranks // 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.process_time()
        index = decode(content, ".metadata")
        check(index, ".metadata", lambda _: saved.tensors * _RECORD)
        metadata = metadata_of(index, ".metadata")
        opened = time.process_time()
        locator = ChunkLocator(metadata, read_table=saved.table)
        unused: Any = {"_storage": None, "_files": None, "_allow_pickle": False}
        part = CheckpointPart(metadata=metadata, _original={}, _places=locator, **unused)
        load = PartLoad("", {"model": live}, metadata, allow_pickle=False)
        load.plan(part, Selection())
        planned = time.process_time()
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        print(f"{ranks} | {opened - begin:.2f} | {planned - opened:.2f} | {len(load.reads)} | {more}")


if __name__ == "__main__":
    main(sys.argv[1:])
