"""DCP's metadata of a whole checkpoint, from the plans of all ranks.

The result equals that of DCP's own planner, which takes a hundred microseconds per shard: at thousands of
ranks, most of an hour.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_Boxes: TypeAlias = npt.NDArray[np.int64]
_MOST_LISTED: Final = 5


def describe(plans: Sequence[SavePlan]) -> Metadata:
    """Build the metadata of plans in which every chunk is written once.

    Raises:
        ValueError: shards of a tensor overlap, leave holes, exceed its bounds, or differ in dtype or shape.
    """
    entries: dict[str, Any] = {}
    problems = [problem for plan in plans if (problem := _add(plan, entries)) is not None]
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            problems += _flaws(name, entry.size, entry.chunks)
    if problems:
        more = f", and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        raise ValueError(f"the shards do not make up the state: {'; '.join(problems[:_MOST_LISTED])}{more}")
    paths: dict[str, Any] = {}
    for plan in reversed(plans):
        paths |= plan.planner_data or {}
    return Metadata(state_dict_metadata=entries, planner_data=paths)


def _add(plan: SavePlan, entries: dict[str, Any]) -> str | None:
    """Add the items of a plan; describe the first that contradicts an entry, if any."""
    byte_io = WriteItemType.BYTE_IO
    for item in plan.items:
        name, data = item.index.fqn, item.tensor_data
        if item.type == byte_io or data is None:
            if isinstance(entries.setdefault(name, BytesStorageMetadata()), TensorStorageMetadata):
                return f"{name} is a plain value on one rank and a tensor on another"
            continue
        entry = entries.get(name)
        if entry is None:
            properties, size = data.properties, data.size
            entry = entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
        elif not _same(entry, data):
            return _difference(item, data, entry)
        entry.chunks.append(data.chunk)
    return None


def _same(entry: Any, data: TensorWriteData) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and entry.size == data.size
        and entry.properties.dtype == data.properties.dtype
    )


def _difference(item: WriteItem, data: TensorWriteData, entry: Any) -> str:
    tensor = isinstance(entry, TensorStorageMetadata)
    other = f"{entry.properties.dtype} {tuple(entry.size)}" if tensor else "a plain value"
    return (
        f"{item.index.fqn} is {data.properties.dtype} {tuple(data.size)} on one rank and {other} on another"
    )


def _flaws(name: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> list[str]:
    """Describe the problems of the chunks of a tensor."""
    if len(chunks) == 1 and chunks[0].sizes == size and not any(chunks[0].offsets):
        return []
    if len(size) == 0:
        return [] if len(chunks) == 1 else [f"{name} is one value and is written {len(chunks)} times"]
    starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(-1, len(size))
    lengths = np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(-1, len(size))
    ends = starts + lengths
    flaws: list[str] = []
    outside = ((starts < 0) | (lengths < 0) | (ends > np.array(size))).any(axis=1)
    if outside.any():
        flaws.append(f"{name} {tuple(size)} has a shard outside of it: {chunks[int(outside.argmax())]}")
    volumes = lengths.prod(axis=1)
    if int(volumes.sum()) != prod(size):
        flaws.append(f"the shards of {name} {tuple(size)} have {int(volumes.sum())} elements together")
    full = volumes > 0
    if _overlap(starts[full], ends[full]):
        flaws.append(f"shards of {name} {tuple(size)} overlap")
    return flaws


def _overlap(starts: _Boxes, ends: _Boxes) -> bool:
    """Return whether any two boxes overlap, by a sweep along one dimension."""
    if len(starts) < 2:
        return False
    # The dimension with the most different starts keeps the fewest boxes active.
    sweep = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, sweep], kind="stable")
    starts, ends = starts[order], ends[order]
    if bool((starts[1:, sweep] >= ends[:-1, sweep]).all()):
        return False
    active: list[tuple[int, int]] = []
    for place in range(len(starts)):
        while active and active[0][0] <= starts[place, sweep]:
            heapq.heappop(active)
        others = [other for _, other in active]
        if others and bool(
            ((starts[others] < ends[place]) & (starts[place] < ends[others])).all(axis=1).any()
        ):
            return True
        heapq.heappush(active, (int(ends[place, sweep]), place))
    return False
