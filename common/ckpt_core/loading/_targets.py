"""The match of a checkpoint's entries with the live state, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, cast, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import find_tensor_shard

from ckpt_core._torch_internals import PLAIN, ShardedTensor, is_wrapped, own_part
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import (
    ChunkLocation,
    Cut,
    Cuts,
    Leaves,
    TensorRead,
    TensorTarget,
    WrapMismatchError,
    fillings,
    held_by_this_rank,
    is_expanded,
    kept_name,
    load_value,
)
from ckpt_core.errors import IncompatibleCheckpointError, first_of
from ckpt_core.loading._checkpoint import CheckpointPart
from ckpt_core.loading._selection import Selection
from ckpt_core.types import SavedEntries, SavedState, StateDict

_SHOWN = 8
_SHOWN_UNLIKE = 5
_Item: TypeAlias = tuple[str, str]
Paths: TypeAlias = Mapping[str, tuple[str | int, ...]]
Unlike: TypeAlias = Mapping[tuple[str | int, ...], bool]
"""Path of an entry -> whether it is wrapped in the checkpoint, where the live one is not alike."""


@final
@dataclass(slots=True)
class Misfits:
    """The entries that do not fit, over all parts of a checkpoint.

    Attributes:
        missing: live names that the checkpoint lacks.
        mismatched: names that differ in shape or dtype, and how.
        foreign: (part, item) to load -> names in the checkpoint that this rank does not have; after
            `intersect`, that no rank has.
        partial: whether other ranks have some of the names that this one lacks.
    """

    missing: list[str] = field(default_factory=list[str])
    mismatched: list[str] = field(default_factory=list[str])
    foreign: dict[_Item, list[str]] = field(default_factory=dict[_Item, list[str]])
    partial: bool = False

    def compare(
        self,
        target: Mapping[str, Any],
        metadata: Metadata,
        *,
        part: str = "",
        paths: Paths = MappingProxyType({}),
        cast: bool = False,
    ) -> list[str]:
        """Record how live entries differ; return those that cannot be loaded."""
        saved = metadata.state_dict_metadata
        missing = [key for key in target if key not in saved]
        mismatched = {
            key: problem
            for key, value in target.items()
            if key in saved
            and not _fits(value, saved[key])
            and (problem := _mismatch(value, saved[key], cast=cast)) is not None
        }
        self.missing += missing
        self.mismatched += [f"{key}: {problem}" for key, problem in mismatched.items()]
        known: Paths = metadata.planner_data or {}
        loaded = {_item(known.get(key) or paths.get(key, (key,))) for key in target}
        self.foreign |= {(part, item): names for item, names in _foreign(target, loaded, metadata).items()}
        return [*missing, *mismatched]

    @property
    def unexpected(self) -> list[str]:
        """Names in the checkpoint, of items to load, that the live state lacks."""
        return [name for names in self.foreign.values() for name in names]

    def intersect(self, coordinator: Coordinator) -> None:
        """Keep only the foreign names that no rank has. Collective."""
        common = coordinator.gather_scatter(self.foreign, _common, what="comparing the names of all ranks")
        self.partial = len(self.unexpected) > sum(map(len, common.values()))
        self.foreign = common

    @property
    def lines(self) -> list[str]:
        """One line for every entry that does not fit."""
        return [
            *(f"the checkpoint lacks {key}" for key in self.missing),
            *(f"the training state lacks {key}" for key in self.unexpected),
            *self.mismatched,
        ]

    def raise_if_any(self, place: str) -> None:
        """Raise one error that lists everything."""
        kinds = {
            "the checkpoint lacks": self.missing,
            "the training state lacks": self.unexpected,
            "differ": self.mismatched,
        }
        if not any(kinds.values()):
            return
        listed = "; ".join(
            f"{len(keys)} {verb}: {first_of(keys, _SHOWN)}" for verb, keys in kinds.items() if keys
        )
        raise IncompatibleCheckpointError(
            f"{place} does not fit the training state, and nothing was loaded. {listed}. "
            "It is probably another model's: check the configuration; or load only what fits, by "
            "CheckpointManager.load with items=, include= or strict=False, under other names with rename=, "
            "in another dtype with cast=True",
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(self.mismatched),
        )


def _common(foreign: list[dict[_Item, list[str]]]) -> list[dict[_Item, list[str]]]:
    """Return for every rank the names foreign to all ranks that load their item."""
    found: dict[_Item, list[str]] = {}
    for own in foreign:
        for item, names in own.items():
            known = set(names)
            found[item] = [name for name in found.get(item, names) if name in known]
    return [found] * len(foreign)


def _fits(value: Any, saved: object) -> bool:
    """Return whether nothing has to be looked at more closely: so it is of nearly all."""
    return (
        type(value) in PLAIN
        and isinstance(saved, TensorStorageMetadata)
        and (value.shape, value.dtype) == (saved.size, saved.properties.dtype)
        and value.is_contiguous()
    )


def _mismatch(value: Any, saved: object, *, cast: bool) -> str | None:
    tensor_like = hasattr(value, "size") and hasattr(value, "dtype")
    if not isinstance(saved, TensorStorageMetadata):
        return "a tensor here, a plain value in the checkpoint" if tensor_like else None
    if not tensor_like:
        return "a plain value here, a tensor in the checkpoint"
    if torch.Size(value.size()) != saved.size:
        return f"shape {tuple(value.size())} here, {tuple(saved.size)} in the checkpoint"
    if value.dtype != saved.properties.dtype and not cast:
        return f"{value.dtype} here, {saved.properties.dtype} in the checkpoint"
    if isinstance(value, torch.Tensor) and is_expanded(value):
        return "expanded here (elements share memory), so that nothing can be loaded into it; clone() it"
    return None


def _foreign(target: Mapping[str, Any], items: Collection[str], metadata: Metadata) -> dict[str, list[str]]:
    """Find saved entries, of items to load, that the live state lacks."""
    paths: Paths = metadata.planner_data or {}
    found: dict[str, list[str]] = {item: [] for item in items}
    for key in metadata.state_dict_metadata:
        names = found.get(_item(paths.get(key, (key,))))
        if names is not None and key not in target:
            names.append(key)
    return found


def _item(path: tuple[str | int, ...]) -> str:
    """Return the item of an entry; `items` holds several, loaded one by one."""
    return ".".join(map(str, path[:2])) if path[0] == "items" else str(path[0])


@final
@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """Chunks that torch rebuilds: of a wrapped tensor, or one not contiguous.

    `live` is this rank's part of the tensor, or of one chunk of it.
    """

    name: str
    live: torch.Tensor
    chunks: list[tuple[Callable[[], torch.Tensor], Cut]]
    wrapped: bool = False

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Read and compare what is stored; return copies, target and source."""
        if not self.wrapped:
            ((read, item),) = self.chunks
            return [(self.live, _narrowed(read(), item.storage_offsets, item.lengths))]
        try:
            return fillings(self.live, [(read(), item) for read, item in self.chunks])
        except WrapMismatchError as error:
            raise IncompatibleCheckpointError(
                f"{self.name}: {error}. Nothing was loaded", mismatched=[self.name]
            ) from error


