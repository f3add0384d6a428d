"""Checkpoints of others made ours, without loading a model."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any, Final, final

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
)
from ckpt_core.convert._fill import FileFill
from ckpt_core.convert._whole_state import WholeState
from ckpt_core.dcp import Image, ImageLayout, ShardSpec, encode_metadata, entries, places_in
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointExistsError, ConfigError, NoRoomError, SaveError
from ckpt_core.formats.chunks import ChunkTable, encode_table
from ckpt_core.loading import CheckpointPart, LocatedTensor, located, open_parts
from ckpt_core.names import IMPORTED, KEPT, MARKER, METADATA, chunks_name, step_name
from ckpt_core.options import bytes_text
from ckpt_core.provenance import software_versions
from ckpt_core.reading import page_memory
from ckpt_core.saving import RankFiles
from ckpt_core.state import PICKLED
from ckpt_core.storage import Storage, open_around, open_storage
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage

_FILE_BYTES: Final = 128 << 20
"""Of a data file, which is made in memory."""


def _ignore(_: int) -> None:
    """Ignore progress."""


def import_checkpoint(
    place: str | os.PathLike[str],
    root: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = _ignore,
) -> CheckpointInfo:
    """Make a committed checkpoint of what others wrote, without loading the model.

    A load from it gives what a load from the place gives, optimizer and positions included. Reads, verifies
    and writes 128 MiB at a time, in this process alone.

    Args:
        place: a folder or a file, as a path or URL, of any format that `CheckpointManager.load` takes as
            `source`.
        root: of the run that gets it, and that no live job writes to.
        step: optimizer steps done; None if the place says it.
        storage_options: for the URL of the place.
        progress: called with bytes that are written.

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
    target = root if isinstance(root, Storage) else open_storage(root, storage_options)
    refuse_as_root(target)
    target.check_root()
    source = open_source(place, storage_options, step=step)
    with Lease.acquire(target, "ckpt import") as lease:
        return import_into(source, target, check=lease.check, progress=progress)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSource:
    """What is to be imported, located and not read.

    Attributes:
        url: of the place, without secrets.
        kind: what it is, for people.
    """

    url: str
    kind: str
    state: WholeState
    step: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = located(self.state.parts).values()
        return sum(prod(each.shape) * each.dtype.itemsize for each in tensors)


def open_source(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, step: int | None
) -> ImportSource:
    """Open what is to be imported; errors as by `import_checkpoint`."""
    storage, directory, file = open_around(place, storage_options)
    shown = public_url(os.fspath(place))
    ours = not file and (storage.exists(f"{directory}/{MARKER}") or _holds_ours(place, storage_options))
    if ours:
        raise ConfigError(f"{shown} is a checkpoint or a run of ours: copy it, `ckpt cp {shown} ROOT`")
    _, files, parts = open_parts(storage, directory, file=file)
    first = next(iter(parts.values()))
    known = first.step if step is None else step
    if known is None or known < 0:
        raise ConfigError(f"{shown} does not say at which step it was saved: give its number, --step N")
    kind = first.kind or "a checkpoint of DCP"
    return ImportSource(url=shown, kind=kind, state=WholeState.of(files, parts), step=known)


