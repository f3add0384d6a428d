"""The small files of a checkpoint, compared with the manifest before use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar, final

from ckpt_core.commit import Manifest, share
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, FileFailure, lost
from ckpt_core.formats.checksums import Checksum, crc32_value
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.names import chunks_name, is_own_file
from ckpt_core.reading import Payload, RangeRead
from ckpt_core.storage import BIGGEST_SMALL_FILE, ForeignFileError, Storage, read_intact, read_small
from ckpt_core.types import FileEntry

T = TypeVar("T")

_logger = logger_of(__name__)
_MOST_NAMED: Final = 5


@final
class CommittedFiles:
    """The files of one checkpoint directory, read whole.

    Args:
        storage: the root.
        directory: the checkpoint's directory in it.
        manifest: of the checkpoint; None for a directory that stock DCP wrote.
    """

    def __init__(self, storage: Storage, directory: str, manifest: Manifest | None) -> None:
        self._storage = storage
        self.directory = directory
        self._manifest = manifest
        self._entries = {} if manifest is None else {entry.path: entry for entry in manifest.originals}
        self._twins = {} if manifest is None else manifest.twins()
        self._tables: dict[int, ChunkTable] = {}
        self._warned: set[str] = set()

    @property
    def url(self) -> str:
        """The directory's URL, for messages."""
        return f"{self._storage.url}/{self.directory}"

    @property
    def is_ours(self) -> bool:
        """Whether there is a manifest."""
        return self._manifest is not None

    @property
    def paths(self) -> Iterable[str]:
        """The committed files without their twins; none without a manifest."""
        return self._entries

    @property
    def entries(self) -> Sequence[FileEntry]:
        """The entries of these files in the manifest; empty without one."""
        return () if self._manifest is None else self._manifest.originals

    @property
    def has_twins(self) -> bool:
        """Whether there are second files of the same bytes."""
        return bool(self._twins)

    def twin(self, path: str) -> str | None:
        """Return the second file of the same bytes as `path`; None if there is none."""
        found = self._twins.get(path)
        return None if found is None else found.path

    def checksum(self, path: str) -> str:
        """Return the committed checksum of a file."""
        return self._entries[path].checksum

    def has(self, path: str) -> bool:
        """Return whether the checkpoint has that file; an uncommitted one does not count."""
        if self.is_ours:
            return path in self._entries
        return self._storage.exists(f"{self.directory}/{path}")

    def size(self, path: str) -> int:
        """Return the committed size of a file; without a manifest, its actual size.

        Raises:
            CorruptCheckpointError: there is no such file.
        """
        if path in self._entries:
            return self._entries[path].size_bytes
        try:
            if not self.is_ours:
                return self._storage.size(f"{self.directory}/{path}")
        except FileNotFoundError:
            pass
        raise self.damaged(path, "missing")

    def read(self, path: str) -> bytes:
        """Read a file, or else its twin, and compare it with the manifest.

        Raises:
            CorruptCheckpointError: it is missing, or was changed, and so is its twin.
            OSError: storage failed.
        """
        return self.whole_of(path, lambda found: self._read(found, path))

    def whole_of(self, path: str, read: Callable[[str], T]) -> T:
        """Call `read` with a path, and if that is damaged, with the path of its twin.

        Raises:
            CorruptCheckpointError: both are.
        """
        try:
            return read(path)
        except CorruptCheckpointError as error:
            twin = self.twin(path)
            if twin is None:
                raise
            try:
                found = read(twin)
            except CorruptCheckpointError:
                raise error from None
            self.without_mended([replace(failure, twin=twin) for failure in error.failures])
            return found

    def without_mended(self, failures: Sequence[FileFailure]) -> list[FileFailure]:
        """Return the failures for which no twin makes up; log the others, once per file."""
        found = {
            each.path: each for each in reversed(failures) if each.twin and each.path not in self._warned
        }
        self._warned |= found.keys()
        if found:
            _logger.warning(
                "%s is damaged, and what is lost is read from the second files: %s. Run `ckpt verify`, and "
                "repair it",
                self.url,
                "; ".join(map(str, list(found.values())[:_MOST_NAMED])),
            )
        return lost(failures)

    def _read(self, path: str, original: str) -> bytes:
        size = self.size(original)
        key = f"{self.directory}/{path}"
        most = BIGGEST_SMALL_FILE if is_own_file(path) else size
        try:
            content, problem = read_intact(
                self._storage,
                key,
                lambda each: read_small(each, key, most, committed_bytes=size),
                lambda content: self._problem(content, original),
            )
        except FileNotFoundError:
            raise self.damaged(path, "missing") from None
        except ForeignFileError as error:
            raise self.damaged(path, str(error.strerror)) from error
        except OSError as error:
            # A block that the device cannot read is lost; any other error may be transient.
            if error.errno not in {errno.EIO, errno.EISDIR}:
                raise
            raise self.damaged(path, f"cannot be read: {error}") from error
        if problem:
            raise self.damaged(path, problem)
        return content

    def table(self, rank: int) -> ChunkTable:
        """Return the chunk table of a rank, read and parsed once.

        Raises:
            CorruptCheckpointError: it is missing, or damaged.
            OSError: storage failed.
        """
        if rank not in self._tables:
            name = chunks_name(rank)
            self._tables[rank] = ChunkTable.from_bytes(self.read(name), source=f"{self.url}/{name}")
        return self._tables[rank]

    def whole(self, rank: int, world_size: int) -> tuple[list[RangeRead], set[str]]:
        """Return reads of this rank's share of all files, and the paths without a CRC-32."""
        reads: list[RangeRead] = []
        others: set[str] = set()
        files = () if self._manifest is None else self._manifest.files
        entries = {entry.path: entry for entry in files}
        for path in share(files, rank, world_size):
            entry = entries[path]
            crc = crc32_value(entry.checksum)
            if crc is None:
                others.add(path)
                continue
            payload = Payload(path=path, key=path, offset=0, size_bytes=entry.size_bytes, crc32=crc)
            reads.append(RangeRead(payload=payload, start=0, stop=entry.size_bytes))
        return reads, others

    def damaged(self, path: str, problem: str) -> CorruptCheckpointError:
        """Make the error of a damaged file."""
        failure = FileFailure(path=path, problem=problem)
        return CorruptCheckpointError(f"{self.url}/{failure}. Nothing was loaded", failures=(failure,))

    def _problem(self, content: bytes, original: str) -> str:
        """Return what is wrong with the bytes of a file; "" if nothing is known."""
        if not self.is_ours:
            return ""
        committed = self._entries[original].checksum
        try:
            found = Checksum.like(committed)
        except ValueError as error:
            return f"cannot be verified: {error}"
        found.update(content)
        return "" if str(found) == committed else f"checksum is {found}, {committed} was committed"

    def missing_or_truncated(self, rank: int, world_size: int) -> list[FileFailure]:
        """Check this rank's share of the files for missing ones and wrong sizes.

        A file whose twin is there is no failure.
        """
        listed = _listed_sizes(self._storage, self.directory) if self.is_ours else {}
        return [
            FileFailure(path=path, problem=problem)
            for path in list(self._entries)[rank::world_size]
            if (problem := self._size_problem(path, path, listed))
            and ((twin := self.twin(path)) is None or self._size_problem(twin, path, listed))
        ]

    def lacks_any(self) -> bool:
        """Return whether a file, twins aside, is missing or has another size."""
        listed = _listed_sizes(self._storage, self.directory) if self.is_ours else {}
        return any(self._size_problem(path, path, listed) for path in self._entries)

    def _size_problem(self, path: str, original: str, listed: Mapping[str, int]) -> str:
        try:
            size = listed[path] if path in listed else self._storage.size(f"{self.directory}/{path}")
        except FileNotFoundError:
            return "missing"
        committed = self.size(original)
        manifest = self._manifest
        if size == committed or (
            manifest is not None
            and manifest.is_everywhere(path)
            and _is_whole_on_a_disk(self._storage, f"{self.directory}/{path}", committed)
        ):
            return ""
        return f"has {size} bytes, {committed} were committed"


def _is_whole_on_a_disk(storage: Storage, key: str, committed: int) -> bool:
    """Return whether one of several disks has a file in the size committed."""
    parts = storage.parts if len(storage.parts) > 1 else ()
    return any((entry := part.entry(key)) is not None and entry.size_bytes == committed for part in parts)


def _listed_sizes(storage: Storage, directory: str) -> Mapping[str, int]:
    """Return the sizes of files where one listing is cheaper than a request for each."""
    if storage.rereads_from_memory:
        return {}
    return {entry.name: entry.size_bytes for entry in storage.list(directory) if not entry.is_directory}
