"""Checkpoints of others made ours, without loading a model."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import accumulate, count, filterfalse, groupby, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckpt_core._torch_internals import StorageInfo
from ckpt_core._version import __version__
from ckpt_core.commit import (
    Catalog,
    ItemKind,
    Lease,
    Manifest,
    abandon,
    begin,
    collect_orphans,
    commit,
    present_lineage,
    refuse_as_root,
    verify,
)
from ckpt_core.convert._fill import FileFill, size_of
from ckpt_core.convert._huggingface import safetensors_file
from ckpt_core.convert._laid_out import DTYPES, OutFile, Wanted, ignore, phase
from ckpt_core.convert._whole_state import WholeState
from ckpt_core.coordination import Coordinator, Solo
from ckpt_core.dcp import Image, ImageLayout, ShardSpec, encode_metadata, entries
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError, SaveError, lost
from ckpt_core.formats.checksums import CRC32, Checksum
from ckpt_core.formats.chunks import encode_table
from ckpt_core.loading import CheckpointPart, CommittedFiles, LocatedTensor, located, open_parts
from ckpt_core.names import (
    IMPORTED,
    IN_FILES,
    KEPT,
    MANIFEST,
    MARKER,
    METADATA,
    SHARED,
    chunks_name,
    data_name,
    data_rank,
    is_own_file,
    step_name,
)
from ckpt_core.provenance import software_versions
from ckpt_core.reading import page_memory
from ckpt_core.root import WeightsDraft
from ckpt_core.saving import RankFiles
from ckpt_core.sources import NameTable
from ckpt_core.state import PICKLED
from ckpt_core.storage import Storage, open_around, open_storage
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage, Parent

_SHARDS, _VALUES = 0, 1
"""The numbers that `RankFiles` gives to its data files."""
_FILE_BYTES: Final = 64 << 20
"""Of a data file, which is made in memory; it may have twice as many."""


def _claim(root: Storage) -> Lease:
    return Lease.acquire(root, "ckpt import")


def import_checkpoint(  # noqa: PLR0913 - keywords of users
    place: str | os.PathLike[str],
    root: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    names: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = ignore,
    claim: Callable[[Storage], AbstractContextManager[Lease]] = _claim,
    coordinator: Coordinator | None = None,
) -> CheckpointInfo:
    """Make a committed checkpoint of what others wrote, without loading the model.

    A load from it gives what a load from the place gives, optimizer and positions included. Reads, verifies
    and writes 128 MiB at a time. Collective over the ranks of a coordinator.

    Args:
        place: a folder or a file, as a path or URL, of any format that `CheckpointManager.load` takes as
            `source`.
        root: of the run that gets it, and that no live job writes to.
        step: optimizer steps done; None if the place says it.
        names: of parameters and modules there -> ours, in order: the first that fits counts, with `*` for
            any one part.
        storage_options: for URLs.
        progress: called with bytes that are written.
        claim: takes the root; by default as a manager does.
        coordinator: of the ranks that each write a share of the files; None for this process alone.

    Returns:
        The checkpoint, of the present lineage of the root.

    Raises:
        CheckpointNotFoundError: nothing that is known is there.
        CorruptCheckpointError: it is damaged, or incomplete.
        UnsafeCheckpointError: only code could rebuild what it holds.
        CheckpointExistsError: the root has a checkpoint of the step already.
        RootBusyError: a live job writes to the root.
        ConfigError: the place does not say its step, or is a checkpoint of ours.
    """
    shown = public_url(os.fspath(place))
    kind, state = _state_at(place, shown, names, storage_options)
    step = state.step if step is None else step
    if step is None or step < 0:
        raise ConfigError(f"{shown} does not say at which step it was saved: give its number, --step N")
    target = root if isinstance(root, Storage) else open_storage(root, storage_options)
    refuse_as_root(target)
    target.check_root()
    producer = {"ckpt_suite": __version__, "torch": torch.__version__, **software_versions()}
    ranks, name, save_id = coordinator or Solo(), step_name(step), secrets.token_hex(12)
    lineage, leases = Lineage(), list[Lease]()
    with ExitStack() as held:
        working = ""
        with phase(ranks, "beginning an import"):
            if ranks.is_coordinator:
                leases.append(held.enter_context(claim(target)))
                lineage = _lineage_for(target, step)
                working = begin(target, name, save_id)
        working = ranks.broadcast(working)
        written = _Writer(target, working, progress, ranks)
        try:
            written.write(state)
            manifest = Manifest(
                save_id=save_id,
                step=step,
                created=time.time(),
                world_size=max(1, len(state.per_rank)),
                items=written.items,
                annotations={"imported": {"from": shown, "format": kind}},
                producer={**producer, IMPORTED: kind},
                num_chunks=written.num_chunks,
                lineage=lineage,
                files=tuple(sorted(written.entries, key=attrgetter("path"))),
            )
            with phase(ranks, "committing an import"):
                if ranks.is_coordinator:
                    commit(target, working, name, manifest, check=leases[0].check)
        except BaseException as error:
            if ranks.is_coordinator and not (isinstance(error, SaveError) and error.in_doubt):
                abandon(target, working)
            raise
    return Catalog(target).find(name=name)


def _lineage_for(target: Storage, step: int) -> Lineage:
    """Return the lineage of an import, where leftovers of others are removed first."""
    collect_orphans(target, keep=())
    there = Catalog(target).survey().everything
    if any(info.step == step and not info.abandoned for info in there):
        raise CheckpointExistsError(
            f"{target.url} has a checkpoint of step {step} already; nothing was written. Name another "
            "root, or give the step another number: --step N"
        )
    lineage = present_lineage(there)
    return lineage if lineage.number else Lineage(id=secrets.token_hex(4), number=1)


def _state_at(
    place: str | os.PathLike[str],
    shown: str,
    names: Mapping[str, str] | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[str, WholeState]:
    """Open what others wrote; return what it is, too."""
    storage, directory, file = open_around(place, storage_options)
    is_run = not file and Catalog(open_storage(place, storage_options)).survey().everything
    if is_run or (not file and storage.exists(f"{directory}/{MARKER}")):
        raise ConfigError(f"{shown} is a checkpoint or a run of ours: copy it, `ckpt cp {shown} ROOT`")
    # What was made of a checkpoint of ours has the parts of that one.
    whole = not file and not storage.exists(f"{directory}/{SHARED}")
    _, files, parts = open_parts(storage, directory, file=file, whole="state" if whole else "")
    if names:
        table = NameTable(tuple(names.items()))
        parts = {part: each.renamed(table.of_all) for part, each in parts.items()}
    first = next(iter(parts.values()))
    return first.kind or "a checkpoint of DCP", WholeState.of(files, parts, first.step)


def write_weights(storage: Storage, info: CheckpointInfo, dtype: str | None = None) -> None:
    """Write the weights of a checkpoint beside it, as a draft that counts for nothing.

    Of a whole state stay the models and their averages, what ranks share, and the files of the host; without
    optimizers, gradients, and what ranks have of their own. See `WeightsDraft` for the place, in a root that
    the caller owns. `dtype` is `bf16`, `fp16` or `fp32`, of all floating tensors; None for their own.

    Raises:
        ConfigError: it holds no weights.
        CorruptCheckpointError: it is damaged.
        OSError: storage failed.
    """
    draft, (manifest, files, state) = WeightsDraft.of(storage, info, dtype), _weights_of(storage, info, dtype)
    working = begin(storage, draft.name, draft.save_id)
    written = _Writer(storage, working)
    written.write(state)
    hosts = _hosts_weights(storage, info, state)
    with RankFiles(storage, working) as others:
        for path in filterfalse({*hosts}.__contains__, filterfalse(is_own_file, files.paths)):
            others.write(path, files.read(path))
        written.entries += others.entries
    for path, (file, tensors) in hosts.items():
        written.entries.append(_stream(storage, f"{working}/{path}", file, tensors))
    found = replace(
        manifest,
        save_id=draft.save_id,
        items={name: kind for name, kind in manifest.items.items() if name in written.items},
        num_chunks=written.num_chunks,
        files=tuple(sorted(written.entries, key=attrgetter("path"))),
        weights_of=Parent.of(info),
        replicas=1,
        groups=(),
    )
    storage.write_bytes(f"{working}/{MANIFEST}", found.to_bytes())


def weights_bytes(storage: Storage, info: CheckpointInfo, dtype: str | None = None) -> int:
    """Return how many bytes the weights of a checkpoint will have; errors likewise."""
    _, files, state = _weights_of(storage, info, dtype)
    hosts = _hosts_weights(storage, info, state)
    others = (each for each in files.entries if data_rank(each.path) is None and each.path not in hosts)
    size = sum(each.size_bytes for each in others)
    size += sum(size_of(piece, tensors) for file, tensors in hosts.values() for piece in file.pieces)
    for directory, part in state.parts.items():
        tensors = located({directory: part})
        dtypes = {name: _cast(each.dtype, state.dtype) for name, each in tensors.items()}
        for slabs in _windows(tensors.values(), dtypes):
            size += ImageLayout([slab.spec for slab in slabs]).size_bytes
    return size


def _weights_of(
    storage: Storage, info: CheckpointInfo, dtype: str | None
) -> tuple[Manifest, CommittedFiles, WholeState]:
    manifest, files, parts = open_parts(storage, info.name, committed=info.manifest_sha256)
    state = WholeState.of(files, parts)
    in_files = {f"model.{name}" for name in state.shared.get(IN_FILES, {})}
    every = {name: _light(part, without=in_files) for name, part in parts.items()}
    light = {name: part for name, part in every.items() if located({name: part})}
    if manifest is None or not (light or in_files):
        raise ConfigError(f"{files.url} holds no weights")
    state = replace(state, parts=light or every)
    small = {name: content for name, content in state.small.items() if name not in state.per_rank}
    cast = None if dtype is None else DTYPES[dtype]
    return manifest, files, replace(state, per_rank={}, small=small, dtype=cast)


def _hosts_weights(
    storage: Storage, info: CheckpointInfo, state: WholeState
) -> dict[str, tuple[OutFile, Mapping[str, LocatedTensor]]]:
    """Lay out the host's safetensors with the model, verified: path -> file."""
    paths = {file for file, _ in state.shared.get(IN_FILES, {}).values() if file.endswith(".safetensors")}
    if failures := lost(verify(storage, info.name, paths=sorted(paths)) if paths else []):
        raise CorruptCheckpointError(f"{storage.url}/{info.name}/{failures[0]}", failures=tuple(failures))
    found: dict[str, tuple[OutFile, Mapping[str, LocatedTensor]]] = {}
    for path in sorted(paths):
        tensors = located(open_parts(storage, info.name, file=path)[2])
        pieces = {
            ".".join(map(str, each.path[1:])): Wanted(name, _cast(each.dtype, state.dtype))
            for name, each in tensors.items()
        }
        found[path] = safetensors_file(path, pieces, tensors), tensors
    return found


