"""Local plans of ranks that are not there, and what `decide` makes of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_core.dcp import Decision, LocalPlan, Outline, decide
from ckpt_core.dcp._decide import ENTRY_BYTES
from ckpt_core.formats.dcp_metadata import item_bytes


class Item(NamedTuple):
    """What a rank could write: a box of a tensor, or a value without one."""

    name: str
    start: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"
    mesh: tuple[int, int] | None = None
    divisible: bool = True

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + (0 if self.start is None else prod(self.sizes) * item_bytes(self.dtype))


def shard(name: str, start: int, length: int, *, of: int, dtype: str = "uint8") -> Item:
    """Elements [start, start + length) of a one-dimensional tensor of `of` elements."""
    return Item(name, (start,), (length,), (of,), dtype)


def whole(name: str, length: int, *, dtype: str = "uint8") -> Item:
    return shard(name, 0, length, of=length, dtype=dtype)


def value(name: str) -> Item:
    return Item(name)


def plan(*items: Item) -> LocalPlan:
    """The plan of one rank; every tensor is of a kind of its own."""
    tensors = [each for each in items if each.start is not None]
    kinds = [
        ((each.dtype, "torch.strided", False, 0, False), each.shape, each.mesh, each.divisible)
        for each in tensors
    ]
    kind = iter(range(len(tensors)))
    outline = Outline(
        paths=[(each.name,) for each in items],
        leaf=np.arange(len(items), dtype=np.int32).tobytes(),
        kind=np.array([-1 if each.start is None else next(kind) for each in items], np.int32).tobytes(),
        kinds=kinds,
    )
    boxes = [number for each in tensors for number in (*(each.start or ()), *each.sizes)]
    return LocalPlan(outline=outline, boxes=np.array(boxes, np.int64).tobytes())


def decided(ranks: Sequence[Sequence[Item]], rank_local: Collection[str] = ()) -> Decision:
    return decide([plan(*items) for items in ranks], frozenset(rank_local))


def written(ranks: Sequence[Sequence[Item]], rank_local: Collection[str] = ()) -> list[list[Item]]:
    """The items that each rank writes whole, in order."""
    tasks = decided(ranks, rank_local).tasks
    return [[items[at] for at in task.places(len(items))] for items, task in zip(ranks, tasks, strict=True)]


def names(ranks: Sequence[Sequence[Item]]) -> list[list[str]]:
    return [[item.name for item in items] for items in ranks]
