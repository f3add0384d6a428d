"""The disk of another rank, over talks with it, and this rank's for the others."""

from __future__ import annotations

import errno
import io
import mmap
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Final, cast, final

import numpy as np
from typing_extensions import override

from ckpt_core import messages
from ckpt_core.coordination import Talk, Talks
from ckpt_core.errors import failure_text
from ckpt_core.formats.checksums import crc32
from ckpt_core.storage import ForeignFileError, Lock, RangeReader, RangeStream, Space, Storage, StorageEntry

PIECE_BYTES: Final = 16 << 20
"""The most bytes of one piece."""

_operations: Final = set[str]()
"""The methods of `Storage` that ranks ask one another for."""

messages.register(StorageEntry, tuple, lambda row: StorageEntry(*row))
messages.register(Space, tuple, lambda row: Space(*row))
messages.register(EOFError, str, EOFError)
messages.register(ValueError, str, ValueError)
messages.register(
    ForeignFileError,
    lambda error: (error.errno, error.strerror, error.filename),
    lambda said: ForeignFileError(*said),
)


def serve_disk(storage: Storage, talks: Talks) -> None:
    """Carry out on this disk what other ranks ask for, from now on."""
    if not talks.is_answering:
        service = DiskService(storage, talks.rank)
        talks.answer_with(service.answer, ended=service.close)


@final
class DiskService:
    """Carries out on one disk what other ranks ask for.

    A talk is one request: an operation of `Storage` and its arguments. The answer is its value or its error.

    Concurrency: `answer` on a thread for each talk.
    """

    def __init__(self, storage: Storage, rank: int) -> None:
        self._storage = storage
        self._place = f"on the node of rank {rank}"
        self._locks: dict[str, Lock] = {}
        self._memory = PieceMemory()

    def close(self) -> None:
        """Release the locks that the coordinator has left."""
        for key in list(self._locks):
            self._unlock(key)

    def answer(self, talk: Talk) -> None:
        operation, *arguments = talk.hear()
        special = {
            "lock": self._lock,
            "unlock": self._unlock,
            "read": lambda *place: self._read(talk, *place),
            "write": lambda key: self._write(talk, key),
            "replace": lambda key: self._storage.replace(key, b"".join(self._pieces(talk))),
        }
        if operation not in special and operation not in _operations:
            raise LookupError(operation)
        act = special.get(operation) or getattr(self._storage, operation)
        try:
            found = act(*arguments)
            talk.tell(frozenset(found) if isinstance(found, set) else found)
        except Exception as error:  # noqa: BLE001 - raised on the rank that asked
            talk.tell(self._sendable(error))

    def _read(self, talk: Talk, key: str) -> None:
        with self._storage.open_ranges(key) as reader:
            talk.tell(reader.size_bytes)
            while (place := talk.hear()) is not None:
                offset, size = place
                view = self._memory.take(size)
                reader.read_into(offset, view)
                talk.give([view])

    def _write(self, talk: Talk, key: str) -> int:
        """Write a file of the pieces that come, durably; return its CRC-32."""
        pieces = _Summed(self._pieces(talk))
        self._storage.write_pieces(key, pieces)
        return pieces.crc32

    def _pieces(self, talk: Talk) -> Iterator[memoryview]:
        while pieces := talk.take(self._memory.take):
            yield from pieces

    def _lock(self, key: str) -> bool:
        lock = None if key in self._locks else self._storage.try_lock(key)
        if lock is not None:
            self._locks[key] = lock
        return lock is not None

    def _unlock(self, key: str) -> None:
        with suppress(KeyError):
            self._locks.pop(key).release()

    def _sendable(self, error: Exception) -> Exception:
        """Return the error as another rank raises it, with the place of its file."""
        if type(error) in {EOFError, ValueError}:
            return error
        if not isinstance(error, OSError) or error.errno is None:
            return OSError(errno.EREMOTEIO, failure_text(error), self._place)
        kind = ForeignFileError if isinstance(error, ForeignFileError) else OSError
        where = f"{error.filename} {self._place}" if isinstance(error.filename, str) else self._place
        return kind(error.errno, str(error.strerror or error), where)


@final
class PieceMemory:
    """Memory for pieces, used again once nothing refers to a piece.

    It is on page boundaries. A storage may keep pieces until a file is written: as many are made as it keeps.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, PIECE_BYTES)
        # A view of its own for each use: its end is the end of all that was made of it.
        view: Any = np.frombuffer(memory, dtype=np.uint8, count=size)
        weakref.finalize(view, self._free.append, memory).atexit = False
        return memoryview(view)


@final
class _Summed:
    """Pieces, and the CRC-32 of those that were taken."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces, self.crc32 = pieces, 0

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self.crc32 = crc32(piece, self.crc32)
            yield piece


_BUFFER_BYTES: Final = 1 << 20
_AT_ONCE: Final = 2
"""Pieces that are sent together, so that few messages are needed."""


