"""The contract between the core and a store of bytes.

A `Storage` knows nothing of checkpoints. Keys are POSIX-relative strings ("step-000001000/.metadata"); "" is
the root itself.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import (
    IO,
    Any,
    Final,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    final,
    runtime_checkable,
)

from ckpt_core.crew import Workers
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.formats.checksums import crc32


def key_parts(key: str) -> tuple[str, ...]:
    """Split a key into its parts, () for the root; ValueError if it is not plain."""
    if key == "":
        return ()
    parts = tuple(key.split("/"))
    if not all(map(is_plain, parts)):
        raise ValueError(
            f"storage key {key!r} must be relative to the root, in plain form: no leading or doubled '/', "
            "no '.' or '..'"
        )
    return parts


def is_plain(name: str) -> bool:
    return name not in {"", ".", ".."} and "\0" not in name


def file_key(key: str) -> str:
    """Return the key; ValueError if it is malformed, or the root."""
    if not key_parts(key):
        raise ValueError("the root itself cannot be written, renamed or deleted through its storage")
    return key


@final
class StreamRanges:
    """Ranges of a seekable stream; reads take turns for its one position."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = cast("io.BufferedIOBase", stream)
        self._where = where
        self._guard = threading.Lock()
        self.size_bytes = stream.seek(0, io.SEEK_END)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        with self._guard:
            self._stream.seek(offset)
            while buffer and (count := self._stream.readinto(buffer)):
                buffer = buffer[count:]
        if buffer:
            raise ends_early(self._where, end, min(end - len(buffer), self.size_bytes))


@final
class RangeStream(io.RawIOBase):
    """A seekable stream; `read` fills a buffer from an offset on, as far as it goes."""

    def __init__(self, size_bytes: int, read: Callable[[int, memoryview], int], where: str) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._read = read
        self._where = where
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset} in {self._where}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._position)]
        count = self._read(self._position, view) if view else 0
        self._position += count
        return count

    def readall(self) -> bytes:
        content = bytearray(max(0, self._size_bytes - self._position))
        return bytes(content[: self.readinto(content)])


def ends_early(where: str, needed: int, found: int) -> EOFError:
    return EOFError(f"{where}: ends at byte {found}, but bytes up to {needed} are needed")


ReadAt: TypeAlias = Callable[[int, memoryview], None]
"""Fills a whole buffer from an offset on; called from several threads, also twice for the same bytes."""
Pace: TypeAlias = Callable[[Iterable[memoryview]], Iterable[memoryview]]
"""Lets pieces pass as fast as they may; a `Throttle` is one."""
Progress: TypeAlias = Callable[[int], None]

PIECE_BYTES: Final = 8 * 2**20


class PutSource(NamedTuple):
    """The content of a file to put, and how to do it; see `Storage.put_file`."""

    size_bytes: int
    read: ReadAt
    pace: Pace
    progress: Progress

    def counted(self) -> Generator[memoryview]:
        """Yield pieces, each in pages of memory of its own; count those taken."""
        for piece in self.pace(self._pieces()):
            yield piece
            self.progress(len(piece))

    def equals(self, reader: RangeReader) -> bool:
        """Compare with a file of the same size, up to the first difference."""
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, self.size_bytes - offset)
            wanted, there = memoryview(bytearray(count)), memoryview(bytearray(count))
            self.read(offset, wanted)
            reader.read_into(offset, there)
            if wanted != there:
                return False
        return True

    def _pieces(self) -> Generator[memoryview]:
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            piece = memoryview(mmap.mmap(-1, min(PIECE_BYTES, self.size_bytes - offset)))
            self.read(offset, piece)
            yield piece


def _sync(stream: IO[bytes]) -> None:
    """Make what is there durable: who wrote it may have been killed before its fsync."""
    with suppress(io.UnsupportedOperation):  # memory has no descriptor
        os.fsync(stream.fileno())


