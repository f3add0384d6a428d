"""Verification of a checkpoint's bytes against its manifest."""

from __future__ import annotations

import heapq
import io
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from ckpt_core.commit._catalog import Catalog, plain_storage
from ckpt_core.commit._manifest import Manifest, read_committed
from ckpt_core.crew import run_all
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
    first_of,
    lost,
    unreadable,
)
from ckpt_core.formats.checksums import Checksum, checksum, crc32, crc32_value
from ckpt_core.formats.chunks import ChunkTable, FileChunks
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.frames import plain_entry
from ckpt_core.formats.legacy import verify_small
from ckpt_core.formats.zips import ZipError, read_directory, verify_records
from ckpt_core.names import (
    DATA_SUFFIX,
    MANIFEST,
    MARKER,
    METADATA,
    can_count,
    chunks_name,
    data_rank,
    twin_name,
)
from ckpt_core.storage import BIGGEST_SMALL_FILE, ForeignFileError, Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

if TYPE_CHECKING:
    from ckpt_core.formats.index import Index


def zip_problem(stream: IO[bytes], offset: int, size: int) -> str | None:
    """Read the zip at `offset` through; return the problem, or None."""

    def read_at(place: int, count: int) -> bytes:
        stream.seek(offset + place)
        return stream.read(max(0, min(count, size - place)))

    try:
        if verify_small(read_at, size):
            return None
        directory = read_directory(read_at, size)
        if not directory.has_checksums:
            return "written with torch's CRC32 switched off, so that nothing can be verified"
        verify_records(read_at, directory)
    except ZipError as error:
        return f"not a whole torch zip: {error}"
    return None


def verify_stock(
    storage: Storage, name: str, *, seen: Callable[[int], None] = lambda _: None
) -> list[FileFailure]:
    """Verify each stock DCP directory at or below by the CRC32s inside its zips.

    It has no manifest, but every chunk is a zip, and torch writes a CRC32 for each record, which it never
    verifies. `.metadata` tells where the chunks are. `seen` gets numbers of bytes compared.
    """
    parts = list(stock_parts(storage, name))
    if not parts:
        raise CheckpointNotFoundError(
            f"{storage.url}/{name} holds no DCP checkpoint: there is no {METADATA} and no {DATA_SUFFIX} file"
        )
    return [
        FileFailure(path=str(PurePosixPath(part).relative_to(name) / failure.path), problem=failure.problem)
        for part in parts
        for failure in verify_part(storage, part, seen=seen)
    ]


def stock_parts(storage: Storage, directory: str) -> Iterator[str]:
    """Yield the directories at or below this one that hold DCP's data."""
    children = storage.list(directory)
    files = [child.name for child in children if not child.is_directory]
    if METADATA in files or any(file.endswith(DATA_SUFFIX) for file in files):
        yield directory
    for child in children:
        if child.is_directory and can_count(child.name):
            yield from stock_parts(storage, f"{directory}/{child.name}")


def verify_part(
    storage: Storage, part: str, *, seen: Callable[[int], None] = lambda _: None
) -> list[FileFailure]:
    """Verify one directory of DCP's data, as by `verify_stock`; "" is the root."""
    from ckpt_core.formats.index import decode

    prefix = f"{part}/" if part else ""
    chunks = defaultdict[str, list[_StockChunk]](list)
    try:
        index = decode(read_small(storage, f"{prefix}{METADATA}"), METADATA)
    except FileNotFoundError:
        return [FileFailure(path=METADATA, problem="missing: the save did not end, DCP cannot load this")]
    except CorruptCheckpointError as error:
        return list(error.failures)
    except UnsafeCheckpointError as error:
        return [FileFailure(path=METADATA, problem=str(error))]
    sizes = {name: prod(entry.size) * item_bytes(entry.dtype) for name, entry in index.tensors()}
    for name, _, file, offset, length, transforms in index.rows():
        most_bytes = sizes.get(name, BIGGEST_SMALL_FILE)
        chunks[file].append(_StockChunk(offset, length, name, tuple(transforms or ()), most_bytes))
    return [
        FileFailure(path=path, problem=why)
        for path in sorted(chunks)
        if (why := _file_problem(storage, f"{prefix}{path}", sorted(chunks[path]), seen)) is not None
    ]


