"""The small files of a checkpoint, compared with the manifest before use."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import final

from ckpt_core.commit import Manifest, share
from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.formats.checksums import Checksum, crc32_value
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.names import chunks_name, is_own_file
from ckpt_core.reading import Payload, RangeRead
from ckpt_core.storage import BIGGEST_SMALL_FILE, ForeignFileError, Storage, read_small
from ckpt_core.types import FileEntry


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
        self._entries = {} if manifest is None else {entry.path: entry for entry in manifest.files}
        self._tables: dict[int, ChunkTable] = {}

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
        """The committed files; none without a manifest."""
        return self._entries

    @property
    def entries(self) -> Sequence[FileEntry]:
        """The files' entries in the manifest; empty without one."""
        return () if self._manifest is None else self._manifest.files

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
        """Read a file and compare it with the manifest.

        Raises:
            CorruptCheckpointError: it is missing, or was changed.
            OSError: storage failed.
        """
        size = self.size(path)
        key = f"{self.directory}/{path}"
        try:
            found = self._storage.size(key)
            if found != size:
                raise self.damaged(path, f"has {found} bytes, {size} were committed")
            content = read_small(self._storage, key, BIGGEST_SMALL_FILE if is_own_file(path) else size)
        except FileNotFoundError:
            raise self.damaged(path, "missing") from None
        except ForeignFileError as error:
            raise self.damaged(path, str(error.strerror)) from error
        except OSError as error:
            # A block that the device cannot read is lost; any other error may be transient.
            if error.errno != errno.EIO:
                raise
            raise self.damaged(path, f"cannot be read: {error}") from error
        if self.is_ours:
            self._compare(path, content)
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
        for path in share(self.entries, rank, world_size):
            entry = self._entries[path]
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

    def _compare(self, path: str, content: bytes) -> None:
        committed = self._entries[path].checksum
        try:
            found = Checksum.like(committed)
        except ValueError as error:
            raise self.damaged(path, f"cannot be verified: {error}") from error
        found.update(content)
        if str(found) != committed:
            raise self.damaged(path, f"checksum is {found}, {committed} was committed")

    def missing_or_truncated(self, rank: int, world_size: int) -> list[FileFailure]:
        """Check this rank's share of the files for missing ones and wrong sizes."""
        found: list[FileFailure] = []
        for path in list(self._entries)[rank::world_size]:
            try:
                size = self._storage.size(f"{self.directory}/{path}")
            except FileNotFoundError:
                found.append(FileFailure(path=path, problem="missing"))
                continue
            if size != self.size(path):
                problem = f"has {size} bytes, {self.size(path)} were committed"
                found.append(FileFailure(path=path, problem=problem))
        return found
