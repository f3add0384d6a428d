"""The writers of replicas: every chunk once, about the same bytes on every rank.

DCP's own choice counts a shard as the bytes of the whole tensor, and assigns tensors in their given order, so
that a large one at the end is added to an even load.

Chunks of one name on several ranks may still differ: the holders are recorded, so that the values can be
compared.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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

Meshes: TypeAlias = Mapping[str, tuple[int, int]]
"""Name of a DTensor -> the number of ranks in its mesh, and a number that identifies the mesh."""

Share: TypeAlias = tuple[int, ...] | None

# Two `MetadataIndex` are equal if name and offset are; their own hash runs Python code for every item.
# There may be millions of items: no object that the garbage collector must visit is kept for each.
_Offset: TypeAlias = tuple[int, ...] | None
_Key: TypeAlias = tuple[str, _Offset]
_name = cast("Callable[[WriteItem], str]", attrgetter("index.fqn"))
_offset = cast("Callable[[WriteItem], _Offset]", attrgetter("index.offset"))
_key = cast("Callable[[WriteItem], _Key]", attrgetter("index.fqn", "index.offset"))


@final
@dataclass(kw_only=True, slots=True)
class _SharedChunk:
    """A chunk as its lowest holder describes it; its place among the replicas, if any."""

    item: WriteItem
    size_bytes: int
    ranks: list[int]
    writer: int = -1
    group: int = -1
    at: int = -1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Chunks with the same holders, one copy per holder, as the lowest describes them."""

    ranks: tuple[int, ...]
    items: list[WriteItem]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The writers and holders of all chunks.

    Attributes:
        shares: their positions in its plan; None for all of them.
        groups: chunks that several ranks hold, and that are equal by name only.
        places: for each rank, group -> positions of its chunks in the local plan.
    """

    plans: list[SavePlan]
    shares: list[Share]
    groups: list[Replicas]
    places: list[dict[int, list[int]]]


_Chunks: TypeAlias = dict[_Key, _SharedChunk]


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

    Replicas of entries with `rank_local` names may differ; these are written by the lowest rank that has
    them. Without `spread`, so are all, so that the written values are of one replica even if they differ. A
    rank that writes all its entries keeps its plan object.

    Raises:
        ConfigError: ranks hold one entry with different dtypes, shapes or kinds.
    """
    repeated = _repeated_names(plans)
    if not repeated:
        return Division(plans=list(plans), shares=[None] * len(plans), groups=[], places=[{} for _ in plans])
    chunks, loads = _gather(plans, repeated, rank_local)
    _check_meshes(chunks, meshes, rank_local)
    _choose(chunks, loads, rank_local if spread else repeated)
    groups = _group(chunks, rank_local)
    division = Division(plans=[], shares=[], groups=groups, places=[{} for _ in plans])
    for number, group in enumerate(groups):
        for rank in group.ranks:
            division.places[rank][number] = [0] * len(group.items)
    for rank, plan in enumerate(plans):
        own: list[int] = []
        for position, item in enumerate(plan.items):
            chunk = chunks.get(_key(item))
            if chunk is None or chunk.writer == rank:
                own.append(position)
            if chunk is not None and chunk.group >= 0:
                division.places[rank][chunk.group][chunk.at] = position
        whole = len(own) == len(plan.items)
        division.plans.append(plan if whole else replace(plan, items=[plan.items[at] for at in own]))
        division.shares.append(None if whole else tuple(own))
    return division


def _repeated_names(plans: Sequence[SavePlan]) -> set[str]:
    """Return the names with a chunk in several plans."""
    counts = Counter(chain.from_iterable(map(_name, plan.items) for plan in plans))
    offsets: defaultdict[str, set[_Offset]] = defaultdict(set)
    for plan in plans:
        for name, offset in zip(map(_name, plan.items), map(_offset, plan.items), strict=True):
            offsets[name].add(offset)
    return {name for name, count in counts.items() if count > len(offsets[name])}


def _gather(
    plans: Sequence[SavePlan], repeated: Collection[str], rank_local: Collection[str]
) -> tuple[_Chunks, list[int]]:
    """Return the chunks of repeated names, and the bytes of each rank's others."""
    chunks: _Chunks = {}
    loads: list[int] = []
    for rank, plan in enumerate(plans):
        loads.append(0)
        for item in plan.items:
            key = _key(item)
            if key[0] not in repeated:
                loads[rank] += _size_bytes(item)
            elif (chunk := chunks.get(key)) is None:
                chunks[key] = _SharedChunk(item=item, size_bytes=_size_bytes(item), ranks=[rank])
            elif key[0] in rank_local or _form(item) == _form(chunk.item):
                chunk.ranks.append(rank)
            else:
                raise ConfigError(
                    f"rank {rank} has {_describe(item)} as {key[0]}, "
                    f"rank {chunk.ranks[0]} {_describe(chunk.item)}; "
                    f"an entry must be alike on all ranks that have it. {OWN_NAMES}"
                )
    return chunks, loads


def _check_meshes(chunks: _Chunks, meshes: Sequence[Meshes], rank_local: Collection[str]) -> None:
    """Refuse entries that cannot be copies of one tensor because their meshes differ."""
    if not any(meshes):
        return
    holding: dict[str, set[int]] = {}
    for (name, _), chunk in chunks.items():
        holding.setdefault(name, set()).update(chunk.ranks)
    for name, holders in holding.items():
        found = list(dict.fromkeys(meshes[rank].get(name) for rank in sorted(holders)))
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


def _choose(chunks: _Chunks, loads: list[int], fixed: Collection[str]) -> None:
    """Choose the writer of each chunk; those of `fixed` names go to the lowest holder.

    The bytes of every rank in `loads` grow accordingly.
    """
    free: list[_SharedChunk] = []
    for (name, _), chunk in chunks.items():
        if len(chunk.ranks) > 1 and name not in fixed:
            free.append(chunk)
        else:
            chunk.writer = chunk.ranks[0]
            loads[chunk.writer] += chunk.size_bytes
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for chunk in sorted(free, key=attrgetter("size_bytes"), reverse=True):  # stable
        holders = tuple(chunk.ranks)
        queue = queues.setdefault(holders, [])
        if not queue:
            queue += [(loads[rank], rank) for rank in holders]
            heapq.heapify(queue)
        # Loads only grow, so a stale entry is too far in front, never too far behind.
        while (load := loads[queue[0][1]]) != queue[0][0]:
            heapq.heapreplace(queue, (load, queue[0][1]))
        chunk.writer = queue[0][1]
        loads[chunk.writer] += chunk.size_bytes


def _group(chunks: _Chunks, rank_local: Collection[str]) -> list[Replicas]:
    """Group the chunks that several ranks hold by their holders."""
    found: dict[tuple[int, ...], int] = {}
    groups: list[Replicas] = []
    for (name, _), chunk in chunks.items():
        if name in rank_local or len(chunk.ranks) == 1:
            continue
        ranks = tuple(chunk.ranks)
        chunk.group = found.setdefault(ranks, len(groups))
        if chunk.group == len(groups):
            groups.append(Replicas(ranks=ranks, items=[]))
        chunk.at = len(groups[chunk.group].items)
        groups[chunk.group].items.append(chunk.item)
    return groups


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
