"""An open checkpoint directory: its small files, and the locations of large data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from math import prod
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core.commit import Catalog, Manifest, plain_storage
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import (
    ChunkLocation,
    ChunkLocator,
    check_metadata,
    checked_zip,
    entries,
    load_chunk,
    load_value,
    metadata_of,
    value_entry,
)
from ckpt_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    unreadable,
)
from ckpt_core.formats.checksums import crc32
from ckpt_core.formats.consistency import check
from ckpt_core.formats.dcp_metadata import collector_paused
from ckpt_core.formats.frames import plain_entry
from ckpt_core.formats.index import decode
from ckpt_core.formats.zips import ZipError
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.loading._selection import Selection
from ckpt_core.names import (
    IMPORTED,
    IN_FILES,
    KEPT,
    MANIFEST,
    MARKER,
    METADATA,
    SHARED,
    local_name,
    rank_name,
    shared_name,
    shared_rank,
)
from ckpt_core.reading import Engine
from ckpt_core.sources import (
    Layout,
    LayoutLocator,
    Locator,
    MegatronLocator,
    Path,
    StoredTensor,
    find_common,
    read_header,
    recognise,
)
from ckpt_core.state import PICKLED, BufferKey, decode_buffers, decode_items, is_of_base, pickled_key
from ckpt_core.storage import BIGGEST_SMALL_FILE, Storage, read_intact
from ckpt_core.types import SavedState

Whole: TypeAlias = Literal["", "state", "model"]
"""Whether all parts are one, as those of a state, or of the weights of a model."""
_MODEL: Final = "model"
_OF_PARAMETERS: Final = frozenset({_MODEL, "master"})
"""Items that name parameters."""
_HEAVY: Final = frozenset({"optimizer", "optimizers", "gradients", PICKLED, KEPT})
"""Items that are no weights, beside those that have groups of parameters."""
_OTHERS: Final = frozenset({"items", "lightning"})
"""Items of objects, which are no model."""
_NUMBERED: Final = re.compile(r"(?:pytorch_model_fsdp|optimizer|gradients|custom_checkpoint)_\d+")
"""Parts with a model, an optimizer or an object each, of several."""
_OF_FILES: Final = "model_0"
"""The part whose tensors a host's own files may hold."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPart:
    """One part of a checkpoint: its entries and their locations.

    Attributes:
        kind: what others wrote, for people; "" if it is ours or of stock DCP.
        step: the training's, if others wrote it and it says so.
    """

    metadata: Metadata
    _original: Mapping[str, str]
    _places: Locator
    _storage: Storage
    _files: CommittedFiles
    _allow_pickle: bool
    _values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: str = ""
    step: int | None = None

    @property
    def files(self) -> CommittedFiles:
        """The files of its checkpoint."""
        return self._files

    @property
    def paths(self) -> dict[str, Path]:
        """The path of each entry in the nested state, by its name."""
        known: Mapping[str, Path] = self.metadata.planner_data or {}
        return {key: tuple(known.get(key, (key,))) for key in self.metadata.state_dict_metadata}

    def heavy(self) -> frozenset[str]:
        """Return the items that are no weights: optimizers, gradients and the like."""
        return _HEAVY | {str(path[0]) for path in self.paths.values() if "param_groups" in path}

    def engine(self) -> Engine:
        """Return a reader of the files that can compare on arrival."""
        return Engine(self._storage, self._files.directory, once=True)

    def require_there(self) -> None:
        """Raise if a checkpoint of ours was pruned since it was opened.

        Raises:
            CheckpointNotFoundError: it was.
        """
        if self._files.is_ours:
            Catalog(self._storage).marker(self._files.directory)

    def renamed(self, table: Callable[[Iterable[str]], Mapping[str, str]]) -> CheckpointPart:
        """Return it with other names in the model, and in the optimizer's state.

        Raises:
            ConfigError: two entries would have one name.
        """
        paths = self.paths
        new = table({str(path[1]) for path in paths.values() if path[0] in _OF_PARAMETERS and len(path) > 1})
        keys: dict[str, str] = {}
        found = Metadata({}, {}, {})
        values = dict(self._values)
        for key, path in paths.items():
            own = (path[0], *(new.get(str(each), each) for each in path[1:]))
            name = keys[key] = ".".join(map(str, own))
            found.state_dict_metadata[name] = self.metadata.state_dict_metadata[key]
            found.planner_data[name] = own
            if "param_groups" in path and path[-1] == "params":
                index = MetadataIndex(key)
                listed = load_value(self.read_entry(self.find([index])[index]), key, allow_pickle=False)
                values[key] = [new.get(each, each) for each in listed]
        return replace(
            self, metadata=found, _original={name: key for key, name in keys.items()}, _values=values
        )

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        """Locate these entries; errors as by `ChunkLocator.find`."""
        if not self._original:
            return self._places.find(indices)
        saved = {MetadataIndex(self._original.get(i.fqn, i.fqn), i.offset): i for i in indices}
        return {saved[index]: place for index, place in self._places.find(saved).items()}

    def read_entry(self, place: ChunkLocation) -> bytes:
        """Read and verify the stored bytes of a byte entry."""
        if place.key in self._values:
            return value_entry(self._values[place.key])
        content = self._checked(place, None if place.payload is None else place.payload.crc32)
        checked_zip(content, self._name(place), trusted=self._allow_pickle)
        return content

    def _checked(self, place: ChunkLocation, expected: int | None) -> bytes:
        """Read bytes, or else those of the twin, and compare them with their CRC-32."""
        other = "its checksum differs from that in the chunk table"
        if expected is None and (failures := self._files.damaged_files([place.path])):
            raise CorruptCheckpointError(f"{self._files.url}/{failures[0]}", failures=tuple(failures))

        def read(path: str) -> bytes:
            there = replace(place, path=path)
            content, problem = read_intact(
                self._storage,
                f"{self._files.directory}/{path}",
                lambda each: self._read(there, each),
                lambda content: "" if expected in {None, crc32(content)} else other,
            )
            if problem:
                raise self._damaged(there, problem)
            return content

        return self._files.whole_of(place.path, read)

    def read_tensor(self, place: ChunkLocation, dtype: torch.dtype) -> torch.Tensor:
        """Read and verify a tensor chunk, neither wrapped nor empty; it may be flat."""
        payload = place.payload
        if payload is None:
            return self.read_chunk(place)
        inner = replace(place, offset=payload.offset, size_bytes=payload.size_bytes)
        return torch.frombuffer(bytearray(self._checked(inner, payload.crc32)), dtype=dtype)

    def read_chunk(self, place: ChunkLocation) -> torch.Tensor:
        """Read, verify and rebuild a tensor chunk whose elements are not contiguous."""
        if place.strides is not None and place.form is not None:
            dtype, shape = place.form
            content = bytearray(self._read(place, self._storage))
            return torch.frombuffer(content, dtype=dtype).as_strided(shape, place.strides)
        return load_chunk(self._read(place, self._storage), self._name(place), place.form)

    def _read(self, place: ChunkLocation, storage: Storage) -> bytes:
        try:
            content = self._files.read_at(place.path, place.offset, place.size_bytes, storage)
        except FileNotFoundError:
            raise self._damaged(place, "missing") from None
        except OSError as error:
            raise self._damaged(place, unreadable(error)) from error
        if len(content) != place.size_bytes:
            raise self._damaged(place, f"ends {place.size_bytes - len(content)} bytes too early")
        dtype, shape = place.form or (torch.uint8, (BIGGEST_SMALL_FILE,))
        try:
            return plain_entry(content, place.transforms, prod(shape) * dtype.itemsize)
        except ZipError as error:
            raise self._damaged(place, str(error)) from error
        except IncompatibleCheckpointError as error:
            raise error.retold(f"{self._name(place)}: {error}") from None

    def _name(self, place: ChunkLocation) -> str:
        return f"{self._files.url}/{place.path}: {place.key!r:.200}"

    def _damaged(self, place: ChunkLocation, problem: str) -> CorruptCheckpointError:
        failure = FileFailure(path=place.path, problem=f"{place.key!r:.200}: {problem}")
        return CorruptCheckpointError(f"{self._name(place)}: {problem}", failures=(failure,))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint: its small values, and the locations of its tensors.

    Attributes:
        local: buffers in which this rank differed.
        loads_kept: whether to load values that this rank kept for itself.
        drops_kept: whether ranks kept values that cannot be loaded, because the number of ranks has changed.
    """

    files: CommittedFiles
    contents: Mapping[str, CheckpointPart]
    saved: SavedState
    local: Mapping[BufferKey, Any]
    loads_kept: bool = False
    drops_kept: bool = False


@collector_paused()
def open_checkpoint(  # noqa: PLR0913 - what a request says, but without its class, which stands above
    storage: Storage,
    directory: str,
    coordinator: Coordinator,
    *,
    selection: Selection,
    allow_pickle: bool,
    committed: bool | str = False,
    file: str = "",
    whole: Whole = "",
) -> OpenCheckpoint:
    """Open a checkpoint of ours or, unless known to be `committed`, of others.

    If `committed` is a SHA-256, only the checkpoint with that manifest is accepted. For `whole` see
    `open_parts`.
    """
    manifest, files, parts = open_parts(
        storage, directory, allow_pickle=allow_pickle, committed=committed, file=file, whole=whole
    )
    metadata = {part: each.metadata for part, each in parts.items()}
    read_items = partial(_items, files, parts.get(""), allow_pickle=allow_pickle)
    rank = coordinator.rank
    same_ranks = manifest is not None and manifest.world_size == coordinator.world_size
    world_size = None if manifest is None else manifest.world_size
    if manifest is not None and (IMPORTED in manifest.producer or manifest.weights_of is not None):
        world_size = None  # it has nothing that ranks had of their own
    selected = selection.of_metadata(metadata, files.url)
    saved = SavedState(
        sharded={
            part: {path: entry for path, entry in entries(of_part).items() if path[0] not in {PICKLED, KEPT}}
            for part, (of_part, _) in selected.items()
        },
        per_rank=read_items(rank_name(rank)),
        shared={
            # A host may have called the model by another name.
            name: {**value, "place": _MODEL} if whole and is_of_base(name) else value
            for name, value in _shared(files, read_items, rank if same_ranks else None).items()
        },
        name=directory,
        world_size=world_size,
        step=parts[next(iter(parts))].step if manifest is None else manifest.step,
        annotations={} if manifest is None else manifest.annotations,
    )
    local = local_name(rank)
    has_kept = any(
        name.startswith(f"{KEPT}.") for each in metadata.values() for name in each.state_dict_metadata
    )
    return OpenCheckpoint(
        files=files,
        contents={
            part: replace(parts[part], metadata=of_part, _original=original)
            for part, (of_part, original) in selected.items()
        },
        saved=selection.of_state(saved),
        local=decode_buffers(files.read(local), local) if same_ranks and files.has(local) else {},
        loads_kept=same_ranks,
        drops_kept=not same_ranks and has_kept,
    )


def open_parts(
    storage: Storage,
    directory: str,
    *,
    allow_pickle: bool = False,
    committed: bool | str = False,
    file: str = "",
    whole: Whole = "",
) -> tuple[Manifest | None, CommittedFiles, dict[str, CheckpointPart]]:
    """Open manifest, files and whole parts of a checkpoint, or of a `file` of others.

    If `whole`, all of it is one part with the items of a `TrainState`: several folders, and what others wrote
    beside them. If it is the "model", what weights are called otherwise, as in Fabric, is the item `model`.
    """
    ours = not file and (bool(committed) or storage.exists(f"{directory}/{MARKER}"))
    digest = committed if isinstance(committed, str) else None
    manifest = Catalog(storage).manifest(directory, sha256=digest) if ours else None
    if manifest is not None and manifest.plain_sha256:
        storage = plain_storage(storage, directory, manifest)
        manifest = Catalog(storage).manifest(directory)
    files = CommittedFiles(storage, directory, manifest)
    if ours:  # other files in the directory do not count
        found = [path for path in files.paths if path.rpartition("/")[2] == METADATA]
        if not found:
            raise files.damaged(METADATA, f"not among the files that {MANIFEST} lists")
        names = sorted(path.removesuffix(METADATA).rstrip("/") for path in found)
    else:
        names = [] if file else _parts(storage, directory)
    if not names and (layout := recognise(storage, directory, file)) is not None:
        files.inside = layout.files
        return manifest, files, {"": _foreign(storage, files, layout)}
    if not names:
        raise CheckpointNotFoundError(
            f"{files.url}{'/' if file else ''}{file} holds neither a committed checkpoint ({MARKER}) "
            f"nor one that torch.distributed.checkpoint wrote ({METADATA}), nor weights or a checkpoint of "
            "any other format that is read"
        )
    parts = {part: _part(storage, files, part, allow_pickle=allow_pickle) for part in names}
    if manifest is not None and IN_FILES in manifest.items:
        of_files = parts.get(_OF_FILES)
        layout, metadata = _in_files(files), Metadata({}) if of_files is None else of_files.metadata
        parts[_OF_FILES] = _beside(storage, files, layout, metadata, places=of_files or LayoutLocator(layout))
    if whole and ("" not in parts or (ours and whole == "model")):
        beside = None if ours else recognise(storage, directory)
        joined = _whole(files, parts, beside or Layout(kind="", tensors={}), renames=whole == "model")
        parts = {"": replace(joined, _allow_pickle=allow_pickle)}
    return manifest, files, parts


def _in_files(files: CommittedFiles) -> Layout:
    """Describe the tensors of a model that only files of the host hold."""
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[Path, StoredTensor] = {}
    try:
        places = decode_items(files.read(SHARED), f"{files.url}/{SHARED}").values[IN_FILES]
        for name, (file, key) in places.items():
            if file not in headers:
                path = files.intact(file)
                header = read_header(files.storage, files.directory, path)[0]
                headers[file] = {each: stored.as_tensor(path) for each, stored in header.items()}
            if key not in headers[file]:
                raise files.damaged(file, f"lacks {key!r:.200}")
            tensors[_MODEL, name] = headers[file][key]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise files.damaged(SHARED, f"{IN_FILES!r} is not what a host wrote: {error!r:.200}") from error
    return Layout(kind="", tensors=tensors)


def _part(storage: Storage, files: CommittedFiles, part: str, *, allow_pickle: bool) -> CheckpointPart:
    """Open a part: its metadata, which is checked, and the places of its entries."""
    prefix = f"{part}/" if part else ""
    name = f"{files.url}/{prefix}{METADATA}"
    index = decode(files.read(f"{prefix}{METADATA}"), name)
    check(index, name, lambda data: files.size(f"{prefix}{data}"))
    metadata = metadata_of(index, name)
    places: Locator = ChunkLocator(
        metadata,
        part=part,
        directory=files.url,
        read_table=files.table if files.is_ours else None,
        read_at=None if files.is_ours else files.read_at,
    )
    if not (files.is_ours or part) and (common := find_common(storage, files.directory)) is not None:
        places = MegatronLocator(metadata, places, name)
        joined = _beside(storage, files, common, places.metadata, places=places)
        return replace(joined, _allow_pickle=allow_pickle)
    return CheckpointPart(
        metadata=metadata,
        _original={},
        _places=places,
        _storage=storage,
        _files=files,
        _allow_pickle=allow_pickle,
    )


def _foreign(storage: Storage, files: CommittedFiles, layout: Layout) -> CheckpointPart:
    """Open what others wrote as one part."""
    metadata = layout.metadata()
    values = {".".join(map(str, path)): value for path, value in layout.values.items()}
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if name not in values}
    check_metadata(replace(metadata, state_dict_metadata=tensors), f"{files.url} ({layout.kind})", files.size)
    return CheckpointPart(
        metadata=metadata,
        _original={},
        _places=LayoutLocator(layout),
        _storage=storage,
        _files=files,
        _allow_pickle=False,
        _values=values,
        kind=layout.kind,
        step=layout.step,
    )


@final
class _JoinedLocator:
    """Locator of entries of several parts, under other names."""

    def __init__(self, origins: Mapping[str, tuple[CheckpointPart, str]]) -> None:
        self._origins = origins

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        wanted = defaultdict[int, dict[MetadataIndex, MetadataIndex]](dict)
        parts = {id(part): part for part, _ in self._origins.values()}
        for index in indices:
            part, key = self._origins[index.fqn]
            wanted[id(part)][MetadataIndex(key, index.offset)] = index
        return {
            own[saved]: place
            for part, own in wanted.items()
            for saved, place in parts[part].find(own).items()
        }


def _whole(
    files: CommittedFiles, parts: Mapping[str, CheckpointPart], layout: Layout, *, renames: bool
) -> CheckpointPart:
    """Join parts, of models and their optimizers, with what lies beside.

    Raises:
        IncompatibleCheckpointError: two folders have entries of one name.
    """
    found, origins = Metadata({}, {}, {}), dict[str, tuple[CheckpointPart, str]]()
    paths = [(part, key, path) for part, each in parts.items() for key, path in each.paths.items()]
    holders = defaultdict[str | int, set[str]](set)
    for part, _, path in paths:
        holders[path[0]].add(part)
    several = {top for top, own in holders.items() if len(own) > 1 and all(map(_NUMBERED.fullmatch, own))}
    models = _models(parts.values()) if renames and _MODEL not in holders else ()

    def named(part: str, top: str | int, *inner: str | int) -> Path:
        own = top if top in models and len(models) > 1 else ""
        if top in several:
            own = part.rpartition("_")[2]
        item = _MODEL if top in models else top
        if not own:
            return (item, *inner)
        # As a `TrainState` names several.
        return (item, ".".join(map(str, (own, *inner)))) if item == _MODEL else (item, own, *inner)

    for part, key, old in paths:
        path = named(part, *old)
        name = ".".join(map(str, path))
        if name in origins:
            raise IncompatibleCheckpointError(
                f"{files.url} holds {name!r:.200} in several of {', '.join(parts)}: give one of these"
            )
        found.state_dict_metadata[name] = parts[part].metadata.state_dict_metadata[key]
        found.planner_data[name], origins[name] = path, (parts[part], key)
    layout = layout.without({path[0] for path in found.planner_data.values()})
    return _beside(files.storage, files, layout, found, places=_JoinedLocator(origins))


def _models(parts: Iterable[CheckpointPart]) -> set[str]:
    """Return the items with weights, whatever they are called."""
    return {
        str(path[0])
        for part in parts
        for key, path in part.paths.items()
        if len(path) > 1 and isinstance(part.metadata.state_dict_metadata[key], TensorStorageMetadata)
    }.difference(_OTHERS, *(part.heavy() for part in parts))


def _beside(
    storage: Storage, files: CommittedFiles, layout: Layout, found: Metadata, *, places: Locator
) -> CheckpointPart:
    """Join entries of DCP with what others wrote beside them."""
    beside = _foreign(storage, files, layout)
    if beside.metadata.state_dict_metadata.keys() & found.state_dict_metadata.keys():
        raise files.damaged(METADATA, f"an entry has the name of another in {layout.kind}")
    return replace(
        beside,
        metadata=Metadata(
            beside.metadata.state_dict_metadata | found.state_dict_metadata,
            beside.metadata.planner_data | (found.planner_data or {}),
        ),
        _places=LayoutLocator(layout, places),
    )


def _shared(
    files: CommittedFiles, read_items: Callable[[str], dict[str, Any]], rank: int | None
) -> dict[str, Any]:
    """Read the shared items: those that `rank` kept, the coordinator's, then others'."""
    ranks = sorted(found for path in files.paths if (found := shared_rank(path)) is not None)
    shared: dict[str, Any] = read_items(shared_name(rank)) if rank in ranks and rank is not None else {}
    for name in (SHARED, *map(shared_name, ranks)):
        shared = {**read_items(name), **shared}
    return shared


def _parts(storage: Storage, directory: str) -> list[str]:
    children = storage.list(directory)
    own = [""] if any(child.name == METADATA for child in children) else []
    inner = [
        child.name
        for child in children
        if child.is_directory and storage.exists(f"{directory}/{child.name}/{METADATA}")
    ]
    return own + inner


def is_stock(storage: Storage, directory: str) -> bool:
    """Return whether the directory, or one of its children, has DCP's metadata."""
    return bool(_parts(storage, directory))