def _asked(operation: str) -> Any:
    """Return a method of `Storage` that another rank carries out."""
    _operations.add(operation)
    return lambda disk, *arguments: disk._ask(operation, *arguments)


@final
class RemoteDisk(Storage):
    """The root as another rank sees it, which carries out what it is asked for.

    Errors of that disk are raised here; a rank that is lost, or does not answer, is a `ConnectionError` or a
    `TimeoutError`.
    """

    supports_rename = True
    rereads_from_memory = True

    def __init__(self, talks: Talks, rank: int, url: str) -> None:
        self._talks = talks
        self._rank = rank
        self._url = url

    @property
    @override
    def url(self) -> str:
        return self._url

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._talks.begin(self._rank) as talk:
            talk.tell((operation, *arguments))
            return talk.hear()

    check_root = _asked("check_root")
    size = _asked("size")
    crc32 = _asked("crc32")  # the bytes stay where they are
    list = _asked("list")
    directories = _asked("directories")
    entry = _asked("entry")
    delete = _asked("delete")
    make_directory = _asked("make_directory")
    sync_directory = _asked("sync_directory")
    rename = _asked("rename")
    exchange = _asked("exchange")
    space = _asked("space")
    unlock = _asked("unlock")
    lock_holder = _asked("lock_holder")
    other_owner = _asked("other_owner")

    @contextmanager
    @override
    def create(self, key: str) -> Generator[IO[bytes]]:
        content = io.BytesIO()
        yield content
        self.write_pieces(key, [memoryview(content.getvalue())])

    @override
    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        summed = _Summed(pieces)
        if self._send("write", key, summed) != summed.crc32:
            raise OSError(
                errno.EBADMSG, f"rank {self._rank} got other bytes than were sent: the network is faulty", key
            )

    @override
    def replace(self, key: str, content: bytes) -> None:
        self._send("replace", key, [memoryview(content)])

    def _send(self, operation: str, key: str, pieces: Iterable[memoryview]) -> Any:
        together: list[memoryview] = []
        with self._talks.begin(self._rank) as talk:
            talk.tell((operation, key))
            for piece in self._or_abort(talk, pieces):
                for start in range(0, len(piece), PIECE_BYTES):
                    together.append(piece[start : start + PIECE_BYTES])
                    if len(together) == _AT_ONCE:
                        talk.give(together)
                        together = []
            if together:
                talk.give(together)
            talk.give([])
            return talk.hear()

    def _or_abort(self, talk: Talk, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        try:
            yield from pieces
        except Exception:
            with suppress(OSError):
                talk.tell(ConnectionAbortedError(errno.ECONNABORTED, "the source of the file failed"))
                talk.hear()
            raise

    @contextmanager
    @override
    def open(self, key: str) -> Generator[IO[bytes]]:
        with self.open_ranges(key) as reader:

            def read(offset: int, buffer: memoryview) -> int:
                reader.read_into(offset, buffer)
                return len(buffer)

            raw = RangeStream(reader.size_bytes, read, f"{self.url}/{key}")
            with io.BufferedReader(raw, _BUFFER_BYTES) as stream:
                yield cast("IO[bytes]", stream)

    @contextmanager
    @override
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        reader = _RemoteReader(self._talks, self._rank, key)
        try:
            yield reader
        finally:
            reader.close()

    @override
    def try_lock(self, key: str) -> Lock | None:
        return _RemoteLock(self, key) if self._ask("lock", key) else None


@final
class _RemoteLock:
    """A lock that another rank holds for the coordinator."""

    def __init__(self, disk: RemoteDisk, key: str) -> None:
        self._disk = disk
        self._key = key

    def release(self) -> None:
        # A rank that is gone holds no lock any more.
        with suppress(OSError):
            self._disk.unlock(self._key)


@final
class _RemoteReader:
    """A file on the disk of another rank, open for ranged reads.

    Concurrency: any thread; each that reads has a talk for itself.
    """

    def __init__(self, talks: Talks, rank: int, key: str) -> None:
        self._talks = talks
        self._rank = rank
        self._key = key
        self._idle: SimpleQueue[Talk] = SimpleQueue()
        self._idle.put(self._opened())

    def read_into(self, offset: int, buffer: memoryview) -> None:
        try:
            talk = self._idle.get_nowait()
        except Empty:
            talk = self._opened()
        try:
            for start in range(0, len(buffer), PIECE_BYTES):
                part = buffer[start : start + PIECE_BYTES]
                talk.tell((offset + start, len(part)))
                talk.take([part])
        except BaseException:
            talk.end()
            raise
        self._idle.put(talk)

    def close(self) -> None:
        while not self._idle.empty():
            with self._idle.get_nowait() as talk, suppress(OSError):
                talk.tell(None)

    def _opened(self) -> Talk:
        talk = self._talks.begin(self._rank)
        try:
            talk.tell(("read", self._key))
            self.size_bytes = int(talk.hear())
        except BaseException:
            talk.end()
            raise
        return talk
