"""Write plans like DCP's, made only when the structure of the state changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias, cast, final

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import PLAIN, ShardedTensor, inner_tensors, is_wrapped, own_part, placed_like
from ckpt_core.dcp._dedup import Meshes, Replicas, Share, assign_writers
from ckpt_core.dcp._fingerprints import Written
from ckpt_core.dcp._image import ShardSpec, specs_of
from ckpt_core.dcp._leaves import Kinds, Leaves, check_kind
from ckpt_core.dcp._metadata import describe
from ckpt_core.dcp._torch_zip import is_plain, value_entry
from ckpt_core.formats.checksums import crc32
from ckpt_core.messages import message, register
from ckpt_core.names import KEPT

GroupNames: TypeAlias = Mapping[tuple[str | int, ...], Sequence[tuple[str, ...]]]
"""Path of a list of parameter groups in the nested state -> the names in each group."""

_Path: TypeAlias = tuple[str | int, ...]
_Item: TypeAlias = tuple[int, MetadataIndex, MetadataIndex]
"""Position of the leaf, index of the shard in it, and index under which it is written."""

_Replica: TypeAlias = tuple[int, MetadataIndex, int | None]
"""Position of the leaf, index of the shard in it, and its slot in this rank's data file, if it has one."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WriteTask:
    """One rank's share of the writes of one part.

    Attributes:
        share: positions in its plan of the items that it writes; None for all of them.
        kept: positions in its plan of entries that it writes under a separate name, because another rank
            writes the entry itself.
        replicas: group -> positions in its plan of the entries that all ranks of the group hold.
        renamed: its names -> the names in the checkpoint, where they differ.
    """

    share: Share = None
    kept: Sequence[int] = ()
    replicas: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The writes of one part by rank, its metadata, and what several ranks hold."""

    tasks: list[WriteTask]
    metadata: Metadata
    replicas: list[Replicas]


@final
class Part:
    """One DCP part of the state on one rank, from save to save.

    Order of calls: 1. (all ranks, every save) `update`. 2. (all ranks, if any rank's part has changed)
    `local_plan`; (coordinator) `decide` over all local plans; (all ranks) `accept` the task returned.
    3. (all ranks, every save) `shards` and `values`, then `release`.

    Attributes:
        specs: index, dtype and shape of every tensor in `shards`.
        records: the pickles of the shards that are wrapped.
        meshes: of the DTensors of the last local plan.
    """

    def __init__(self) -> None:
        self._leaves = Leaves({})
        self._kinds = Kinds([])
        self._plan = SavePlan([])
        self._positions: dict[str, int] = {}
        self.meshes: dict[str, tuple[int, int]] = {}
        self._shard_items: list[_Item] = []
        self._value_items: list[_Item] = []
        self._replicas: dict[int, list[_Replica]] = {}
        self.tree: Mapping[str, Any] = {}
        self.specs: list[ShardSpec] = []
        self.records: dict[MetadataIndex, bytes] = {}
        self.value_indices: list[MetadataIndex] = []

    def update(self, tree: Mapping[str, Any]) -> bool:
        """Hold the live state of a save; return whether the last plan fits it."""
        leaves = Leaves(tree)
        same = leaves.paths == self._leaves.paths and self._kinds.fit(leaves.values)
        self.tree, self._leaves = tree, leaves
        if not same:
            self._kinds = Kinds(leaves.values)
        return same

    def local_plan(self) -> SavePlan:
        """Plan all writes that this rank could make.

        Raises:
            ConfigError: a tensor is of a kind that no checkpoint can hold.
            ValueError: two entries have the same name.
        """
        paths = self._leaves.by_name()
        state = dict(zip(paths, self._leaves.values, strict=True))
        self.meshes = {}
        known: dict[int, tuple[int, int]] = {}
        for fqn, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            check_kind(value, fqn)
            if isinstance(value, DTensor):
                mesh = value.device_mesh
                if id(mesh) not in known:
                    ranks: list[int] = mesh.mesh.flatten().tolist()
                    known[id(mesh)] = len(ranks), crc32(repr(sorted(ranks)).encode())
                self.meshes[fqn] = known[id(mesh)]
            own = own_part(value)
            if is_wrapped(own):  # a plain one has the same plan; its own may lack operators
                plain = torch.zeros((), dtype=value.dtype, device=own.device).expand(own.shape)
                state[fqn] = placed_like(plain, value)
        plan = create_default_local_save_plan(state, is_coordinator=False)
        self._positions = {name: at for at, name in enumerate(state)}
        self._plan = replace(plan, planner_data=paths)
        return self._plan

    def accept(self, task: WriteTask, rank: int = 0) -> None:
        """Accept the task of `rank`, this one, for the last local plan."""
        position, plan = self._positions, self._plan.items
        share = range(len(plan)) if task.share is None else task.share
        under = [_renamed(item, task.renamed) for item in plan]
        written = [(place, under[place]) for place in share]
        written += [(place, kept_item(rank, under[place])) for place in task.kept]
        self._shard_items, self._value_items = [], []
        self.specs, self.records = [], {}
        slot_of: dict[int, int] = {}  # of shards that are not wrapped
        for place, new in written:
            at, own = position[plan[place].index.fqn], plan[place].index
            if new.type == WriteItemType.BYTE_IO:
                self._value_items.append((at, own, new.index))
                continue
            self._shard_items.append((at, own, new.index))
            specs, record = specs_of(new.index, _local(self._leaves.values[at], own))
            if record is None:
                slot_of[place] = len(self.specs)
            else:
                self.records[new.index] = record
            self.specs += specs
        self._replicas = {
            group: [
                (position[plan[place].index.fqn], plan[place].index, slot_of.get(place)) for place in places
            ]
            for group, places in task.replicas.items()
        }
        self._plan, self._positions = SavePlan([]), {}
        self.value_indices = [new for _, _, new in self._value_items]

    def shards(self) -> list[torch.Tensor]:
        """Return the live plain tensors that this rank writes."""
        found: list[torch.Tensor] = []
        for at, index, _ in self._shard_items:
            shard = _local(self._leaves.values[at], index)
            if type(shard) in PLAIN:
                found.append(shard)
            else:
                found += [inner for _, inner in inner_tensors(shard)]
        return found

    def values(self) -> list[bytes]:
        """Serialise the byte entries that this rank writes."""
        return [value_entry(self._leaves.values[at]) for at, _, _ in self._value_items]

    def replicas(self, choose: Callable[[int], Iterable[int]], *, whole: bool) -> dict[int, list[Any]]:
        """Return live replicas: of each group of n, those at the positions `choose(n)`.

        With `whole`, a tensor in host memory that this rank writes is replaced by its slot.
        """

        def live(at: int, index: MetadataIndex, slot: int | None) -> Any:
            value = self._leaves.values[at]
            if not isinstance(value, torch.Tensor):
                return value
            if whole and slot is not None and value.device.type == "cpu":
                return Written(slot)
            return _local(value, index)

        return {
            group: [live(*items[place]) for place in choose(len(items))]
            for group, items in self._replicas.items()
        }

    def odd_values(self) -> list[MetadataIndex]:
        """List the entries of `values` that a load may refuse without pickle."""
        return [new for at, _, new in self._value_items if not is_plain(self._leaves.values[at])]

    def release(self) -> None:
        """Drop the references to the live state, which can then be freed."""
        self._leaves.values, self.tree = [], {}


def decide(
    plans: Sequence[SavePlan],
    rank_local: Collection[str] = (),
    *,
    meshes: Sequence[Meshes] = (),
    groups: Sequence[GroupNames] = (),
    replicas: Literal["spread", "lowest", "kept"] = "spread",
) -> Decision:
    """Assign every chunk to one rank and build the metadata. Coordinator only.

    Replicas of entries with `rank_local` names may differ: the lowest rank that has them writes them. Other
    replicas are written by any of their holders, all by the lowest, or by each of them: the lowest under
    their name, the others under separate names. `groups` are each rank's, identified by the names in them.

    Raises:
        ConfigError: replicas differ in dtype, shape or kind.
        ValueError: the ranks' shards overlap or leave holes.
    """
    named, renamed = renumber(plans, groups) if any(groups) else (list(plans), [{} for _ in plans])
    division = assign_writers(named, rank_local, meshes=meshes, spread=replicas == "spread")
    kept: list[list[int]] = [[] for _ in plans]
    written = division.plans
    if replicas == "kept":
        for rank, places in enumerate(division.places):
            for group, own in places.items():
                kept[rank] += own if division.groups[group].ranks[0] != rank else []
        written = [
            _with_kept(rank, *each) for rank, each in enumerate(zip(named, written, kept, strict=True))
        ]
    tasks = [
        WriteTask(share=share, kept=own, replicas=places, renamed=names)
        for share, own, places, names in zip(division.shares, kept, division.places, renamed, strict=True)
    ]
    return Decision(tasks=tasks, metadata=describe(written), replicas=division.groups)


def kept_item(rank: int, item: WriteItem) -> WriteItem:
    """Convert a rank's item to a whole entry of that rank alone."""
    fqn, data = kept_name(rank, item.index.fqn), item.tensor_data
    if data is None:
        return replace(item, index=MetadataIndex(fqn))
    start = torch.Size([0] * len(data.chunk.sizes))
    whole = replace(data, chunk=replace(data.chunk, offsets=start), size=data.chunk.sizes)
    return replace(item, index=MetadataIndex(fqn, start), tensor_data=whole)


def _with_kept(rank: int, plan: SavePlan, written: SavePlan, places: Sequence[int]) -> SavePlan:
    items = [plan.items[place] for place in places]
    paths = {kept_name(rank, item.index.fqn): kept_path(rank, item.index.fqn) for item in items}
    return replace(
        written,
        items=[*written.items, *(kept_item(rank, item) for item in items)],
        planner_data={**(written.planner_data or {}), **paths},
    )


def _renamed(item: WriteItem, names: Mapping[str, str]) -> WriteItem:
    name = names.get(item.index.fqn)
    return item if name is None else replace(item, index=replace(item.index, fqn=name))


def _local(value: Any, index: MetadataIndex) -> torch.Tensor:
    if type(value) in PLAIN:
        return cast("torch.Tensor", value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{index.fqn} was planned as a tensor and is a {type(value).__name__}")
    with torch.no_grad():
        return find_tensor_shard(value, index)


def kept_name(rank: int, name: str) -> str:
    """Return the flattened name of a rank's own value of the entry `name`."""
    return ".".join(kept_path(rank, name))


def kept_path(rank: int, name: str) -> tuple[str, str, str]:
    """Return the path, in the nested state, of a rank's own value of the entry `name`."""
    return KEPT, f"{rank:05d}", name


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's only shard of a live tensor; empty if it has none or several."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if len(shards) == 1 else torch.empty(0)
    return tensor


def renumber(
    plans: Sequence[SavePlan], groups: Sequence[GroupNames]
) -> tuple[list[SavePlan], list[dict[str, str]]]:
    """Number the parameter groups of all ranks.

    Return the plans with the names of the checkpoint, and for each rank its names -> those, where they
    differ.
    """
    moved: list[dict[str, _Path]] = [{} for _ in plans]
    for path in dict.fromkeys(path for of_rank in groups for path in of_rank):
        lists = [of_rank.get(path, ()) for of_rank in groups]
        if len({tuple(each) for each in lists if each}) < 2:
            continue
        numbers: dict[tuple[object, ...], int] = {}
        for rank, own in enumerate(lists):
            new = [numbers.setdefault(tuple(names) or (at,), len(numbers)) for at, names in enumerate(own)]
            moved[rank] |= _moved(plans[rank], path, new)
    renamed = [{old: ".".join(map(str, path)) for old, path in of_rank.items()} for of_rank in moved]
    return [_under(*each) for each in zip(plans, renamed, moved, strict=True)], renamed


def _moved(plan: SavePlan, path: _Path, new: Sequence[int]) -> dict[str, _Path]:
    depth = len(path)
    paths: Mapping[str, _Path] = plan.planner_data or {}
    return {
        key: (*path, new[at], *each[depth + 1 :])
        for key, each in paths.items()
        if each[:depth] == path and len(each) > depth and isinstance(at := each[depth], int) and new[at] != at
    }


def _under(plan: SavePlan, renamed: Mapping[str, str], moved: Mapping[str, _Path]) -> SavePlan:
    if not renamed:
        return plan
    items = [_renamed(item, renamed) for item in plan.items]
    paths: Mapping[str, _Path] = plan.planner_data or {}
    data = {renamed.get(key, key): moved.get(key, path) for key, path in paths.items()}
    return replace(plan, items=items, planner_data=data)


_TENSORS: Final = (WriteItemType.TENSOR, WriteItemType.SHARD)
_NAMED: Final = {0: torch.dtype, 1: torch.layout, 3: torch.memory_format}
"""Constants of torch among the properties of a tensor, by position in `_kind`."""
_kind = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def _pack(plan: SavePlan) -> tuple[Any, ...]:
    """Return the rows of a plan, the kinds of tensors in them, and its paths.

    A row is a name and DCP's hint of the position among the chunks of that tensor; then, of a byte entry, its
    size as far as DCP knows it; of a tensor, 1 for a shard, its kind, start and shape, and the whole shape.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    rows: list[tuple[Any, ...]] = []
    for item in plan.items:
        index, data, content = item.index, item.tensor_data, item.bytes_io_data
        if data is None:
            rows.append((index.fqn, index.index, None if content is None else content.nbytes))
            continue
        if index.offset != data.chunk.offsets:
            raise ValueError(f"{index.fqn} is planned at {index.offset}, and is at {data.chunk.offsets}")
        kind = kinds.setdefault(_kind(data.properties), len(kinds))
        places = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
        rows.append((index.fqn, index.index, _TENSORS.index(item.type), kind, *places))
    named = [[str(v).removeprefix("torch.") if at in _NAMED else v for at, v in enumerate(k)] for k in kinds]
    return rows, named, plan.planner_data


def _unpack(packed: Any) -> SavePlan:
    rows, named, paths = packed
    kinds = [[vars(torch)[each] if at in _NAMED else each for at, each in enumerate(kind)] for kind in named]
    if not all(isinstance(kind[at], one) for kind in kinds for at, one in _NAMED.items()):
        raise TypeError(f"{named!s:.200} are no kinds of tensors")
    return SavePlan([_item(kinds, *row) for row in rows], planner_data=paths)


def _item(kinds: Any, name: str, hint: int | None, what: int | None, *of_tensor: Any) -> WriteItem:
    if not of_tensor:
        content = None if what is None else BytesIOWriteData(nbytes=what)
        return WriteItem(MetadataIndex(name, index=hint), WriteItemType.BYTE_IO, bytes_io_data=content)
    kind, offsets, sizes, whole = of_tensor
    start = torch.Size(offsets)
    # A separate object for each: in DCP's metadata, shared ones would be pickled differently.
    properties = TensorProperties(*kinds[kind])
    data = TensorWriteData(ChunkStorageMetadata(start, torch.Size(sizes)), properties, torch.Size(whole))
    return WriteItem(MetadataIndex(name, start, hint), _TENSORS[what or 0], tensor_data=data)


register(SavePlan, _pack, _unpack)