def _items(
    files: CommittedFiles, contents: CheckpointPart | None, name: str, *, allow_pickle: bool
) -> dict[str, Any]:
    """Read a small file, and the pickled values that it refers to."""
    if not files.has(name):
        return {}
    items = decode_items(files.read(name), f"{files.url}/{name}")
    scope = "shared" if name == SHARED or shared_rank(name) is not None else name
    found = dict(items.values)
    for item in items.pickled:
        key = f"{PICKLED}.{pickled_key(scope, item)}"
        if contents is None or key not in contents.metadata.state_dict_metadata:
            raise files.damaged(METADATA, f"lacks {key}")
        index = MetadataIndex(key)
        entry = load_value(contents.read_entry(contents.find([index])[index]), key, allow_pickle=False)
        found[item] = load_value(entry, f"item {item!r}", allow_pickle=allow_pickle)
    return found


def values_beside(
    files: CommittedFiles, parts: Mapping[str, CheckpointPart]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the values in small files: the shared ones, and those of each rank.

    Raises:
        CorruptCheckpointError: a file is damaged.
        UnsafeCheckpointError: a value can only be rebuilt by code.
    """
    read = partial(_items, files, parts.get(""), allow_pickle=False)
    ranks = takewhile(files.has, map(rank_name, count()))
    return _shared(files, read, None), {name: read(name) for name in ranks}
