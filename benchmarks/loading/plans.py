"""The plan of one rank's load of a checkpoint of thousands: `python -m benchmarks.loading.plans 4096 1000`.

Metadata and chunk tables are made as a save of FSDP2 makes them, in memory; nothing is written or read. One
rank then plans its load with the shipped code: onto as many ranks as saved, onto half as many, and onto a
number that does not divide. Seconds are of the CPU, memory is what the process grows by.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint of `ranks` x `tensors` chunks: tensors of a few shapes, cut along their rows."""

    ranks: int
    tensors: int

    def rows(self, tensor: int) -> int:
        """Of a tensor on one rank."""
        return 1 + tensor % _SHAPES

    @cached_property
    def names(self) -> list[str]:
        """Its tensors."""
        return [f"model.layers.{number}.weight" for number in range(self.tensors)]

    @cached_property
    def content(self) -> bytes:
        """Its `.metadata`."""
        kinds: list[TensorIn] = []
        for rows in range(1, _SHAPES + 1):
            starts = np.zeros((self.ranks, 2), np.int64)
            starts[:, 0] = rows * np.arange(self.ranks)
            boxes = Boxes(starts, np.broadcast_to(np.array([rows, _COLUMNS]), starts.shape))
            kinds.append(TensorIn(_FORM, (rows * self.ranks, _COLUMNS), boxes))
        rank, tensor = (each.reshape(-1) for each in np.indices((self.ranks, self.tensors), np.int32))
        files = [f"__{number}_0.distcp" for number in range(self.ranks)]
        offset = tensor.astype(np.int64) * _RECORD
        places = Places(tensor, rank, rank, files, offset, np.full(len(rank), _RECORD))
        entries = [kinds[number % _SHAPES] for number in range(self.tensors)]
        paths = [("model", name.removeprefix("model.")) for name in self.names]
        return b"".join(encode(Index(self.names, entries, paths, places)))

    def table(self, rank: int) -> ChunkTable:
        """The chunk table of a rank."""
        numbers = range(self.tensors)
        sizes = [2 * _COLUMNS * self.rows(number) for number in numbers]
        starts, offsets = (
            [[rank * self.rows(each), 0] for each in numbers],
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
        whole = saved.rows(number) * saved.ranks
        per_rank = -(-whole // ranks)
        local = torch.empty(max(0, min(per_rank, whole - rank * per_rank)), _COLUMNS, dtype=torch.bfloat16)
        size, stride = torch.Size((whole, _COLUMNS)), (_COLUMNS, 1)
        found[name.removeprefix("model.")] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride
        )
    dist.destroy_process_group()
    return found


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(arguments: Sequence[str]) -> None:
    """Print a line of a table for each number of ranks that load."""
    saved = Saved(*map(int, arguments))
    content, file_bytes = saved.content, saved.tensors * _RECORD
    print(f".metadata: {len(content) >> 20} MiB; ranks | opened s | planned s | reads | MiB more")
    for ranks in (saved.ranks, saved.ranks // 2, saved.ranks * 3 // 4 - saved.ranks // 50):
        live, before = _live(saved, ranks, ranks // 2), _peak()
        begin = time.process_time()
        index = decode(content, ".metadata")
        check(index, ".metadata", lambda _: file_bytes)
        metadata = metadata_of(index, ".metadata")
        opened = time.process_time()
        nothing: Any = None
        locator = ChunkLocator(metadata, read_table=saved.table)
        part = CheckpointPart(
            metadata=metadata, _original={}, _places=locator, _storage=nothing, _files=nothing,
            _allow_pickle=False,
        )  # fmt: skip
        load = PartLoad("", {"model": live}, metadata, allow_pickle=False)
        load.plan(part, Selection())
        planned = time.process_time()
        times = f"{opened - begin:.2f} | {planned - opened:.2f}"
        print(f"{ranks} | {times} | {len(load.reads)} | {_peak() - before}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
