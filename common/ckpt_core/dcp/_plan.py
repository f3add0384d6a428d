"""Write plans like DCP's, made only when the structure of the state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, pairwise
from operator import attrgetter, eq
from typing import Any, Final, TypeAlias, cast, final

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckpt_core._torch_internals import (
    PLAIN,
    ShardedTensor,
    chunks_of,
    inner_tensors,
    is_wrapped,
    new_dtypes,
    own_part,
    placed_like,
    storage_types_by_dtype,
)
from ckpt_core.dcp._decide import Kind, LocalPlan, Outline, WriteTask, kept_name, numbers
from ckpt_core.dcp._fingerprints import Written
from ckpt_core.dcp._image import USUAL, ShardSpec, specs_of
from ckpt_core.dcp._torch_zip import is_plain, value_entry
from ckpt_core.dcp._wrapped_tensors import problem_of
from ckpt_core.errors import ConfigError
from ckpt_core.formats.checksums import crc32


def check_kind(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose value the checkpoint format cannot store bit for bit."""
    usual = type(tensor) in PLAIN and tensor.layout == torch.strided and tensor.dtype in USUAL
    usual = usual and not (tensor.is_nested or tensor.is_meta) and tensor.is_contiguous()
    if usual and tensor.untyped_storage().nbytes() > 0:  # as nearly all are, of which no more is asked
        return
    for local in _local(tensor, name):
        wrapped = is_wrapped(local) and not local.is_nested
        for inner, plain in inner_tensors(local, name) if wrapped else [(name, local)]:
            if (problem := _unreadable(plain) or _foreign(plain) or _without_memory(plain)) is not None:
                raise ConfigError(f"{inner} is {problem}")
        if wrapped and (problem := problem_of(local)) is not None:
            raise ConfigError(f"{name} is {problem}")


def _local(tensor: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """Yield this rank's shards of a tensor: wrappers of shards lack most attributes."""
    if isinstance(tensor, ShardedTensor):
        yield from (shard.tensor for shard in tensor.local_shards())
    elif isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                f"{name} is placed as {tensor.placements}: ranks hold parts not yet added up, so it "
                "has no value; redistribute() it to Replicate() or Shard() before saving"
            )
        with torch.no_grad():
            yield tensor.to_local()
    else:
        yield tensor


def _unreadable(tensor: Any) -> str | None:
    if is_lazy(tensor):
        return "not initialised and has no shape; run the model once on a batch before saving"
    plain: Any = torch.Tensor
    if getattr(tensor, "__torch_dispatch__", None) is not plain.__torch_dispatch__:
        return (
            f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with its own kind of "
            "storage, which the checkpoint format cannot hold; save the plain tensors that it is made of"
        )
    return None


def _foreign(tensor: torch.Tensor) -> str | None:
    """Return what is wrong with the layout or dtype."""
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.layout == torch.strided else str(tensor.layout)
        kind = "quantised" if tensor.is_quantized else layout
        return (
            f"a {kind} tensor, which the checkpoint format cannot hold; "
            "convert it (dequantize(), to_dense(), unbind()) before saving, or leave it out of the state"
        )
    dtype = tensor.dtype
    has_bytes = dtype in new_dtypes() or dtype in storage_types_by_dtype()
    if not has_bytes or str(dtype).removeprefix("torch.").startswith(("q", "bits")):
        return (
            f"of dtype {dtype}, which no checkpoint can hold; view() it as torch.uint8 before saving, "
            "or leave it out of the state"
        )
    return None


