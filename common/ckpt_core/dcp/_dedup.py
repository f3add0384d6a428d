"""Which rank writes what several ranks hold: every chunk once, and every rank about the same number of bytes.

DCP's own choice counts a shard as the whole tensor's bytes, and takes tensors in the order in which they
come, so that a large one at the end lands on top of an even load.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, TypeAlias, cast, final

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_core.errors import ConfigError

ENTRY_BYTES = 4096
"""Nominal bytes of an entry beside its payload; of a byte entry, whose size is not known yet, all of them."""

_Place: TypeAlias = tuple[int, ...] | None
# A name and a place are what makes two `MetadataIndex` equal; their own hash runs Python code for every item.
# Millions of items may pass, so nothing that the garbage collector has to visit is made for each of them.
_names = cast("Callable[[WriteItem], str]", attrgetter("index.fqn"))
_places = cast("Callable[[WriteItem], _Place]", attrgetter("index.offset"))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """A chunk as the lowest of its holders describes it; `ranks` grows while the plans are read."""

    item: WriteItem
    size_bytes: int
    ranks: list[int]


_Chunks: TypeAlias = dict[str, dict[_Place, _Chunk]]
_Writers: TypeAlias = Mapping[str, Mapping[_Place, int]]


def assign(plans: Sequence[SavePlan], uneven: Collection[str]) -> list[SavePlan]:
    """Leave every chunk that several ranks hold to exactly one of them.

    Largest first, each goes to the one of its holders that has the fewest bytes to write so far, what it
    alone holds included; among equally loaded ones to the lowest. Equal plans give equal results everywhere.

    Args:
        plans: every rank's local plan, by rank; they are not changed.
        uneven: names of entries whose replicas may differ: the lowest rank that has them writes them.

    Returns:
        The plans by rank. A rank that keeps all its entries keeps its plan as it is.

    Raises:
        ConfigError: ranks hold one entry with different dtypes or shapes.
    """
    doubtful = _repeated_names(plans)
    if not doubtful:
        return list(plans)
    uneven = frozenset(uneven)
    chunks: _Chunks = {name: {} for name in doubtful}
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        loads[rank] = sum(_size_bytes(item) for item in plan.items if item.index.fqn not in chunks)
        _gather(rank, plan, chunks, uneven)
    writers = _choose(chunks, loads, uneven)
    return [_keep(rank, plan, writers) for rank, plan in enumerate(plans)]


def _repeated_names(plans: Sequence[SavePlan]) -> list[str]:
    """Names of which some chunk is in several plans, in the order of the plans.

    That order is the same in every process, unlike a set's, as strings hash differently in each.
    """
    places: defaultdict[str, set[_Place]] = defaultdict(set)
    for plan in plans:
        for name, place in zip(map(_names, plan.items), map(_places, plan.items), strict=True):
            places[name].add(place)
    counts = Counter(chain.from_iterable(map(_names, plan.items) for plan in plans))
    return [name for name, count in counts.items() if count > len(places[name])]


def _entries(plan: SavePlan) -> Iterator[tuple[str, _Place, WriteItem]]:
    return zip(map(_names, plan.items), map(_places, plan.items), plan.items, strict=True)


def _gather(rank: int, plan: SavePlan, chunks: _Chunks, uneven: Collection[str]) -> None:
    """Note the rank as a holder of every chunk of its plan whose name is among `chunks`."""
    for name, place, item in _entries(plan):
        if name not in chunks:
            continue
        chunk = chunks[name].get(place)
        if chunk is None:
            chunks[name][place] = _Chunk(item=item, size_bytes=_size_bytes(item), ranks=[rank])
        else:
            if name not in uneven:
                _check_alike(chunk, item, rank)
            chunk.ranks.append(rank)


def _check_alike(chunk: _Chunk, item: WriteItem, rank: int) -> None:
    if _form(item) != _form(chunk.item):
        raise ConfigError(
            f"rank {rank} has {_told(item)} as {item.index.fqn}, rank {chunk.ranks[0]} {_told(chunk.item)}; "
            "an entry must be alike on all ranks that have it: put the rank into the name of each rank's own"
        )


def _choose(chunks: _Chunks, loads: list[int], uneven: Collection[str]) -> _Writers:
    """The rank that writes each chunk; `loads`, the bytes that every rank writes anyhow, grow accordingly."""
    writers: dict[str, dict[_Place, int]] = {name: {} for name in chunks}
    free: list[tuple[str, _Place, _Chunk]] = []
    for name, of_name in chunks.items():
        for place, chunk in of_name.items():
            if len(chunk.ranks) > 1 and name not in uneven:
                free.append((name, place, chunk))
            else:
                writers[name][place] = chunk.ranks[0]
                loads[chunk.ranks[0]] += chunk.size_bytes
    free.sort(key=lambda entry: entry[2].size_bytes, reverse=True)  # stable
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for name, place, chunk in free:
        holders = tuple(chunk.ranks)
        if holders not in queues:
            queues[holders] = [(loads[rank], rank) for rank in holders]
            heapq.heapify(queues[holders])
        rank = writers[name][place] = _least_loaded(queues[holders], loads)
        loads[rank] += chunk.size_bytes
    return writers


def _least_loaded(queue: list[tuple[int, int]], loads: Sequence[int]) -> int:
    # Loads only grow, so an entry that is out of date stands too far in front, never too far behind.
    while (load := loads[queue[0][1]]) != queue[0][0]:
        heapq.heapreplace(queue, (load, queue[0][1]))
    return queue[0][1]


def _keep(rank: int, plan: SavePlan, writers: _Writers) -> SavePlan:
    items = [
        item for name, place, item in _entries(plan) if name not in writers or writers[name][place] == rank
    ]
    return plan if len(items) == len(plan.items) else replace(plan, items=items)


def _size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        return ENTRY_BYTES
    return ENTRY_BYTES + prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _form(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    return () if data is None else (data.properties.dtype, data.size, data.chunk.sizes)


def _told(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "a value that is no tensor"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    part = "" if data.chunk.sizes == data.size else f", of which it holds {tuple(data.chunk.sizes)}"
    return f"{dtype} {tuple(data.size)}{part}"
