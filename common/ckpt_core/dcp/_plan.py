"""Write plans like DCP's, made only when the structure of the state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, cast, final

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import (
    PLAIN,
    ShardedTensor,
    chunks_of,
    inner_tensors,
    is_wrapped,
    own_part,
    placed_like,
)
from ckpt_core.dcp._decide import Kind, LocalPlan, Outline, WriteTask, kept_name, numbers
from ckpt_core.dcp._fingerprints import Written
from ckpt_core.dcp._image import ShardSpec, specs_of
from ckpt_core.dcp._leaves import Kinds, Leaves, check_kind
from ckpt_core.dcp._torch_zip import is_plain, value_entry
from ckpt_core.formats.checksums import crc32

_VALUE: Final = -1
_CONTIGUOUS: Final = 0
"""The number of the one memory format that DCP writes."""

_Sizes: TypeAlias = tuple[int, ...]
_Rows: TypeAlias = tuple[int, int] | None
"""First row of a shard and number of rows; None for all."""
_Replica: TypeAlias = tuple[int, MetadataIndex | None, int | None]
"""Position of the leaf, index of the shard in it, and its slot in this rank's data file, if it has one."""


@final
class _Items:
    """What this rank could write, as columns.

    Most tensors are of few kinds, each with one box.

    Attributes:
        leaves, kind_of: of each item.
        indices: of items of tensors that choose their shards themselves.
    """

    def __init__(self, paths: Mapping[str, tuple[str | int, ...]]) -> None:
        self.names, self.paths = list(paths), list(paths.values())
        self.leaves: list[int] = []
        self.kind_of: list[int] = []
        self.kinds: list[Kind] = []
        self.boxes: list[tuple[_Sizes, _Sizes]] = []
        self.indices: dict[int, MetadataIndex] = {}
        self._known: dict[Any, int | None] = {}
        self._meshes: dict[int, tuple[int, int]] = {}

    def add(self, leaf: int, value: Any) -> None:
        """Add the items of a leaf; raise ConfigError if no checkpoint can hold it."""
        if not isinstance(value, torch.Tensor):
            self._append(leaf, _VALUE)
            return
        name, own = self.names[leaf], own_part(value)
        check_kind(value, name)
        if isinstance(value, ShardedTensor) or hasattr(own, "__create_write_items__"):
            for item in create_default_local_save_plan({name: value}, is_coordinator=False).items:
                self.indices[len(self.leaves)] = item.index
                self._append(leaf, self._foreign(item))
            return
        key: tuple[Any, ...] = own.dtype, own.layout, value.requires_grad, value.shape, type(own) in PLAIN
        if isinstance(value, DTensor):
            key = *key, value.placements, id(value.device_mesh)
        if key not in self._known:
            self._known[key] = self._kind(value, own)
        if (kind := self._known[key]) is not None:
            self._append(leaf, kind)

    def plan(self) -> LocalPlan:
        """Return what goes to the coordinator."""
        leaf, kind = (np.array(each, np.int32).tobytes() for each in (self.leaves, self.kind_of))
        boxes = np.array(list(chain.from_iterable(chain.from_iterable(self.boxes))), np.int64)
        outline = Outline(paths=self.paths, leaf=leaf, kind=kind, kinds=self.kinds)
        return LocalPlan(outline=outline, boxes=boxes.tobytes())

    def _append(self, leaf: int, kind: int) -> None:
        self.leaves.append(leaf)
        self.kind_of.append(kind)

    def _kind(self, value: torch.Tensor, own: torch.Tensor) -> int | None:
        """Add a kind of tensors; None if this rank is not in their mesh."""
        mesh, wrapped = None, is_wrapped(own)
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                return None
            mesh = self._mesh(value.device_mesh)
        # A wrapped tensor has the same box as a plain one, and may lack operators.
        plain = torch.zeros((), dtype=value.dtype, device=own.device).expand(own.shape) if wrapped else own
        (box,) = chunks_of(placed_like(plain, value) if wrapped else value)
        properties = value.dtype, plain.layout, value.requires_grad and not wrapped
        return self._new_kind(properties, value.shape, mesh, (box.offsets, box.sizes), divisible=not wrapped)

    def _foreign(self, item: WriteItem) -> int:
        data: Any = item.tensor_data
        found, box = data.properties, (data.chunk.offsets, data.chunk.sizes)
        properties = found.dtype, found.layout, found.requires_grad
        return self._new_kind(properties, data.size, None, box, divisible=False)

    def _new_kind(
        self, properties: Any, shape: Sequence[int], mesh: Any, box: Any, *, divisible: bool
    ) -> int:
        dtype, layout, requires_grad = properties
        of_torch = str(dtype).removeprefix("torch."), str(layout), requires_grad, _CONTIGUOUS, False
        self.kinds.append((of_torch, tuple(shape), mesh, divisible))
        self.boxes.append((tuple(box[0]), tuple(box[1])))
        return len(self.kinds) - 1

    def _mesh(self, mesh: Any) -> tuple[int, int]:
        if id(mesh) not in self._meshes:
            ranks: list[int] = mesh.mesh.flatten().tolist()
            self._meshes[id(mesh)] = len(ranks), crc32(repr(sorted(ranks)).encode())
        return self._meshes[id(mesh)]