def _without_memory(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta":
        return "on the meta device and has no data; materialise the model before saving"
    # Reading such memory ends the process, not the save.
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return (
            "without memory: its storage was freed, as FSDP frees gathered parameters; save the sharded one"
        )
    if is_expanded(tensor):
        return (
            f"expanded: strides {tensor.stride()} for shape {tuple(tensor.shape)} make several elements one "
            "place in memory, into which nothing can be loaded; keep a copy (contiguous() or clone()), or "
            "leave it out of the state (register_buffer(..., persistent=False))"
        )
    return None


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory so that torch refuses to write into them.

    Other overlapping views (`as_strided`, `unfold`) can be loaded into.
    """
    if isinstance(tensor, ShardedTensor):
        return any(is_expanded(shard.tensor) for shard in tensor.local_shards())
    if isinstance(tensor, DTensor):
        return is_expanded(tensor.to_local())
    if is_wrapped(tensor):
        return any(is_expanded(each) for _, each in inner_tensors(tensor))
    if tensor.layout != torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


_BEGIN, _END = object(), object()


@final
class Leaves:
    """All leaves, in order, found fast enough for every save.

    They are those of DCP's planners: mappings are descended, and lists only when they contain a tensor or a
    container; every other value, a tuple included, is one leaf.

    Attributes:
        keys: of all mappings, as text, and lists in order, with marks of where each begins and ends. Those of
            two saves are mostly the same objects, and then compared without a look at them.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self._walk(tree)

    def _walk(self, tree: Any) -> None:
        keys, values = self.keys, self.values
        if not isinstance(tree, list) and PLAIN.issuperset(map(type, tree.values())):
            keys += map(str, tree)  # mostly, and in C: every save waits for it
            values += tree.values()
        else:
            for key, value in enumerate(tree) if isinstance(tree, list) else tree.items():
                keys.append(key if isinstance(tree, list) else str(key))
                if isinstance(value, torch.Tensor) or (type(value) is not dict and _is_leaf(value)):
                    values.append(value)
                else:
                    keys.append(_BEGIN)
                    self._walk(value)
        keys.append(_END)

    def by_name(self) -> dict[str, tuple[str | int, ...]]:
        found: dict[str, tuple[str | int, ...]] = {}
        path: list[str | int] = []
        for key, following in pairwise(self.keys):
            if key is _END:
                path.pop()
            elif key is not _BEGIN:
                path.append(key)
                if following is not _BEGIN:
                    name = ".".join(map(str, path))
                    if name in found:
                        raise ValueError(f"two entries of the state are called {name}")
                    found[name] = tuple(path)
                    path.pop()
        return found


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(each, torch.Tensor) or not _is_leaf(each) for each in value)


@final
class Kinds:
    """The planning input per leaf: whether a tensor, its dtype, shape and placement."""

    def __init__(self, values: list[Any]) -> None:
        self._kinds = [None if type(value) in PLAIN else _kind(value) for value in values]
        self._is_plain = [kind is None for kind in self._kinds]
        self._plain = list(map(_PLAN_OF_PLAIN, compress(values, self._is_plain)))

    def fit(self, values: list[Any]) -> bool:
        """Return whether these values, equal in number, have the same plan."""
        plain = list(compress(values, self._is_plain))  # all of them in C: every save waits for it
        if not (PLAIN.issuperset(map(type, plain)) and all(map(eq, map(_PLAN_OF_PLAIN, plain), self._plain))):
            return False
        others = zip(compress(values, self._kinds), filter(None, self._kinds), strict=True)
        return all(_kind(value) == kind for value, kind in others)


_PLAN_OF_PLAIN: Final = attrgetter("dtype", "shape", "layout")
"""What describes most leaves completely."""


def _kind(value: object) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return ("value",)
    if is_lazy(value):
        return "lazy", object()  # never equal: it has no shape, and the plan refuses it by name
    if isinstance(value, ShardedTensor):
        shards = [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in value.local_shards()]
        return "sharded", value.dtype, tuple(value.size()), tuple(shards)
    if isinstance(value, DTensor):
        placed = value.dtype, value.shape, value.placements, value.device_mesh
        return "placed", *placed, *_form(own_part(value))
    if hasattr(value, "__get_tensor_shard__"):
        return "foreign", object()  # never equal: it chooses its shards itself, at every save
    return "plain", value.dtype, value.shape, value.layout, *_form(value)


def _form(wrapped: Any) -> tuple[object, ...]:
    """Return what the record of a wrapped tensor depends on; nothing of others."""
    if type(wrapped) in PLAIN or not is_wrapped(wrapped):
        return ()
    inner = [(name, each.dtype, each.shape) for name, each in inner_tensors(wrapped)]
    return type(wrapped), repr(wrapped.__tensor_flatten__()[1]), tuple(inner)


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
        same = leaves.keys == self._leaves.keys and self._kinds.fit(leaves.values)
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
            value = _own(value, own)
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
                shard = _own(shard, index)
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
            return _own(value, index)

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


def _own(value: Any, index: MetadataIndex | None) -> torch.Tensor:
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