class _StockChunk(NamedTuple):
    offset: int
    size_bytes: int
    key: str
    transforms: tuple[str, ...] = ()
    most_bytes: int = 0

    def problem(self, stream: IO[bytes]) -> str | None:
        if not self.transforms:
            return zip_problem(stream, self.offset, self.size_bytes)
        stream.seek(self.offset)
        try:
            content = plain_entry(stream.read(self.size_bytes), self.transforms, self.most_bytes)
        except (ZipError, IncompatibleCheckpointError) as error:
            return str(error)
        return zip_problem(io.BytesIO(content), 0, len(content))


def _file_problem(
    storage: Storage, key: str, chunks: Sequence[_StockChunk], seen: Callable[[int], None]
) -> str | None:
    damaged: list[str] = []
    try:
        size = storage.size(key)
        end = max(chunk.offset + chunk.size_bytes for chunk in chunks)
        if size < end:
            return f"truncated: has {size} bytes, its chunks need {end}"
        with storage.open(key) as stream:
            for chunk in chunks:
                problem = chunk.problem(stream)
                if problem is not None:
                    damaged.append(f"{chunk.key!r} at byte {chunk.offset}: {problem}")
                seen(chunk.size_bytes)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be verified: {error}"
    return f"{len(damaged)} of {len(chunks)} chunks damaged, first {damaged[0]}" if damaged else None


_MOST_NAMED: Final = 8
_BLOCK_BYTES: Final = 8 << 20
_THREADS: Final = 4


def _ignore(_: int) -> None:
    """Ignore progress."""


def verify(
    storage: Storage,
    name: str,
    *,
    paths: Collection[str] | None = None,
    seen: Callable[[int], None] = _ignore,
    sha256: str | None = None,
) -> list[FileFailure]:
    """Read a checkpoint back and compare it with its marker and manifest.

    If every file is as committed, DCP's metadata is checked for consistency, too: a load would refuse it
    otherwise. Of `paths` only those, such as one rank's `share`; None for all. `seen` is called with the
    number of bytes compared since the last call, from several threads. `sha256` is the digest that the
    manifest must have, see `read_manifest`.

    Returns the problems, in the order of the manifest. A load fails because of those without a `twin`
    (`lost`).

    Raises:
        ConfigError: one of `paths` is not in the manifest.
        OSError: storage failed; that says nothing about the checkpoint.
    """
    catalog = Catalog(storage)
    marker = None
    try:
        marker = catalog.marker(name)
        manifest = catalog.manifest(name, sha256=sha256)
        failures = _Examination(storage, name, manifest, seen=seen).failures(paths)
    except CheckpointNotFoundError:
        problem = "missing: this is not a committed checkpoint" if marker is None else "missing"
        failures = [FileFailure(path=MARKER, problem=problem)]
    except CorruptCheckpointError as error:
        failures = list(error.failures)
    except IncompatibleCheckpointError as error:
        failures = [FileFailure(path=MANIFEST, problem=str(error))]
    if not failures or marker is None:
        return failures
    gone = FileFailure(path=MARKER, problem="missing: it was pruned or replaced during verification")
    try:
        return failures if catalog.marker(name) == marker else [gone]
    except CheckpointNotFoundError:
        return [gone]
    except (CorruptCheckpointError, IncompatibleCheckpointError):
        return failures


