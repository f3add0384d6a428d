"""Verification of a checkpoint's bytes against its manifest."""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, Final

from ckpt_core.commit._catalog import Catalog
from ckpt_core.commit._index import index_failures
from ckpt_core.commit._manifest import Manifest, Marker, read_committed
from ckpt_core.crew import run_all
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    lost,
)
from ckpt_core.formats.checksums import Checksum, checksum, crc32, crc32_value
from ckpt_core.formats.chunks import ChunkTable, FileChunks
from ckpt_core.names import MANIFEST, MARKER, METADATA, chunks_name, data_rank, twin_name
from ckpt_core.storage import ForeignFileError, Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

_MOST_NAMED: Final = 8
_BLOCK_BYTES: Final = 8 << 20


def damage_in(storage: Storage, name: str, manifest: Manifest, entry: FileEntry) -> str:
    """Describe the damage in a file whose checksum is wrong; "" if unknown.

    Raises:
        OSError: storage failed.
    """
    chunks = _chunks(storage, name, manifest, entry)
    if chunks is None:
        return ""
    with storage.open(f"{name}/{entry.path}") as stream:
        damaged = [found for chunk in chunks if (found := _damaged_range(stream, chunk)) is not None]
    if not damaged and crc32_value(entry.checksum) is None:
        return "; every value in it has its CRC-32, so the damage is between them, or was made on purpose"
    if not damaged:
        return "; every value in it is intact, the damage is between them"
    named = [f"{key} (bytes {start} to {end})" for key, start, end in damaged[:_MOST_NAMED]]
    more = len(damaged) - len(named)
    return "; damaged: " + ", ".join(named) + (f" and {more} more" if more else "")


def _chunks(storage: Storage, name: str, manifest: Manifest, entry: FileEntry) -> FileChunks | None:
    """Return the chunks of the file; None without an intact chunk table."""
    original = next((path for path, twin in manifest.twins().items() if twin == entry), entry.path)
    rank = data_rank(original)
    path = None if rank is None else chunks_name(rank)
    table = next((each for each in manifest.files if each.path == path), None)
    if table is None:
        return None
    try:
        content = _content(storage, name, manifest, table.path)
        if checksum(content, table.checksum.partition(":")[0]) != table.checksum:
            return None
        chunks = ChunkTable.from_bytes(content, source=table.path).files.get(original)
    except (FileNotFoundError, CheckpointError, ValueError):
        return None
    return None if chunks is None or chunks.size_bytes != entry.size_bytes else chunks


def _content(storage: Storage, name: str, manifest: Manifest, path: str) -> bytes:
    """Read a small file; if it is damaged, its twin."""
    twin = manifest.twins().get(path)
    if twin is None:
        return read_small(storage, f"{name}/{path}")
    with suppress(FileNotFoundError, CheckpointError):
        content = read_small(storage, f"{name}/{path}")
        if checksum(content, twin.checksum.partition(":")[0]) == twin.checksum:
            return content
    return read_small(storage, f"{name}/{twin.path}")


def _damaged_chunks(
    storage: Storage, name: str, manifest: Manifest, entry: FileEntry
) -> frozenset[int] | None:
    """Return the chunks of a file that are damaged, by position; None if unknown."""
    chunks = _chunks(storage, name, manifest, entry)
    if chunks is None:
        return None
    try:
        with storage.open(f"{name}/{entry.path}") as stream:
            return frozenset(
                place for place, chunk in enumerate(chunks) if _damaged_range(stream, chunk) is not None
            )
    except (FileNotFoundError, ForeignFileError):
        return frozenset(range(len(chunks)))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return frozenset(range(len(chunks)))


def _twin_in_its_place(
    storage: Storage, name: str, manifest: Manifest, entry: FileEntry, *, problems: Mapping[str, str | None]
) -> str:
    """Return the file that a load reads where this one is damaged; "" if it cannot.

    Args:
        storage: the root.
        name: the checkpoint's directory.
        manifest: of the checkpoint.
        entry: the damaged file.
        problems: of the files compared so far, by path.
    """
    files = {each.path: each for each in manifest.files}
    pairs = {path: twin.path for path, twin in manifest.twins().items()}
    other = (pairs | {twin: path for path, twin in pairs.items()}).get(entry.path)
    if other is None:
        return ""
    known = other in problems
    problem = problems[other] if known else _problem(storage, name, manifest, files[other], seen=_ignore)
    if problem is None:
        return other
    here, there = (_damaged_chunks(storage, name, manifest, files[each]) for each in (entry.path, other))
    return "" if here is None or there is None or here & there else other


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
    for block in _blocks_of(stream, size):
        running = crc32(block, running)
    return running