@final
class PartLoad:
    """The load of one part of the live state, flattened as DCP does.

    Attributes:
        target: nested: tensors to fill, and plain values, which `plan` sets.
        reads: the reads of the tensors, after `plan`.
        unlike: entries that are wrapped in the checkpoint or here but not in both, after `plan`; not loaded.
    """

    def __init__(self, part: str, target: StateDict, metadata: Metadata, *, allow_pickle: bool) -> None:
        self.target = dict(target)
        self.reads: list[TensorRead] = []
        self.unlike: dict[tuple[str | int, ...], bool] = {}
        self._part = part
        self._metadata = metadata
        self._allow_pickle = allow_pickle
        leaves = Leaves(self.target)
        self.paths: dict[str, tuple[str | int, ...]] = leaves.by_name()
        self.entries: dict[str, Any] = dict(zip(self.paths, leaves.values, strict=True))
        self._rebuilt: list[_Rebuilt] = []
        self._wrapped: dict[MetadataIndex, _Rebuilt] = {}
        self._kept: set[str] = set()

    def leave_tied(self) -> None:
        """Exclude what the checkpoint lacks if it has another name of the same tensor."""
        saved = self._metadata.state_dict_metadata
        if self.entries.keys() <= saved.keys():
            return
        own = {
            key: _memory(value)
            for key, value in self.entries.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        }
        there = {memory for key, memory in own.items() if key in saved}
        self.leave([key for key, memory in own.items() if key not in saved and memory in there])

    def leave(self, keys: Collection[str]) -> None:
        """Exclude these entries; remove plain values among them from the target."""
        for key in keys:
            if not isinstance(self.entries.pop(key), torch.Tensor):
                container, last = _container(self.target, self.paths[key]), self.paths[key][-1]
                if isinstance(container, dict):
                    del container[last]
                else:
                    container[last] = None

    def prefer_kept(self, rank: int) -> None:
        """Load the values that `rank` kept, where it did, instead of the lowest rank's."""
        saved, live = self._metadata.state_dict_metadata, self.entries
        prefix = kept_name(rank, "")
        for own in [name for name in saved if name.startswith(prefix)]:
            if (key := own.removeprefix(prefix)) not in live:
                continue
            value = live[key]
            if isinstance(value, torch.Tensor):
                value = held_by_this_rank(value)
                if value.shape != cast("TensorStorageMetadata", saved[own]).size:
                    continue  # this rank holds another part now
            del live[key]
            live[own] = value
            self.paths[own] = self.paths[key]
            self._kept.add(own)

    def plan(self, contents: CheckpointPart, selection: Selection) -> None:
        """Locate the chunks to read, and read the plain values.

        Raises:
            UnsafeCheckpointError: a value can be rebuilt by pickle only, which is not allowed.
        """
        saved, cuts = self._metadata.state_dict_metadata, Cuts()
        wanted: list[tuple[MetadataIndex, MetadataIndex, Cut]] = []  # stored, live
        values: list[MetadataIndex] = []
        for key, value in self.entries.items():
            entry = saved[key]
            if not isinstance(entry, TensorStorageMetadata):
                values.append(MetadataIndex(key))
                continue
            for live in cuts.live(value):
                index = MetadataIndex(key, live.offsets)
                for cut in cuts.of(entry.chunks, live.offsets, live.sizes):
                    stored = index if cut.chunk == live.offsets else MetadataIndex(key, cut.chunk)
                    wanted.append((stored, index, cut))
        places = contents.find([*values, *dict.fromkeys(stored for stored, _, _ in wanted)])
        for index in values:
            self._read_value(index, contents, places[index], selection)
        for stored, index, cut in wanted:
            self._plan_tensor(index, cut, places[stored], contents)

    def _read_value(
        self, index: MetadataIndex, contents: CheckpointPart, place: ChunkLocation, selection: Selection
    ) -> None:
        key = index.fqn
        value = load_value(contents.read_entry(place), key, allow_pickle=self._allow_pickle)
        path = self.paths[key]
        lists_parameters = "param_groups" in path and path[-1] == "params"
        container = _container(self.target, path)
        container[path[-1]] = selection.renamed(value) if lists_parameters else value

    def _plan_tensor(
        self,
        live: MetadataIndex,
        cut: Cut,
        place: ChunkLocation,
        contents: CheckpointPart,
    ) -> None:
        key, value = live.fqn, self.entries[live.fqn]
        name, is_plain = f"{self._part}/{key}", type(value) in PLAIN
        own = value if is_plain else own_part(value)
        if is_wrapped(own) != place.wrapped:
            known: Paths = self._metadata.planner_data or {}
            self.unlike[tuple(known.get(key, (key,)))] = place.wrapped
        elif place.wrapped:
            if live not in self._wrapped:
                self._wrapped[live] = _Rebuilt(name, own, [], wrapped=True)
                self._rebuilt.append(self._wrapped[live])
            self._wrapped[live].chunks.append((partial(contents.read_chunk, place), cut))
            return
        target = (value if is_plain else find_tensor_shard(value, live)).detach()
        target = _narrowed(target, cut.dest_offsets, cut.lengths)
        if place.payload is None or place.form is None:
            self._rebuilt.append(_Rebuilt(name, target, [(partial(contents.read_chunk, place), cut)]))
        else:
            dtype, shape = place.form
            part = TensorTarget(shape=shape, dtype=dtype, offsets=cut.storage_offsets, tensor=target)
            self.reads.append(TensorRead(name=name, payload=place.payload, target=part))

    def common(self) -> Iterator[tuple[str, Any]]:
        """Yield the live entries that other ranks may hold, by the names of their reads."""
        for key, value in self.entries.items():
            if key not in self._kept and not isinstance(value, ShardedTensor):
                yield f"{self._part}/{key}", value

    def read_rebuilt(self, *, into_place: bool) -> None:
        """Read and verify the chunks that torch rebuilds, into their tensors if wanted."""
        with torch.no_grad():
            for each in self._rebuilt:
                for target, source in each.copies():
                    if into_place:
                        target.copy_(source)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor have in common."""
    own = own_part(tensor)
    place = id(own) if is_wrapped(own) or own.device.type == "meta" else own.data_ptr()
    return own.device, place, own.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def _container(target: Any, path: Sequence[str | int]) -> Any:
    for step in path[:-1]:
        target = target[step]
    return target


def with_kinds(saved: SavedState, unlike: Mapping[str, Unlike]) -> SavedState:
    """Note in the entries of a checkpoint, by part, which are wrapped."""
    parts: dict[str, SavedEntries] = {}
    for part, entries in saved.sharded.items():
        known = unlike.get(part, {})
        parts[part] = {
            path: replace(entry, wrapped=known[path]) if entry is not None and path in known else entry
            for path, entry in entries.items()
        }
    return replace(saved, sharded=parts)


def refuse_unlike(unlike: Mapping[str, Unlike], place: str) -> None:
    """Refuse entries that are wrapped in the checkpoint or here, but not in both."""
    found = {".".join(map(str, path)): kind for of_part in unlike.values() for path, kind in of_part.items()}
    if not found:
        return
    listed: list[str] = []
    for wrapped, place_of, other in (
        (True, "in the checkpoint", "here"),
        (False, "here", "in the checkpoint"),
    ):
        if names := [name for name, kind in found.items() if kind == wrapped]:
            listed.append(
                f"{first_of(names, _SHOWN_UNLIKE)}: made of other tensors (quantised, for example) "
                f"{place_of}, and at least in part plain {other}"
            )
    raise IncompatibleCheckpointError(
        f"{place} does not fit the training state, and nothing was loaded: {'; '.join(listed)}. Quantise the "
        "model before the load as it was when it was saved. What an optimizer keeps quantised depends on the "
        "size of each rank's shard: load on as many ranks as saved",
        mismatched=sorted(found),
    )