def share(files: Sequence[FileEntry], rank: int, world_size: int) -> list[str]:
    """Return the paths that one rank verifies: the same balanced split on every rank."""
    loads = [(0, candidate) for candidate in range(world_size)]
    mine = []
    for entry in sorted(files, key=lambda entry: (-entry.size_bytes, entry.path)):
        load, least_loaded = loads[0]
        heapq.heapreplace(loads, (load + entry.size_bytes, least_loaded))
        if least_loaded == rank:
            mine.append(entry.path)
    return mine


@final
@dataclass(frozen=True, slots=True)
class _Examination:
    """A checkpoint compared with its manifest; `problems` has None for a sound file."""

    storage: Storage
    name: str
    manifest: Manifest
    seen: Callable[[int], None]
    problems: dict[str, str | None] = field(default_factory=dict[str, "str | None"])

    def failures(self, paths: Collection[str] | None) -> list[FileFailure]:
        entries = self._selected(paths)
        run_all(self._compare, entries, _THREADS, name="ckpt-verify")
        failures = [
            FileFailure(path=entry.path, problem=problem, twin=self._twin_in_its_place(entry))
            for entry in entries
            if (problem := self.problems[entry.path]) is not None
        ]
        if self.manifest.replicas > 1:
            failures[:0] = self._manifest_failures()
        if lost(failures):
            return failures
        if not self.manifest.plain_sha256:
            return [*failures, *self._metadata_failures(entries)]
        return self._plain_failures() if any(_is_metadata(entry) for entry in entries) else []

    def _plain_failures(self) -> list[FileFailure]:
        """List why a load would refuse the plain checkpoint that is held compressed."""
        view = plain_storage(self.storage, self.name, self.manifest)
        plain = Catalog(view).manifest(self.name)
        own = _Examination(view, self.name, plain, seen=_ignore)
        return own.failures([entry.path for entry in plain.originals if _is_metadata(entry)])

    def _selected(self, paths: Collection[str] | None) -> Sequence[FileEntry]:
        if paths is None:
            return self.manifest.files
        unknown = sorted(set(paths) - {entry.path for entry in self.manifest.files})
        if unknown:
            raise ConfigError(
                f"not in the manifest of step {self.manifest.step}, so not to be verified: {unknown}"
            )
        return [entry for entry in self.manifest.files if entry.path in paths]

    def _compare(self, entry: FileEntry) -> None:
        self.problems[entry.path] = self._problem(entry, self.seen)

    def _problem(self, entry: FileEntry, seen: Callable[[int], None]) -> str | None:
        try:
            size = self.storage.size(f"{self.name}/{entry.path}")
            if size != entry.size_bytes:
                return f"has {size} bytes, {entry.size_bytes} were committed"
            found = self._sum(entry, seen)
            if found != entry.checksum:  # a transfer may have failed
                found = self._sum(entry, _ignore)
            if found == entry.checksum:
                return None
            damage = self._damage_in(entry)
        except FileNotFoundError:
            return "missing"
        except (ValueError, ForeignFileError) as error:
            return f"cannot be verified: {error}"
        except OSError as error:
            return unreadable(error)
        return f"checksum is {found}, {entry.checksum} was committed{damage}"

    def _sum(self, entry: FileEntry, seen: Callable[[int], None]) -> str:
        found = Checksum.like(entry.checksum)
        with self.storage.open(f"{self.name}/{entry.path}") as stream:
            while block := stream.read(_BLOCK_BYTES):
                found.update(block)
                seen(len(block))
        return str(found)

    def _damage_in(self, entry: FileEntry) -> str:
        chunks = self._chunks(entry)
        if chunks is None:
            return ""
        with self.storage.open(f"{self.name}/{entry.path}") as stream:
            damaged = [found for chunk in chunks if (found := _damaged_range(stream, chunk)) is not None]
        if not damaged and crc32_value(entry.checksum) is None:
            return "; every value in it has its CRC-32, so the damage is between them, or was made on purpose"
        if not damaged:
            return "; every value in it is intact, the damage is between them"
        named = [f"{key} (bytes {start} to {end})" for key, start, end in damaged]
        return f"; damaged: {first_of(named, _MOST_NAMED)}"

    def _chunks(self, entry: FileEntry) -> FileChunks | None:
        original = next((path for path, twin in self.manifest.twins().items() if twin == entry), entry.path)
        rank = data_rank(original)
        path = None if rank is None else chunks_name(rank)
        table = next((each for each in self.manifest.files if each.path == path), None)
        if table is None:
            return None
        try:
            content = self._content(table.path)
            if checksum(content, table.checksum.partition(":")[0]) != table.checksum:
                return None
            chunks = ChunkTable.from_bytes(content, source=table.path).files.get(original)
        except (FileNotFoundError, CheckpointError, ValueError):
            return None
        return None if chunks is None or chunks.size_bytes != entry.size_bytes else chunks

    def _content(self, path: str) -> bytes:
        """Read a small file; if it is damaged, its twin."""
        twin = self.manifest.twins().get(path)
        if twin is None:
            return read_small(self.storage, f"{self.name}/{path}")
        with suppress(FileNotFoundError, CheckpointError):
            content = read_small(self.storage, f"{self.name}/{path}")
            if checksum(content, twin.checksum.partition(":")[0]) == twin.checksum:
                return content
        return read_small(self.storage, f"{self.name}/{twin.path}")

    def _twin_in_its_place(self, entry: FileEntry) -> str:
        """Return the file that a load reads where this one is damaged; "" if it cannot."""
        pairs = {path: twin.path for path, twin in self.manifest.twins().items()}
        path = (pairs | {twin: path for path, twin in pairs.items()}).get(entry.path)
        if path is None:
            return ""
        other = next(each for each in self.manifest.files if each.path == path)
        if (self.problems[path] if path in self.problems else self._problem(other, _ignore)) is None:
            return path
        here, there = self._damaged_chunks(entry), self._damaged_chunks(other)
        return "" if here is None or there is None or here & there else path

    def _damaged_chunks(self, entry: FileEntry) -> frozenset[int] | None:
        """Return the chunks of a file that are damaged, by position; None if unknown."""
        chunks = self._chunks(entry)
        if chunks is None:
            return None
        try:
            with self.storage.open(f"{self.name}/{entry.path}") as stream:
                places = (n for n, chunk in enumerate(chunks) if _damaged_range(stream, chunk) is not None)
                return frozenset(places)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | ForeignFileError):
                unreadable(error)
            return frozenset(range(len(chunks)))

    def _manifest_failures(self) -> list[FileFailure]:
        """Compare the manifest, one of which is whole, with its twin."""
        first, second = (f"{self.name}/{path}" for path in (MANIFEST, twin_name(MANIFEST)))
        damage = read_committed(self.storage, self.name, Catalog(self.storage).marker(self.name))[1]
        if damage is not None:
            return [replace(failure, twin=twin_name(MANIFEST)) for failure in damage.failures]
        try:
            same = read_small(self.storage, second) == read_small(self.storage, first)
            problem = "" if same else "differs from the manifest"
        except FileNotFoundError:
            problem = "missing"
        except (CheckpointError, ForeignFileError, IsADirectoryError) as error:
            problem = str(error)
        return [FileFailure(path=twin_name(MANIFEST), problem=problem, twin=MANIFEST)] if problem else []

    def _metadata_failures(self, entries: Sequence[FileEntry]) -> list[FileFailure]:
        """List why a load would refuse the metadata although every byte is as committed."""
        sizes: Mapping[str, int] = {entry.path: entry.size_bytes for entry in self.manifest.files}
        failures: list[FileFailure] = []
        for entry in entries:
            if _is_metadata(entry):
                try:
                    failures += index_failures(entry.path, sizes, self._content)
                except FileNotFoundError:  # verified a moment ago: pruned since
                    failures.append(FileFailure(path=entry.path, problem="missing"))
        return failures