def _stream(storage: Storage, key: str, file: OutFile, tensors: Mapping[str, LocatedTensor]) -> FileEntry:
    """Write a file window by window; return its entry."""
    running, size = Checksum(CRC32), 0

    def windows() -> Iterator[memoryview]:
        nonlocal size
        for window in fill.windows(file):
            running.update(window)
            size += len(window)
            yield window

    with FileFill(tensors) as fill:
        storage.write_pieces(key, windows())
    return FileEntry(path=file.path, size_bytes=size, checksum=str(running))


def _light(part: CheckpointPart, *, without: Collection[str]) -> CheckpointPart:
    """Return a part without optimizers and the like, and without some entries."""
    found, paths, heavy = part.metadata, part.paths, part.heavy()
    kept = {key: path for key, path in paths.items() if path[0] not in heavy and key not in without}
    entries = {key: found.state_dict_metadata[key] for key in kept}
    return replace(part, metadata=replace(found, state_dict_metadata=entries, planner_data=kept))


@final
class _Writer:
    """The files of a checkpoint, as a save with a rank for each data file has them.

    Attributes:
        entries: of the files written.
        items: how each is stored.
        num_chunks: in all of them.
    """

    def __init__(
        self,
        storage: Storage,
        working: str,
        progress: Callable[[int], None] = ignore,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._storage, self._working, self._progress = storage, working, progress
        self._coordinator = coordinator or Solo()
        self._ranks = count()
        self._memory = page_memory(1)
        self.entries: list[FileEntry] = []
        self.items: dict[str, ItemKind] = {}
        self.num_chunks = 0

    def write(self, state: WholeState) -> None:
        """Write all of a state. Collective: each rank writes a share of the data files."""
        with phase(self._coordinator, "writing the files of an import"):
            metadata = {
                f"{name}/{METADATA}".lstrip("/"): self._part(state, name, part)
                for name, part in state.parts.items()
            }
            if self._coordinator.is_coordinator:
                with RankFiles(self._storage, self._working) as files:
                    for name, content in {**metadata, **state.small}.items():
                        files.write(name, content)
                    self.entries += files.entries
        own = [(each.path, each.size_bytes, each.checksum) for each in self.entries]
        shares = self._coordinator.gather(own, what="listing the files of an import")
        self.entries = [
            FileEntry(path=path, size_bytes=size, checksum=text)
            for share in shares
            for path, size, text in share
        ]
        self.items |= dict.fromkeys(state.shared, "shared")
        self.items |= {item: "per_rank" for items in state.per_rank.values() for item in items}

    def _part(self, state: WholeState, directory: str, part: CheckpointPart) -> bytes:
        """Write this rank's share of the data files of a part; return its metadata."""
        found = part.metadata
        tensors = located({directory: part})
        dtypes = {name: _cast(each.dtype, state.dtype) for name, each in tensors.items()}
        values = {MetadataIndex(key): content for key, (_, content) in state.entries(part).items()}
        chunks = defaultdict[str, list[ChunkStorageMetadata]](list)
        places: dict[MetadataIndex, StorageInfo] = {}
        with FileFill(tensors) as fill:
            for slabs in list(_windows(tensors.values(), dtypes)) or [[]]:
                rank, layout = next(self._ranks), ImageLayout([slab.spec for slab in slabs])
                if rank % self._coordinator.world_size == self._coordinator.rank:
                    with RankFiles(self._storage, self._working, rank) as files:
                        self._image(files, directory, slabs, fill, layout=layout)
                        files.write_values(directory, values)
                        files.write(chunks_name(rank), encode_table(files.tables))
                        self.entries += files.entries
                for (index, _, shape), (start, end) in zip(
                    (slab.spec for slab in slabs), layout.spans.tolist(), strict=True
                ):
                    box = ChunkStorageMetadata(index.offset or torch.Size(()), torch.Size(shape))
                    chunks[index.fqn].append(box)
                    places[index] = StorageInfo(data_name(rank, _SHARDS), start, end - start)
                ends = list(accumulate(map(len, values.values()), initial=0))
                for index, (start, end) in zip(values, pairwise(ends), strict=True):
                    places[index] = StorageInfo(data_name(rank, _VALUES), start, end - start)
                values = {}
        described = dict(found.state_dict_metadata)
        for key, entry in found.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                properties = replace(entry.properties, dtype=_cast(entry.properties.dtype, state.dtype))
                described[key] = replace(entry, properties=properties, chunks=chunks[key])
        self.num_chunks += len(places)
        self.items |= {str(path[0]): "sharded" for path in entries(found) if path[0] not in {PICKLED, KEPT}}
        return encode_metadata(Metadata(described, planner_data=found.planner_data), places)

    def _image(
        self, files: RankFiles, directory: str, slabs: Sequence[_Slab], fill: FileFill, *, layout: ImageLayout
    ) -> None:
        if layout.size_bytes > len(self._memory):
            self._memory = page_memory(layout.size_bytes)
        image = Image(layout, torch.frombuffer(self._memory, dtype=torch.uint8))
        starts, ends = zip(*layout.payloads, strict=True) if slabs else ((), ())
        fill.read_into(
            (Wanted(slab.name, slab.spec[1]), slab.start, self._memory[start:end])
            for slab, start, end in zip(slabs, starts, ends, strict=True)
        )
        files.write_image(directory, image)
        self._progress(layout.size_bytes)


class _Slab(NamedTuple):
    """A box of a tensor whose bytes follow one another, from one of them on."""

    name: str
    start: int
    size_bytes: int
    spec: ShardSpec


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _slabs(tensor: LocatedTensor, dtype: torch.dtype) -> Iterator[_Slab]:
    """Cut a tensor into slabs of at most `_FILE_BYTES`, by rows or what is in them."""
    key, itemsize = ".".join(map(str, tensor.path)), dtype.itemsize

    def cut(offsets: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[_Slab]:
        size = prod(shape) * itemsize
        dim = next((dim for dim, length in enumerate(shape) if length > 1), None)
        if dim is None or size <= _FILE_BYTES:
            start = 0
            for offset, length in zip(offsets, tensor.shape, strict=True):
                start = start * length + offset
            yield _Slab(tensor.name, start * itemsize, size, (MetadataIndex(key, offsets), dtype, shape))
            return
        most = max(1, _FILE_BYTES * shape[dim] // size)
        for start in range(0, shape[dim], most):
            length = min(most, shape[dim] - start)
            at, end = (*offsets[:dim], start), dim + 1
            yield from cut((*at, *offsets[end:]), (*shape[:dim], length, *shape[end:]))

    return cut((0,) * len(tensor.shape), tensor.shape)


def _windows(tensors: Iterable[LocatedTensor], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[_Slab]]:
    """Yield the slabs of each data file, of at most twice `_FILE_BYTES`."""
    slabs = [slab for tensor in tensors for slab in _slabs(tensor, dtypes[tensor.name])]
    ends = accumulate(slab.size_bytes for slab in slabs)
    for _, window in groupby(zip(ends, slabs, strict=True), lambda pair: pair[0] // _FILE_BYTES):
        yield [slab for _, slab in window]