def put_whole(storage: Storage, key: str, source: PutSource) -> None:
    """Put a file that nobody else writes, over what an earlier call left of it.

    In a bucket only over one of another size, which may not be complete.
    """
    found = None
    with suppress(FileNotFoundError):
        found = storage.size(key)
    if found == source.size_bytes:
        with storage.open_ranges(key) as reader:
            equal = source.equals(reader)
        if equal:
            with storage.open(key) as stream:
                _sync(stream)
            source.progress(source.size_bytes)
            return
    if found is not None and (storage.supports_rename or found != source.size_bytes):
        storage.delete(key)
    storage.write_pieces(key, source.counted())


@final
class Throttle:
    """Rate limiter for the pieces of files; any thread, all files share the cap.

    A token bucket of the size of one piece: after a pause of any length, one piece passes without waiting.
    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._guard = threading.Lock()

    def __call__(self, pieces: Iterable[memoryview]) -> Generator[memoryview]:
        """Yield each of `pieces` as soon as the average rate permits it."""
        for piece in pieces:
            # Asleep, too: a file that waits its turn is as slow as the cap demands.
            with self._guard:
                pause = self._free_at - self._clock()
                if pause > 0:
                    self._sleep(pause)
                self._free_at = max(self._free_at, self._clock()) + len(piece) / self._bytes_per_second
            yield piece


ALIGNMENT: Final = 4096
"""Direct writes need memory, offsets and lengths that are multiples of this, and so do fast direct reads."""

_BLOCK_BYTES: Final = 4 << 20


def is_full(error: OSError) -> bool:
    """Return whether it says that there is no room: no byte, no inode, or a quota."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


class StorageEntry(NamedTuple):
    """One child of a directory; a link to a directory is one, too.

    `size_bytes` is 0 for directories, and for dangling links; `is_link` is of symbolic links.
    """

    name: str
    is_directory: bool
    size_bytes: int
    is_link: bool = False


class Space(NamedTuple):
    """The room for this user; None where it is unknown or has no limit.

    Attributes:
        free_bytes: that can still be written; quotas are not visible to it.
        total_bytes: of the filesystem.
        free_files: files and directories that can still be created.
    """

    free_bytes: int | None = None
    total_bytes: int | None = None
    free_files: int | None = None


class Lock(Protocol):
    """An exclusive claim that lasts until `release` or the death of the process."""

    def release(self) -> None:
        """Release the lock; harmless when repeated."""


class RangeReader(Protocol):
    """A file open for ranged reads.

    Concurrency: `read_into` may be called from several threads at the same time, which makes reads faster.
    """

    @property
    def size_bytes(self) -> int:
        """The size of the file when it was opened."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole `buffer` (writable, contiguous, of bytes) from `offset` on.

        Raises:
            EOFError: the file ends earlier; the message names it. The content of the buffer is then
                undefined.
            OSError: storage failed.
        """


