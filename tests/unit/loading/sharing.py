"""Checkpoints made of nothing but numbers, for tests of who reads what of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.tensor import Placement, Replicate

from ckpt_core.loading.sharing import Boxes, Cell, Schedule, StoredTensor
from ckpt_core.loading.sharing._layouts import placed_boxes
from ckpt_core.reading import Payload


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh and how a tensor lies on it."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def boxes(self, shape: Sequence[int]) -> Boxes:
        boxes = placed_boxes(shape, np.arange(np.prod(self.mesh)).reshape(self.mesh), self.placements)
        assert boxes is not None
        return boxes


def whole(world: int) -> Layout:
    return Layout(mesh=(world,), placements=(Replicate(),))


def stored(
    name: str,
    shape: Sequence[int],
    *,
    live: Layout,
    saved: Layout,
    itemsize: int = 4,
    block_bytes: int | None = 1 << 20,
    scattered: bool = False,
) -> StoredTensor:
    """`block_bytes=None`: payloads have one checksum only, as stock DCP's."""
    boxes = saved.boxes(shape)
    ends = sorted({(*lo, *hi) for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True)})
    corners = np.array(ends, dtype=np.int64).reshape(len(ends), 2 * len(shape))
    lo, hi = corners[:, : len(shape)], corners[:, len(shape) :]
    sizes = ((hi - lo).prod(axis=1) * itemsize).tolist()
    return StoredTensor(
        name=name,
        boxes=live.boxes(shape),
        lo=lo,
        hi=hi,
        itemsize=itemsize,
        payload=[_payload(name, row, size, block_bytes) for row, size in enumerate(sizes)].__getitem__,
        scattered=range(len(ends)) if scattered else (),
    )


def _payload(name: str, row: int, size: int, block_bytes: int | None) -> Payload:
    made = Payload(
        path=f"__{row}_0.distcp", key=name, offset=zlib.crc32(name.encode()), size_bytes=size, crc32=1
    )
    if block_bytes is None or size <= block_bytes:
        return made
    return replace(made, block_bytes=block_bytes, block_crcs=(0,) * -(-size // block_bytes))


def needed(tensor: StoredTensor, rank: int) -> dict[int, np.ndarray[Any, Any]]:
    """Of every chunk of which `rank` needs something: which of its bytes, worked out element by element."""
    own = tensor.boxes.of(rank)
    found = {}
    for row, (lo, hi) in enumerate(zip(tensor.lo, tensor.hi, strict=True)):
        mask = np.zeros(tuple(hi - lo), dtype=bool)
        for box_lo, box_hi in zip(own.lo, own.hi, strict=True):
            first, last = np.maximum(lo, box_lo) - lo, np.minimum(hi, box_hi) - lo
            if (last > first).all():
                mask[tuple(map(slice, first.tolist(), last.tolist()))] = True
        if mask.any():
            found[row] = np.repeat(mask.reshape(-1), tensor.itemsize) | bool(row in tensor.scattered)
    return found


Counts = dict[tuple[str, str], np.ndarray[Any, Any]]
"""Live tensor and path -> how often each byte of that payload has come."""


def count(cells: Iterable[Cell]) -> Counts:
    counts: Counts = {}
    for cell in cells:
        key = (cell.name, cell.payload.path)
        counts.setdefault(key, np.zeros(cell.payload.size_bytes, dtype=int))[cell.start : cell.stop] += 1
    return counts


def given(schedule: Schedule) -> list[Cell]:
    """All cells that a rank has in its hands in the end."""
    return [*schedule.private, *(cell for bucket in schedule.buckets for cell in bucket.cells)]


def contents(schedule: Schedule) -> list[tuple[int, tuple[int, ...], list[Cell]]]:
    """The buckets in a form that can be compared."""
    return [(bucket.owner, bucket.members, list(bucket.cells)) for bucket in schedule.buckets]


def all_done(schedules: Sequence[Schedule]) -> bool:
    """Whether every bucket gets to its members if each rank goes through its own in order."""
    waiting = {schedule.rank: contents(schedule) for schedule in schedules}
    moved = True
    while moved:
        heads = {rank: buckets[0] for rank, buckets in waiting.items() if buckets}
        ready = [head for head in heads.values() if all(heads.get(rank) == head for rank in head[1])]
        moved = bool(ready)
        for rank in ready[0][1] if moved else ():
            waiting[rank].pop(0)
    return not any(waiting.values())