def _blocks_of(stream: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (block := stream.read(min(size, _BLOCK_BYTES))):
        size -= len(block)
        yield block


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
    otherwise.

    Args:
        storage: the root.
        name: the checkpoint's directory.
        paths: verify only these files, such as one rank's `share`; None for all.
        seen: called with the number of bytes compared since the last call, from several threads.
        sha256: digest that the manifest must have, or None; see `read_manifest`.

    Returns:
        The problems, in the order of the manifest; empty if there are none. A load fails because of those
        without a `twin` (`lost`).

    Raises:
        ConfigError: one of `paths` is not in the manifest.
        OSError: storage failed; that says nothing about the checkpoint.
    """
    catalog = Catalog(storage)
    try:
        marker = catalog.marker(name)
    except CheckpointNotFoundError:
        return [FileFailure(path=MARKER, problem="missing: this is not a committed checkpoint")]
    except CorruptCheckpointError as error:
        return list(error.failures)
    except IncompatibleCheckpointError as error:
        return [FileFailure(path=MANIFEST, problem=str(error))]
    failures = _failures(storage, name, paths, seen, sha256=sha256)
    if failures and not _leads_to(catalog, name, marker):
        return [FileFailure(path=MARKER, problem="missing: it was pruned or replaced during verification")]
    return failures


def _failures(
    storage: Storage,
    name: str,
    paths: Collection[str] | None,
    seen: Callable[[int], None],
    *,
    sha256: str | None,
) -> list[FileFailure]:
    try:
        manifest = Catalog(storage).manifest(name, sha256=sha256)
    except CheckpointNotFoundError:
        return [FileFailure(path=MARKER, problem="missing")]
    except CorruptCheckpointError as error:
        return list(error.failures)
    except IncompatibleCheckpointError as error:
        return [FileFailure(path=MANIFEST, problem=str(error))]
    entries = _selected(manifest, paths)
    problems: dict[str, str | None] = {}

    def compare(entry: FileEntry) -> None:
        problems[entry.path] = _problem(storage, name, manifest, entry, seen=seen)

    run_all(compare, entries, _THREADS, name="ckpt-verify")
    failures = [
        FileFailure(
            path=entry.path,
            problem=problem,
            twin=_twin_in_its_place(storage, name, manifest, entry, problems=problems),
        )
        for entry in entries
        if (problem := problems[entry.path]) is not None
    ]
    if manifest.replicas > 1 and (damage := read_committed(storage, name, Catalog(storage).marker(name))[1]):
        failures[:0] = [replace(failure, twin=twin_name(MANIFEST)) for failure in damage.failures]
    elif manifest.replicas > 1 and (problem := _manifest_twin_problem(storage, name)) is not None:
        failures.insert(0, FileFailure(path=twin_name(MANIFEST), problem=problem, twin=MANIFEST))
    return failures if lost(failures) else [*failures, *_metadata_failures(storage, name, manifest, entries)]


def _manifest_twin_problem(storage: Storage, name: str) -> str | None:
    """Return what is wrong with the second manifest, if the first is sound."""
    try:
        second = read_small(storage, f"{name}/{twin_name(MANIFEST)}")
    except FileNotFoundError:
        return "missing"
    except (CheckpointError, ForeignFileError, IsADirectoryError) as error:
        return str(error)
    return None if second == read_small(storage, f"{name}/{MANIFEST}") else "differs from the manifest"


def _metadata_failures(
    storage: Storage, name: str, manifest: Manifest, entries: Sequence[FileEntry]
) -> list[FileFailure]:
    """List why a load would refuse the metadata although every byte is as committed."""
    sizes = {entry.path: entry.size_bytes for entry in manifest.files}
    failures: list[FileFailure] = []
    for entry in entries:
        if entry.path.rpartition("/")[2] != METADATA:
            continue
        try:
            failures += index_failures(entry.path, sizes, partial(_content, storage, name, manifest))
        except FileNotFoundError:  # verified a moment ago: pruned since
            failures.append(FileFailure(path=entry.path, problem="missing"))
    return failures


def _leads_to(catalog: Catalog, name: str, marker: Marker) -> bool:
    """Return whether the name still leads to the checkpoint with that marker."""
    try:
        return catalog.marker(name) == marker
    except CheckpointNotFoundError:
        return False
    except (CorruptCheckpointError, IncompatibleCheckpointError):
        return True


def share(files: Sequence[FileEntry], rank: int, world_size: int) -> list[str]:
    """Return the paths that one of `world_size` ranks verifies, balanced by bytes.

    Every rank computes the same split, and every file belongs to exactly one rank.
    """
    loads = [(0, candidate) for candidate in range(world_size)]
    mine = []
    for entry in sorted(files, key=lambda entry: (-entry.size_bytes, entry.path)):
        load, least_loaded = loads[0]
        heapq.heapreplace(loads, (load + entry.size_bytes, least_loaded))
        if least_loaded == rank:
            mine.append(entry.path)
    return mine


def _selected(manifest: Manifest, paths: Collection[str] | None) -> Sequence[FileEntry]:
    if paths is None:
        return manifest.files
    unknown = sorted(set(paths) - {entry.path for entry in manifest.files})
    if unknown:
        raise ConfigError(f"not in the manifest of step {manifest.step}, so not to be verified: {unknown}")
    return [entry for entry in manifest.files if entry.path in paths]


def _problem(
    storage: Storage, name: str, manifest: Manifest, entry: FileEntry, *, seen: Callable[[int], None]
) -> str | None:
    """Verify one file; return its problem, or None."""
    key = f"{name}/{entry.path}"
    try:
        size = storage.size(key)
        if size != entry.size_bytes:
            return f"has {size} bytes, {entry.size_bytes} were committed"
        found = _sum(storage, key, entry.checksum, seen)
        if str(found) != entry.checksum:  # a transfer may have failed
            found = _sum(storage, key, entry.checksum, lambda _: None)
        if str(found) == entry.checksum:
            return None
        damage = damage_in(storage, name, manifest, entry)
    except FileNotFoundError:
        return "missing"
    except (ValueError, ForeignFileError) as error:
        return f"cannot be verified: {error}"
    except OSError as error:
        # A block that the device cannot read is lost; any other error may be temporary.
        if error.errno != errno.EIO:
            raise
        return f"cannot be read: {error}"
    return f"checksum is {found}, {entry.checksum} was committed{damage}"


def _sum(storage: Storage, key: str, like: str, seen: Callable[[int], None]) -> Checksum:
    """Read a file, and return its checksum, of the kind of another."""
    found = Checksum.like(like)
    for block in _blocks(storage, key):
        found.update(block)
        seen(len(block))
    return found


def _blocks(storage: Storage, key: str) -> Iterator[bytes]:
    with storage.open(key) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block