@runtime_checkable
class SpreadReader(RangeReader, Protocol):
    """A file whose requests are dear, so that one fills several buffers."""

    def read_spread(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after another from `offset` on; same errors as `read_into`."""


@runtime_checkable
class MappedReader(RangeReader, Protocol):
    """A file whose bytes can be looked at without a copy."""

    def mapped(self, offset: int, size_bytes: int) -> AbstractContextManager[memoryview | None]:
        """Lend bytes, read only, until the exit; None if they must be read."""
        ...


class Storage(ABC):
    """A store of bytes under keys.

    Calls in the order of a save:

    1. (coordinator) `check_root` once, then `try_lock`.
    2. (coordinator) `make_directory` for the working directory.
    3. (all ranks, background thread) `write_pieces` or `create` for each of the rank's files, then
       `sync_directory`.
    4. (coordinator, background thread) `create` for metadata, manifest and marker; `sync_directory`;
       where `supports_rename`, `rename` onto the final name, or of each file into an existing directory of
       that name, and `sync_directory` of the parent.
    5. (coordinator) `rename` to a trash name or `delete` of the marker, then `delete` of the rest, to prune.

    Concurrency: every method may be called from any thread of any process at the same time.
    Errors: OS errors pass through unchanged (`FileNotFoundError`, `FileExistsError`, `PermissionError`,
    `OSError(ENOSPC)`…); remote backends translate theirs into the nearest of these.
    """

    supports_rename: bool
    """Whether `rename` exists and is atomic. Without it a commit is the creation of the marker object."""

    rereads_from_memory: bool = False
    """Whether a second read of the same bytes runs at memory speed, as from a page cache.

    If not, a caller that needs bytes twice keeps them: every byte is read once from an object store.
    """

    reads_in_place: bool = False
    """Whether ranged reads are received where they belong, so that a large one takes no more memory."""

    supports_append: bool = False
    """Whether `append` exists. Without it a file that grows has to be replaced as a whole."""

    num_disks: int = 1
    """How many disks of nodes make up the root: one, unless each node has its own."""

    @property
    def own(self) -> Storage:
        """The disk to which this rank writes its files; its node's, if each has one."""
        return self

    @property
    def parts(self) -> Sequence[Storage]:
        """The disks that make up the root, in the order of their groups."""
        return (self,)

    @property
    @abstractmethod
    def url(self) -> str:
        """The absolute path or URL, for messages."""

    @abstractmethod
    def check_root(self) -> None:
        """Create the root if necessary and prove that a file can be written there.

        One that is full passes, since its owner may free space there.

        Raises:
            NotADirectoryError: the root is a file.
            PermissionError: nothing can be created there.
            OSError: anything else, with the path in the message.
        """

    @abstractmethod
    def create(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file for streaming writes; parents are created.

        When the context exits without an error, the content is durable under `key` (fsync, or a completed
        upload). After an error nothing that looks complete may remain: a partial local file is allowed (its
        directory is uncommitted), a partial object is not.

        Raises:
            FileExistsError: `key` exists already (checked where that is possible without a race).
        """

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        """Create a large file from consecutive pieces, durable on return.

        Every piece starts on a page boundary of memory, is a multiple of 4 KiB long except the last, and is
        not changed as long as anything refers to it. Pieces are taken one by one, so that a generator can
        prepare the next while earlier ones are being written, and may wait for these to be let go: at most
        `held_bytes` are kept for later. Raises the same errors as `create`.
        """
        with self.create(key) as stream:
            for piece in pieces:
                stream.write(piece)

    def held_bytes(self, size_bytes: int) -> int:
        """Return how much of a file of that size `write_pieces` gathers before it writes."""
        del size_bytes
        return 0

    def put_file(
        self,
        key: str,
        size_bytes: int,
        read: ReadAt,
        *,
        identity: str,
        pace: Pace | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Create a file whose content can be read at any offset, durable on return.

        Only one process at a time may put a key. A call that failed or was killed can be repeated: a file
        with this identity and size, or with equal bytes, stays. Where storage takes a file in parts, parts
        of an earlier call with this identity are not sent again. Memory is bounded per storage.

        Args:
            key: of the file.
            size_bytes: of the file.
            read: every byte goes through it before the file is complete, so that it can check them; an
                error of it ends the call, and no object appears.
            identity: a short text, such as a checksum, that no other content of this key has.
            pace: slows what is sent.
            progress: called with counts of bytes that are there; all of them make `size_bytes`.

        Raises:
            FileExistsError: something else is there.
            OSError: storage failed.
        """
        source = PutSource(size_bytes, read, pace or iter, progress or (lambda _: None))
        self.put_source(key, source, identity)

    def put_source(self, key: str, source: PutSource, identity: str) -> None:
        """Put a file, as `put_file` does; by default bytes are compared, no identities."""
        del identity
        put_whole(self, key, source)

    def put_pieces(
        self, key: str, pieces: Callable[[], Iterable[memoryview]], *, identity: str, pace: Pace = iter
    ) -> None:
        """Create a file whose size shows when it is made, durable on return.

        As by `put_file`, a call that failed or was killed can be repeated, and what is there is not sent
        again; but what else an earlier call has put there is replaced.

        Args:
            key: of the file, which nobody else puts.
            pieces: called for each try; yields the content, of one identity the same. An error of it ends the
                call, and no object appears.
            identity: a short text that no other content of this key has.
            pace: slows what is sent.

        Raises:
            OSError: storage failed.
        """
        del identity
        if self.exists(key):
            with self.open(key) as stream:
                equal = all(stream.read(len(piece)) == piece for piece in pieces()) and not stream.read(1)
                if equal:
                    _sync(stream)
            if equal:
                return
            self.delete(key)

        def send(piece: memoryview) -> None:
            for each in pace([piece]):
                stream.write(each)

        with self.create(key) as stream:
            # The next piece is made, perhaps compressed, while one is sent.
            with Workers(send, 1, name="ckpt-piece") as sender:
                for piece in pieces():
                    sender.take(piece)
            sender.raise_first()

    @abstractmethod
    def open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading, by a seekable stream; FileNotFoundError."""

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open a file for ranged reads on several threads; same errors as `open`.

        The default uses one stream of `open`, so that threads wait for one another.
        """
        with self.open(key) as stream:
            yield StreamRanges(stream, f"{self.url}/{key}")

    @abstractmethod
    def replace(self, key: str, content: bytes) -> None:
        """Write a small file atomically, durable on return, over an existing one."""

    def append(self, key: str, content: bytes) -> None:
        """Append to a small file, which is made if it is missing; not durable on return.

        A crash may leave a part of `content`. Directories are not made: FileNotFoundError.
        NotImplementedError if not `supports_append`.
        """
        raise NotImplementedError(f"{self.url}: nothing can be appended here ({key}, {len(content)} bytes)")

    @abstractmethod
    def list(self, key: str) -> list[StorageEntry]:
        """List a directory, sorted by name; [] if it does not exist."""

    def directories(self, key: str) -> set[str]:
        """Return the names of the directories in a directory, without links."""
        return {entry.name for entry in self.list(key) if entry.is_directory and not entry.is_link}

    def entry(self, key: str) -> StorageEntry | None:
        """Return the entry of one child, as `list` does; None if it does not exist."""
        directory, _, name = key.rpartition("/")
        return next((entry for entry in self.list(directory) if entry.name == name), None)

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a file, or a directory with its content; no-op if it does not exist."""

    def interrupt(self) -> None:  # noqa: B027 - most storages cannot
        """Let requests under way fail soon, on any thread; later ones are not affected.

        For a process that ends. What cannot be cancelled goes on until its own time limit.
        """

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Abort uploads that were begun and never completed, where storage has such.

        `unwanted` returns whether the upload to a key may be aborted. Returns the keys of the aborted ones.
        """
        del unwanted
        return []

    @abstractmethod
    def make_directory(self, key: str) -> None:
        """Make a directory and parents durably; FileExistsError. No-op in object stores."""

    @abstractmethod
    def sync_directory(self, key: str) -> None:
        """Make the entries of a directory durable (fsync); no-op on object stores."""

    def rename(self, source: str, target: str) -> None:
        """Rename a directory, file or link atomically, onto a free name only.

        Links are renamed as such; `target` may be in another directory. FileExistsError if it exists;
        NotImplementedError if not `supports_rename`.
        """
        raise NotImplementedError(f"{self.url}: nothing can be renamed here ({source} to {target})")

    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories in one step, so that both names always exist.

        FileNotFoundError if one of them does not; NotImplementedError if not `supports_rename`.
        """
        raise NotImplementedError(f"{self.url}: nothing can be exchanged here ({first} and {second})")

    def space(self) -> Space:
        """Return the room for this user; by default nothing is known."""
        return Space()

    @abstractmethod
    def try_lock(self, key: str) -> Lock | None:
        """Lock `key` exclusively among live processes; None if another process holds it.

        The file's content is not touched. Backends that cannot lock return a lock that excludes nothing;
        callers must fence by other means (see `commit.Lease`).
        """

    def lock_holder(self, key: str) -> int | None:
        """Return the process id of the holder of a lock, for messages; None if unknown."""
        del key
        return None

    def other_owner(self, key: str) -> str | None:
        """Return the owner in words if `key` belongs to another user, else None."""
        del key
        return None

    def crc32(self, key: str, offset: int, size_bytes: int) -> int:
        """Return the CRC-32 of a range of a file, computed where the file is if possible.

        FileNotFoundError if there is no such file, EOFError if it ends earlier.
        """
        found, end = 0, offset + size_bytes
        buffer = memoryview(bytearray(min(size_bytes, _BLOCK_BYTES)))
        with self.open_ranges(key) as reader:
            while offset < end:
                block = buffer[: end - offset]
                reader.read_into(offset, block)
                found, offset = crc32(block, found), offset + len(block)
        return found

    def paths_below(self, key: str, depth: float = math.inf) -> Iterator[str]:
        """Yield the paths of files and links in a directory; links are not followed."""
        for child in self.list(key):
            if not child.is_directory or child.is_link:
                yield child.name
            elif depth > 1:
                below = self.paths_below(f"{key}/{child.name}", depth - 1)
                yield from (f"{child.name}/{path}" for path in below)

    def bytes_below(self, key: str) -> int:
        """Return the size of all files below a directory."""
        return sum(
            self.bytes_below(f"{key}/{each.name}") if each.is_directory else each.size_bytes
            for each in self.list(key)
        )

    def read_bytes(self, key: str) -> bytes:
        """Read a small file; FileNotFoundError if there is none."""
        with self.open(key) as stream:
            return stream.read()

    def write_bytes(self, key: str, content: bytes) -> None:
        """Create a small file, durable on return; same errors as `create`."""
        with self.create(key) as stream:
            stream.write(content)

    def exists(self, key: str) -> bool:
        """Return whether a file exists at `key`."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True


_logger = logger_of(__name__)

BIGGEST_SMALL_FILE: Final = 1 << 30
"""In bytes: the limit of `.metadata`, a chunk table or a rank's items; no save writes a larger one."""


class ForeignFileError(PermissionError):
    """An entry that must not be read as one of our files: a link out, pipe or device."""


def read_small(
    storage: Storage, key: str, most_bytes: int = BIGGEST_SMALL_FILE, *, committed_bytes: int | None = None
) -> bytes:
    """Read a whole small file after checking its size.

    More than `most_bytes` are not read; `committed_bytes` is the only right size, None for any.

    Raises:
        FileNotFoundError: no such file.
        CorruptCheckpointError: it has another size, or is not a regular file.
        OSError: storage failed.
    """
    try:
        with storage.open(key) as stream:
            size = stream.seek(0, os.SEEK_END)
            if committed_bytes is not None and size != committed_bytes:
                raise _foreign(storage, key, f"has {size} bytes, {committed_bytes} were committed")
            if size > most_bytes:
                raise _foreign(storage, key, f"has {size} bytes, and may have {most_bytes} at most")
            stream.seek(0)
            return stream.read()
    except ForeignFileError as error:
        raise _foreign(storage, key, str(error.strerror)) from error
    except IsADirectoryError as error:
        raise _foreign(storage, key, "is a directory instead of a file") from error


def read_intact(
    storage: Storage, key: str, read: Callable[[Storage], bytes], problem: Callable[[bytes], str]
) -> tuple[bytes, str]:
    """Read bytes, and again if they are not intact: a transfer may have failed.

    Of a root on several disks each may have the file: it is read from one after the other. `problem` returns
    what is wrong with bytes, "" if they are intact. Returns intact bytes and "", or others and what is wrong
    with them.

    Raises:
        Exception: what `read` raises on one disk, or on the first of several of which none has intact bytes.
    """
    disks = storage.parts
    if len(disks) == 1:
        content = read(storage)
        return (content, "") if not problem(content) else ((again := read(storage)), problem(again))
    found: tuple[bytes, str] | None = None
    failure: Exception | None = None
    for each in (storage, *disks):
        try:
            content = read(each)
        except (CorruptCheckpointError, OSError) as error:
            failure = failure or error
            continue
        if not (wrong := problem(content)):
            if found is not None or failure is not None:
                _tell_of_other_disk(f"{storage.url}/{key}", str(failure) if found is None else found[1])
            return content, ""
        found = found or (content, wrong)
    if found is None and failure is not None:
        raise failure
    return cast("tuple[bytes, str]", found)


@lru_cache(maxsize=256)
def _tell_of_other_disk(place: str, problem: str) -> None:
    _logger.warning(
        "%s is not whole on the disk of one node (%s), and is read from that of another", place, problem
    )


def _foreign(storage: Storage, key: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=key.partition("/")[2] or key, problem=problem)
    return CorruptCheckpointError(f"{storage.url}/{key}: {problem}", failures=(failure,))