def _is_metadata(entry: FileEntry) -> bool:
    return entry.path.rpartition("/")[2] == METADATA


def _damaged_range(stream: IO[bytes], chunk: ChunkEntry) -> tuple[str, int, int] | None:
    """Return key, start and end of the damage in a chunk, as far as checksums tell."""
    start, size = chunk.offset, chunk.size_bytes
    if chunk.payload_offset is not None and chunk.payload_bytes is not None:
        start, size = chunk.payload_offset, chunk.payload_bytes
    stream.seek(start)
    if not chunk.block_crcs:
        return None if _crc(stream, size) == chunk.crc32 else (chunk.key, start, start + size)
    wrong = [
        index
        for index, expected in enumerate(chunk.block_crcs)
        if _crc(stream, min(chunk.block_bytes, size - index * chunk.block_bytes)) != expected
    ]
    if not wrong:
        return None
    end = min(size, (wrong[-1] + 1) * chunk.block_bytes)
    return chunk.key, start + wrong[0] * chunk.block_bytes, start + end


def _crc(stream: IO[bytes], size: int) -> int:
    running = 0
    while size and (block := stream.read(min(size, _BLOCK_BYTES))):
        running = crc32(block, running)
        size -= len(block)
    return running


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor in `.metadata`: DCP's flattened name, global shape, torch's dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def list_tensors(content: bytes, source: str) -> list[TensorEntry]:
    """List every tensor of a `.metadata`, in its order; errors as by `decode`."""
    from ckpt_core.formats.index import decode  # needs numpy, which `ckpt ls` does not import

    return [
        TensorEntry(
            name=name,
            shape=entry.size,
            dtype=entry.dtype,
            size_bytes=math.prod(entry.size) * item_bytes(entry.dtype),
        )
        for name, entry in decode(content, source).tensors()
    ]


