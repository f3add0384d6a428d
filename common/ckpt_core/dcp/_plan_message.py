"""DCP's local plan as columns of plain values, a message to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Final, TypeVar, final

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType

from ckpt_core.formats.codec import MAX_COUNT
from ckpt_core.formats.consistency import MAX_DIMS
from ckpt_core.messages import message, register

T = TypeVar("T")

_BYTES: Final = -1
"""Number of dimensions that stands for a byte entry."""
_TENSORS: Final = (WriteItemType.TENSOR, WriteItemType.SHARD)


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """A plan, item by item.

    Attributes:
        names: of the items.
        hints: DCP's hint of each item's position among the chunks of its tensor.
        dims: number of dimensions of each; `_BYTES` for byte entries.
        sizes: of the byte entries, in bytes, as far as DCP knows them.
        numbers: of each tensor entry: 1 for a shard, the index of its kind, its start, its shape, and the
            shape of the tensor.
        kinds: dtype, layout, requires_grad, memory format, and whether it is pinned.
        paths: flattened names with a path.
        depths: the length of each of these paths.
        steps: the paths, concatenated.
    """

    names: list[str]
    hints: list[int | None]
    dims: list[int]
    sizes: list[int | None]
    numbers: list[int]
    kinds: list[tuple[str, str, bool, str, bool]]
    paths: list[str]
    depths: list[int]
    steps: list[str | int]


def _pack(plan: SavePlan) -> _Columns:
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
    return _Columns(
        names=[item.index.fqn for item in plan.items],
        hints=[item.index.index for item in plan.items],
        dims=dims,
        sizes=sizes,
        numbers=numbers,
        kinds=[(_name(kind[0]), _name(kind[1]), kind[2], _name(kind[3]), kind[4]) for kind in kinds],
        paths=list(paths),
        depths=[len(path) for path in paths.values()],
        steps=[step for path in paths.values() for step in path],
    )


def _unpack(columns: Any) -> SavePlan:
    if not isinstance(columns, _Columns):
        raise TypeError("a plan that is no plan")
    for what in (columns.numbers, [size for size in columns.sizes if size is not None]):
        if what and not 0 <= min(what) <= max(what) <= MAX_COUNT:
            raise ValueError("an impossible place, shape or size")
    kinds = [_resolved(kind) for kind in columns.kinds]
    numbers, sizes, steps = iter(columns.numbers), iter(columns.sizes), iter(columns.steps)
    items = [
        _bytes_item(name, hint, *_taken(sizes, 1))
        if dims == _BYTES
        else _item(name, hint, _taken(numbers, 2 + 3 * dims), kinds)
        for name, hint, dims in zip(columns.names, columns.hints, columns.dims, strict=True)
    ]
    paths = {
        name: tuple(_taken(steps, depth)) for name, depth in zip(columns.paths, columns.depths, strict=True)
    }
    if any(True for _ in (*numbers, *sizes, *steps)):
        raise ValueError("a plan with more numbers than entries")
    return SavePlan(items, planner_data=paths)


def _bytes_item(name: str, hint: int | None, size: int | None) -> WriteItem:
    data = None if size is None else BytesIOWriteData(nbytes=size)
    return WriteItem(MetadataIndex(name, index=hint), WriteItemType.BYTE_IO, bytes_io_data=data)


def _item(name: str, hint: int | None, numbers: Sequence[int], kinds: Sequence[tuple[Any, ...]]) -> WriteItem:
    is_shard, kind, *counts = numbers
    dims = len(counts) // 3
    if dims > MAX_DIMS:
        raise ValueError(f"{name:.80} with {dims} dimensions")
    offsets, sizes = torch.Size(counts[:dims]), torch.Size(counts[dims : 2 * dims])
    # A separate object for each: in DCP's metadata, shared ones would be pickled differently.
    properties = TensorProperties(*kinds[kind])
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(counts[2 * dims :]))
    return WriteItem(MetadataIndex(name, offsets, hint), _TENSORS[is_shard], tensor_data=data)


def _taken(values: Iterator[T], count: int) -> list[T]:
    """Take the next `count` values; refuse a count beyond the end."""
    taken = list(islice(values, count))
    if len(taken) != count:
        raise ValueError("a plan with fewer numbers than its entries need")
    return taken


_kind = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def _resolved(kind: tuple[str, str, bool, str, bool]) -> tuple[Any, ...]:
    dtype, layout, grad, form, pinned = kind
    memory = _named(form, torch.memory_format)
    return _named(dtype, torch.dtype), _named(layout, torch.layout), grad, memory, pinned


def _name(constant: object) -> str:
    return str(constant).removeprefix("torch.")


def _named(name: str, kind: type[T]) -> T:
    found: Any = vars(torch).get(name)
    if not isinstance(found, kind):
        raise TypeError(f"torch.{name:.80} is no {kind.__name__}")
    return found


register(SavePlan, _pack, _unpack)
