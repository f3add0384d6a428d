"""The writers of replicas: every chunk once, about the same bytes on every rank.

DCP's own choice counts a shard as the bytes of the whole tensor, and assigns tensors in their given order, so
that a large one at the end is added to an even load.

Chunks of one name on several ranks may still differ: the holders are recorded, so that the values can be
compared.
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

from ckpt_core.errors import OWN_NAMES, ConfigError

ENTRY_BYTES = 4096
"""Nominal bytes of an entry beside its payload; of a byte entry, of unknown size, in all."""

_Place: TypeAlias = tuple[int, ...] | None
# Two `MetadataIndex` are equal if name and offset are; their own hash runs Python code for every item.
# There may be millions of items, so no object that the garbage collector must visit is made per item.
_names = cast("Callable[[WriteItem], str]", attrgetter("index.fqn"))
_places = cast("Callable[[WriteItem], _Place]", attrgetter("index.offset"))


@final
@dataclass(kw_only=True, slots=True)
class _SharedChunk:
    """A chunk as its lowest holder describes it; `ranks` grows while plans are read.

    `group` and `at` are its position among the replicas, once it has one.
    """

    item: WriteItem
    size_bytes: int
    ranks: list[int]
    group: int = -1
    at: int = -1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Chunks with the same holders, one copy per holder.

    Attributes:
        ranks: the holders.
        items: the chunks, as the lowest holder describes them.
    """

    ranks: tuple[int, ...]
    items: list[WriteItem]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The writers and holders of all chunks.

    Attributes:
        plans: each rank's writes.
        groups: chunks that several ranks hold, and that are equal by name only.
        places: for each rank, group -> positions of its chunks in the local plan.
    """

    plans: list[SavePlan]
    groups: list[Replicas]
    places: list[dict[int, list[int]]]


_Chunks: TypeAlias = dict[str, dict[_Place, _SharedChunk]]
_Writers: TypeAlias = Mapping[str, Mapping[_Place, int]]
Meshes: TypeAlias = Mapping[str, tuple[int, int]]
"""Name of a DTensor -> the number of ranks in its mesh, and a number that identifies the mesh."""


def assign_writers(
    plans: Sequence[SavePlan],
    rank_local: Collection[str],
    *,
    meshes: Sequence[Meshes] = (),
    spread: bool = True,
) -> Division:
    """Assign every chunk that several ranks hold to exactly one of them.

    Largest first, each goes to its holder with the fewest bytes to write so far, unreplicated ones included;
    among equally loaded ranks to the lowest. Equal plans give equal results everywhere.

    Args:
        plans: every rank's local plan, by rank; they are not changed.
        rank_local: names of entries whose replicas may differ: the lowest rank that has them writes them.
        meshes: of each rank's DTensors.
        spread: whether replicas may be written by any of their holders; else the lowest writes all of them,
            so that the written values are of one replica even if they differ.

    Returns:
        The plans by rank, and the replicas. A rank that writes all its entries keeps its plan object.

    Raises:
        ConfigError: ranks hold one entry with different dtypes, shapes or kinds.
    """
    doubtful = _repeated_names(plans)
    if not doubtful:
        return Division(plans=list(plans), groups=[], places=[{} for _ in plans])
    rank_local = frozenset(rank_local)
    chunks: _Chunks = {name: {} for name in doubtful}
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        loads[rank] = sum(_size_bytes(item) for item in plan.items if item.index.fqn not in chunks)
        _gather(rank, plan, chunks, rank_local)
    _check_meshes(chunks, meshes, rank_local)
    writers = _choose(chunks, loads, rank_local if spread else chunks)
    groups = _group(chunks, rank_local)
    return Division(
        plans=[_keep(rank, plan, writers) for rank, plan in enumerate(plans)],
        groups=groups,
        places=[_find(rank, plan, chunks, groups) for rank, plan in enumerate(plans)],
    )


def _repeated_names(plans: Sequence[SavePlan]) -> list[str]:
    """List the names with a chunk in several plans, in the order of the plans.

    That order is the same in every process, unlike a set's, because hashes of strings differ.
    """
    places: defaultdict[str, set[_Place]] = defaultdict(set)
    for plan in plans:
        for name, place in zip(map(_names, plan.items), map(_places, plan.items), strict=True):
            places[name].add(place)
    counts = Counter(chain.from_iterable(map(_names, plan.items) for plan in plans))
    return [name for name, count in counts.items() if count > len(places[name])]


def _entries(plan: SavePlan) -> Iterator[tuple[str, _Place, WriteItem]]:
    return zip(map(_names, plan.items), map(_places, plan.items), plan.items, strict=True)


def _gather(rank: int, plan: SavePlan, chunks: _Chunks, rank_local: Collection[str]) -> None:
    """Record the rank as a holder of the chunks of its plan with a name in `chunks`."""
    for name, place, item in _entries(plan):
        if name not in chunks:
            continue
        chunk = chunks[name].get(place)
        if chunk is None:
            chunks[name][place] = _SharedChunk(item=item, size_bytes=_size_bytes(item), ranks=[rank])
        else:
            if name not in rank_local:
                _check_alike(chunk, item, rank)
            chunk.ranks.append(rank)


def _check_alike(chunk: _SharedChunk, item: WriteItem, rank: int) -> None:
    if _form(item) != _form(chunk.item):
        raise ConfigError(
            f"rank {rank} has {_describe(item)} as {item.index.fqn}, "
            f"rank {chunk.ranks[0]} {_describe(chunk.item)}; "
            f"an entry must be alike on all ranks that have it. {OWN_NAMES}"
        )


def _check_meshes(chunks: _Chunks, meshes: Sequence[Meshes], rank_local: Collection[str]) -> None:
    """Refuse entries that cannot be copies of one tensor because their meshes differ."""
    if not any(meshes):
        return
    for name, of_name in chunks.items():
        holders = sorted({rank for chunk in of_name.values() for rank in chunk.ranks})
        found = list(dict.fromkeys(meshes[rank].get(name) for rank in holders))
        if name in rank_local or len(found) == 1:
            continue
        # Copies on meshes without a common rank may be of one tensor: comparing their values decides.
        on = {mesh: [rank for rank in range(len(meshes)) if meshes[rank].get(name) == mesh] for mesh in found}
        if None in found or any(mesh and mesh[0] != len(on[mesh]) for mesh in found):
            described = "; ".join(
                f"ranks {[each for each in ranks if mesh or each in holders]} have "
                f"{'a plain tensor' if mesh is None else f'a DTensor on a mesh of {mesh[0]} rank(s)'}"
                for mesh, ranks in on.items()
            )
            raise ConfigError(f"{name} cannot be the same tensor on all ranks: {described}. {OWN_NAMES}")


def _group(chunks: _Chunks, rank_local: Collection[str]) -> list[Replicas]:
    """Group the chunks that several ranks hold by their holders."""
    found: dict[tuple[int, ...], int] = {}
    groups: list[Replicas] = []
    for name, of_name in chunks.items():
        for chunk in of_name.values():
            if name in rank_local or len(chunk.ranks) == 1:
                continue
            ranks = tuple(chunk.ranks)
            chunk.group = found.setdefault(ranks, len(groups))
            if chunk.group == len(groups):
                groups.append(Replicas(ranks=ranks, items=[]))
            chunk.at = len(groups[chunk.group].items)
            groups[chunk.group].items.append(chunk.item)
    return groups


def _find(rank: int, plan: SavePlan, chunks: _Chunks, groups: Sequence[Replicas]) -> dict[int, list[int]]:
    """Find the positions of a rank's replicas in its plan, by group."""
    found = {
        number: [0] * len(group.items) for number, group in enumerate(groups) if rank in set(group.ranks)
    }
    if not found:
        return found
    for position, (name, place) in enumerate(
        zip(map(_names, plan.items), map(_places, plan.items), strict=True)
    ):
        if name in chunks and (chunk := chunks[name][place]).group >= 0:
            found[chunk.group][chunk.at] = position
    return found


def _choose(chunks: _Chunks, loads: list[int], fixed: Collection[str]) -> _Writers:
    """Choose the writer of each chunk; those of `fixed` names go to the lowest holder.

    The bytes of every rank in `loads` grow accordingly.
    """
    writers: dict[str, dict[_Place, int]] = {name: {} for name in chunks}
    free: list[tuple[str, _Place, _SharedChunk]] = []
    for name, of_name in chunks.items():
        for place, chunk in of_name.items():
            if len(chunk.ranks) > 1 and name not in fixed:
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
    # Loads only grow, so a stale entry is too far in front, never too far behind.
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


def _describe(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "a value that is not a tensor"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    part = "" if data.chunk.sizes == data.size else f", of which it holds {tuple(data.chunk.sizes)}"
    return f"{dtype} {tuple(data.size)}{part}"