def index_failures(path: str, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> list[FileFailure]:
    """List why a load would refuse our `.metadata`, alone or beside the chunk tables."""
    from ckpt_core.formats.consistency import check
    from ckpt_core.formats.index import decode

    part = path.removesuffix(METADATA)

    def size(data: str) -> int:
        if part + data not in sizes:
            raise FileNotFoundError(part + data)
        return sizes[part + data]

    try:
        index = decode(read(path), path)
        check(index, path, size)
    except CorruptCheckpointError as error:
        return list(error.failures)
    except UnsafeCheckpointError as error:
        return [FileFailure(path=path, problem=str(error))]
    return _table_failures(part, index, read)


_Rows: TypeAlias = Mapping[tuple[str, str, tuple[int, ...] | None], tuple[int, int]]


def _table_failures(part: str, index: Index, read: Callable[[str], bytes]) -> list[FileFailure]:
    tables: dict[str, _Rows] = {}
    for key, start, file, offset, length, _ in index.rows():
        path = part + file
        rank = data_rank(path)
        if rank is None:
            return [
                FileFailure(path=path, problem=f"holds {key!r:.200}, but no rank writes a file of that name")
            ]
        name = chunks_name(rank)
        try:
            if name not in tables:
                tables[name] = _rows(ChunkTable.from_bytes(read(name), source=name))
        except CheckpointError as error:
            return [FileFailure(path=name, problem=str(error))]
        except FileNotFoundError:
            return [FileFailure(path=name, problem="missing")]
        if tables[name].get((path, key, start)) != (offset, length):
            return [FileFailure(path=path, problem=f"{key!r:.200} is at another place than {name} says")]
    return []


def _rows(table: ChunkTable) -> _Rows:
    return {
        (path, key, None if offsets is None else tuple(offsets)): (offset, size)
        for path, chunks in table.files.items()
        for key, offsets, offset, size in zip(
            chunks.columns.key,
            chunks.columns.shard_offsets,
            chunks.columns.offset,
            chunks.columns.size_bytes,
            strict=True,
        )
    }