def _holds_ours(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> bool:
    return bool(Catalog(open_storage(place, storage_options)).survey().everything)


def import_into(
    source: ImportSource,
    target: Storage,
    *,
    check: Callable[[], None],
    progress: Callable[[int], None] = _ignore,
) -> CheckpointInfo:
    """Write and commit a checkpoint to a root whose lease is held."""
    collect_orphans(target, keep=())
    there = Catalog(target).survey().everything
    lineage = present_lineage(there)
    if any(info.step == source.step and not info.abandoned for info in there):
        raise CheckpointExistsError(
            f"{target.url} has a checkpoint of step {source.step} already; nothing was written. Name another "
            "root, or give the step another number: --step N"
        )
    free = target.space().free_bytes
    if free is not None and free < source.size_bytes:
        raise NoRoomError(
            f"{source.url} needs {bytes_text(source.size_bytes)}, and {target.url} has {bytes_text(free)} "
            "free; nothing was written",
            needed_bytes=source.size_bytes,
            free_bytes=free,
        )
    name, save_id = step_name(source.step), secrets.token_hex(12)
    working = begin(target, name, save_id)
    try:
        written = _Writer(target, working, progress)
        written.write(source.state)
        manifest = Manifest(
            save_id=save_id,
            step=source.step,
            created=time.time(),
            world_size=max(1, len(source.state.per_rank)),
            items=written.items,
            annotations={IMPORTED: {"from": source.url, "format": source.kind}},
            producer={"ckpt_suite": __version__, "torch": torch.__version__, **software_versions()},
            num_chunks=written.num_chunks,
            lineage=lineage if lineage.number else Lineage(id=secrets.token_hex(4), number=1),
            files=tuple(sorted(written.entries, key=lambda entry: entry.path)),
        )
        return commit(target, working, name, manifest, check=check)
    except BaseException as error:
        if not (isinstance(error, SaveError) and error.in_doubt):
            abandon(target, working)
        raise


@final
class _Writer:
    """The files of a checkpoint, as a save with a rank for each data file has them.

    Attributes:
        entries: of the files written.
        items: how each is stored.
        num_chunks: in all of them.
    """

    def __init__(self, storage: Storage, working: str, progress: Callable[[int], None]) -> None:
        self._storage, self._working, self._progress = storage, working, progress
        self._ranks = count()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.entries: list[FileEntry] = []
        self.items: dict[str, ItemKind] = {}
        self.num_chunks = 0

    def write(self, state: WholeState) -> None:
        """Write all that a state holds, window by window."""
        for directory, part in state.parts.items():
            self._part(state, directory, part)
        with RankFiles(self._storage, self._working) as files:
            for name, content in state.small.items():
                files.write(name, content)
            self.entries += files.entries
        self.items |= dict.fromkeys(state.shared, "shared")
        self.items |= {item: "per_rank" for items in state.per_rank.values() for item in items}

    def _part(self, state: WholeState, directory: str, part: CheckpointPart) -> None:
        prefix, found = f"{directory}/" if directory else "", part.metadata
        tensors = located({directory: part})
        values = {MetadataIndex(key): content for key, (_, content) in state.entries(part).items()}
        chunks = defaultdict[str, list[ChunkStorageMetadata]](list)
        places: dict[MetadataIndex, StorageInfo] = {}
        with FileFill(tensors) as fill:
            for slabs in list(_windows(tensors.values())) or [[]]:
                rank = next(self._ranks)
                with RankFiles(self._storage, self._working, rank) as files:
                    self._image(files, directory, slabs, fill)
                    files.write_values(directory, values)
                    table = encode_table(files.tables)
                    files.write(chunks_name(rank), table)
                    self.entries += files.entries
                values = {}
                for slab in slabs:
                    box = ChunkStorageMetadata(torch.Size(slab.offsets), torch.Size(slab.shape))
                    chunks[slab.key].append(box)
                places |= places_in(ChunkTable.from_bytes(table, source=chunks_name(rank)), directory)
        described = {
            key: replace(entry, chunks=chunks[key]) if isinstance(entry, TensorStorageMetadata) else entry
            for key, entry in found.state_dict_metadata.items()
        }
        content = encode_metadata(Metadata(described, planner_data=found.planner_data), places)
        with RankFiles(self._storage, self._working) as files:
            files.write(f"{prefix}{METADATA}", content)
            self.entries += files.entries
        self.num_chunks += len(places)
        self.items |= {str(path[0]): "sharded" for path in entries(found) if path[0] not in {PICKLED, KEPT}}

    def _image(self, files: RankFiles, directory: str, slabs: Sequence[_Slab], fill: FileFill) -> None:
        """Write one data file, through memory."""
        layout = ImageLayout([slab.spec for slab in slabs])
        if layout.size_bytes > len(self._memory):
            self._memory = torch.frombuffer(page_memory(layout.size_bytes), dtype=torch.uint8)
        image = Image(layout, self._memory)
        starts, ends = zip(*layout.payloads, strict=True) if slabs else ((), ())
        fill.read_into(
            (slab.tensor.name, slab.start, self._memory[start:end])
            for slab, start, end in zip(slabs, starts, ends, strict=True)
        )
        files.write_image(directory, image)
        self._progress(layout.size_bytes)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Slab:
    """A box of a tensor whose elements follow one another, row-major.

    Attributes:
        tensor: the whole.
        offsets: of the box.
        shape: of the box.
    """

    tensor: LocatedTensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """DCP's name of the tensor in its part."""
        return ".".join(map(str, self.tensor.path))

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.tensor.dtype.itemsize

    @property
    def start(self) -> int:
        """The offset of its first byte in the whole."""
        first = 0
        for offset, size in zip(self.offsets, self.tensor.shape, strict=True):
            first = first * size + offset
        return first * self.tensor.dtype.itemsize

    @property
    def spec(self) -> ShardSpec:
        return MetadataIndex(self.key, self.offsets), self.tensor.dtype, self.shape

    def cut(self) -> Iterator[_Slab]:
        """Yield it in pieces of at most `_FILE_BYTES`."""
        dim = next((dim for dim, size in enumerate(self.shape) if size > 1), None)
        if dim is None or self.size_bytes <= _FILE_BYTES:
            yield self
            return
        whole = self.shape[dim]
        most = max(1, _FILE_BYTES * whole // self.size_bytes)
        for start in range(0, whole, most):
            shape, offsets = list(self.shape), list(self.offsets)
            shape[dim], offsets[dim] = min(most, whole - start), offsets[dim] + start
            yield from replace(self, shape=tuple(shape), offsets=tuple(offsets)).cut()


def _windows(tensors: Iterable[LocatedTensor]) -> Iterator[list[_Slab]]:
    """Yield the slabs of each data file."""
    window, size = list[_Slab](), 0
    for tensor in tensors:
        for slab in _Slab(tensor=tensor, offsets=(0,) * len(tensor.shape), shape=tensor.shape).cut():
            if window and size + slab.size_bytes > _FILE_BYTES:
                yield window
                window, size = [], 0
            window.append(slab)
            size += slab.size_bytes
    if window:
        yield window