@final
class Part:
    """One DCP part of the state on one rank, from save to save.

    Order of calls: 1. (all ranks, every save) `update`. 2. (all ranks, if any rank's part has changed)
    `local_plan`; (coordinator) `decide` over all local plans; (all ranks) `accept` the task returned.
    3. (all ranks, every save) `shards` and `values`, then `release`.

    Attributes:
        specs: index, dtype and shape of every tensor in `shards`.
        records: the pickles of the shards that are wrapped.
        value_indices: of the byte entries in `values`.
    """

    def __init__(self) -> None:
        self._leaves = Leaves({})
        self._kinds = Kinds([])
        self._items = _Items({})
        self._shard_leaves: list[int] = []
        self._views: dict[int, tuple[MetadataIndex | None, _Rows]] = {}
        self._value_leaves: list[int] = []
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

    def local_plan(self) -> LocalPlan:
        """Plan all writes that this rank could make.

        Raises:
            ConfigError: a tensor is of a kind that no checkpoint can hold.
            ValueError: two entries have the same name.
        """
        self._items = _Items(self._leaves.by_name())
        for leaf, value in enumerate(self._leaves.values):
            self._items.add(leaf, value)
        return self._items.plan()

    def accept(self, task: WriteTask, rank: int = 0) -> None:
        """Accept the task of `rank`, this one, for the last local plan."""
        items = self._items
        self._shard_leaves, self._views, self._value_leaves = [], {}, []
        self.specs, self.records, self.value_indices = [], {}, []
        under = [task.renamed.get(name, name) for name in items.names] if task.renamed else items.names
        slots: dict[int, int] = {}
        for place in task.places(len(items.leaves)):
            slot, leaf, kind = len(self.specs), items.leaves[place], items.kind_of[place]
            if self._write(place, under[leaf]) and kind != _VALUE and task.replicas:
                slots[place] = slot
        for place, *rows in task.blocks:
            self._write(place, under[items.leaves[place]], (rows[0], rows[1]))
        for place in task.kept:
            self._write(place, kept_name(rank, under[items.leaves[place]]), alone=True)
        self._replicas = {
            group: [(items.leaves[at], self._index(at), slots.get(at)) for at in numbers(places).tolist()]
            for group, places in task.replicas.items()
        }
        self._items = _Items({})

    def _index(self, place: int) -> MetadataIndex | None:
        """Return the index of an item's shard; None if it is the leaf itself."""
        items = self._items
        leaf, kind = items.leaves[place], items.kind_of[place]
        if kind == _VALUE or type(self._leaves.values[leaf]) in PLAIN:
            return None
        return items.indices.get(place) or MetadataIndex(items.names[leaf], items.boxes[kind][0])

    def _write(self, place: int, name: str, rows: _Rows = None, *, alone: bool = False) -> bool:
        """Take over the writing of an item; return whether its bytes follow one another."""
        items = self._items
        leaf, kind = items.leaves[place], items.kind_of[place]
        if kind == _VALUE:
            self._value_leaves.append(leaf)
            self.value_indices.append(MetadataIndex(name))
            return True
        start, sizes = items.boxes[kind]
        if rows is not None:
            start, sizes = (start[0] + rows[0], *start[1:]), (rows[1], *sizes[1:])
        index, value = MetadataIndex(name, (0,) * len(start) if alone else start), self._leaves.values[leaf]
        own = self._index(place)
        if own is not None or rows is not None:
            self._views[len(self._shard_leaves)] = own, rows
            value = _local(value, own)
        self._shard_leaves.append(leaf)
        if type(value) in PLAIN:
            # Of nothing FSDP makes shards of other shapes than those that torch computes.
            self.specs.append((index, value.dtype, sizes if all(sizes) else tuple(value.shape)))
            return True
        specs, record = specs_of(index, value)
        self.specs += specs
        if record is not None:
            self.records[index] = record
        return record is None

    def shards(self) -> list[torch.Tensor]:
        """Return the live plain tensors that this rank writes."""
        values = self._leaves.values
        if not self._views:
            return [values[leaf] for leaf in self._shard_leaves]
        found: list[torch.Tensor] = []
        for place, leaf in enumerate(self._shard_leaves):
            shard = values[leaf]
            if place in self._views:
                index, rows = self._views[place]
                shard = _local(shard, index)
                if rows is not None:
                    shard = shard.detach().narrow(0, *rows)
            if type(shard) in PLAIN:
                found.append(shard)
            else:
                found += [inner for _, inner in inner_tensors(shard)]
        return found

    def values(self) -> list[bytes]:
        """Serialise the byte entries that this rank writes."""
        return [value_entry(self._leaves.values[leaf]) for leaf in self._value_leaves]

    def replicas(self, choose: Callable[[int], Iterable[int]], *, whole: bool) -> dict[int, list[Any]]:
        """Return live replicas: of each group of n, those at the positions `choose(n)`.

        With `whole`, a tensor in host memory that this rank writes is replaced by its slot.
        """

        def live(leaf: int, index: MetadataIndex | None, slot: int | None) -> Any:
            value = self._leaves.values[leaf]
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
        values = self._leaves.values
        written = zip(self.value_indices, self._value_leaves, strict=True)
        return [index for index, leaf in written if not is_plain(values[leaf])]

    def release(self) -> None:
        """Drop the references to the live state, which can then be freed."""
        self._leaves.values, self.tree = [], {}


def _local(value: Any, index: MetadataIndex | None) -> torch.Tensor:
    if index is None or type(value) in PLAIN:
        return cast("torch.Tensor", value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{index.fqn} was planned as a tensor and is a {type(value).__name__}")
    with torch.no_grad():
        return find_tensor_shard(value, index)


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's only shard of a live tensor; empty if it has none or several."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if len(shards) == 1 else torch.empty(0)
    return tensor
