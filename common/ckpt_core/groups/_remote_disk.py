"""The disk of another rank, over talks with it."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, Final, cast, final

from typing_extensions import override

from ckpt_core.coordination import Talk, Talks
from ckpt_core.formats.checksums import crc32
from ckpt_core.groups._disk_service import PIECE_BYTES
from ckpt_core.storage import Lock, RangeReader, RangeStream, Space, Storage, StorageEntry

_BUFFER_BYTES: Final = 1 << 20
_AT_ONCE: Final = 2
"""Pieces that are sent together, so that few messages are needed."""


def _asked(operation: str, made: Callable[[Any], Any] = lambda answer: answer) -> Any:
    """Return a method of `Storage` that another rank carries out."""

    def ask(disk: RemoteDisk, *arguments: Any) -> Any:
        return made(disk._ask(operation, *arguments))

    return ask


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
    list = _asked("list", lambda rows: [StorageEntry(*row) for row in rows])
    directories = _asked("directories", set)
    entry = _asked("entry", lambda found: None if found is None else StorageEntry(*found))
    delete = _asked("delete")
    make_directory = _asked("make_directory")
    sync_directory = _asked("sync_directory")
    rename = _asked("rename")
    exchange = _asked("exchange")
    space = _asked("space", lambda found: Space(*found))
    unlock = _asked("unlock")
    lock_holder = _asked("lock_holder")
    other_owner = _asked("other_owner")

    @contextmanager
    @override
    def create(self, key: str) -> Generator[IO[bytes]]:
        content = io.BytesIO()
        yield content
        self.write_pieces(key, [content.getbuffer()])

    @override
    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        running = 0

        def summed() -> Iterator[memoryview]:
            nonlocal running
            for piece in pieces:
                running = crc32(piece, running)
                yield piece

        if self._send("write", key, summed()) != running:
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
        """Yield the pieces; if their source fails, the other rank drops the file first."""
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
        """Fill the buffer from `offset` on."""
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
        """End the talks."""
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
