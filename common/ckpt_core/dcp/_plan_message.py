"""DCP's local plan as columns of plain values, a message to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Final, TypeVar

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType

from ckpt_core.formats.codec import count
from ckpt_core.formats.consistency import MAX_DIMS
from ckpt_core.messages import register

T = TypeVar("T")

_BYTES: Final = -1
"""Number of dimensions that stands for a byte entry."""
_TENSORS: Final = (WriteItemType.TENSOR, WriteItemType.SHARD)
_NAMED: Final = {0: torch.dtype, 1: torch.layout, 3: torch.memory_format}
"""Constants of torch among the properties of a tensor, by position in `_kind`."""
_kind = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def _pack(plan: SavePlan) -> list[list[Any]]:
    """Return the columns of a plan.

    They are: the names of its items; DCP's hints of their positions among the chunks of their tensors; their
    numbers of dimensions; of byte entries their sizes, as far as DCP knows them; of each tensor entry 1 for a
    shard, the index of its kind, its start, its shape, and the shape of the tensor; the kinds; the flattened
    names with a path, the lengths of these paths, and the paths, concatenated.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    dims: list[int] = []
    sizes: list[int | None] = []
    numbers: list[int] = []
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            dims.append(_BYTES)
            sizes.append(None if item.bytes_io_data is None else item.bytes_io_data.nbytes)
            continue
        chunk, kind = data.chunk, _kind(data.properties)
        if item.index.offset != chunk.offsets or not len(chunk.offsets) == len(chunk.sizes) == len(data.size):
            raise ValueError(f"{item.index.fqn} is planned at {item.index.offset}, and is at {chunk.offsets}")
        dims.append(len(data.size))
        numbers += (_TENSORS.index(item.type), kinds.setdefault(kind, len(kinds)))
        numbers += (*chunk.offsets, *chunk.sizes, *data.size)
    paths: Mapping[str, Sequence[str | int]] = plan.planner_data or {}
    return [
        [item.index.fqn for item in plan.items],
        [item.index.index for item in plan.items],
        dims,
        sizes,
        numbers,
        [[str(v).removeprefix("torch.") if at in _NAMED else v for at, v in enumerate(k)] for k in kinds],
        list(paths),
        [len(path) for path in paths.values()],
        [step for path in paths.values() for step in path],
    ]


def _unpack(columns: Any) -> SavePlan:
    names, hints, all_dims, all_sizes, all_numbers, all_kinds, keys, depths, all_steps = columns
    kinds = [_properties(*kind) for kind in all_kinds]
    numbers, sizes, steps = map(iter, (all_numbers, all_sizes, all_steps))
    for number in (*all_numbers, *(size for size in all_sizes if size is not None)):
        count(number, "a place, shape or size")
    items: list[WriteItem] = []
    for name, hint, dims in zip(names, hints, all_dims, strict=True):
        if dims == _BYTES:
            (size,) = _taken(sizes, 1)
            data = None if size is None else BytesIOWriteData(nbytes=size)
            index = MetadataIndex(name, index=hint)
            items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=data))
            continue
        if not 0 <= dims <= MAX_DIMS:
            raise ValueError(f"{name:.80} with {dims} dimensions")
        is_shard, kind = _taken(numbers, 2)
        offsets, chunk, whole = (torch.Size(_taken(numbers, dims)) for _ in range(3))
        # A separate object for each: in DCP's metadata, shared ones would be pickled differently.
        write = TensorWriteData(ChunkStorageMetadata(offsets, chunk), TensorProperties(*kinds[kind]), whole)
        items.append(WriteItem(MetadataIndex(name, offsets, hint), _TENSORS[is_shard], tensor_data=write))
    paths = {name: tuple(_taken(steps, depth)) for name, depth in zip(keys, depths, strict=True)}
    if any(True for _ in (*numbers, *sizes, *steps)):
        raise ValueError("a plan with more numbers than entries")
    return SavePlan(items, planner_data=paths)


def _properties(*kind: Any) -> tuple[Any, ...]:
    found = [vars(torch).get(each) if at in _NAMED else each for at, each in enumerate(kind)]
    if len(found) != len(kind) or not all(isinstance(found[at], one) for at, one in _NAMED.items()):
        raise TypeError(f"{kind!s:.200} is no kind of tensor")
    return tuple(found)


def _taken(values: Iterator[T], number: int) -> list[T]:
    """Take the next values; refuse a number of them beyond the end."""
    taken = list(islice(values, number))
    if len(taken) != number:
        raise ValueError("a plan with fewer numbers than its entries need")
    return taken


register(SavePlan, _pack, _unpack)
