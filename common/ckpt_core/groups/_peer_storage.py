"""The disk of another group, over connections to its leader."""

from __future__ import annotations

import errno
import io
import itertools
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, cast, final

from typing_extensions import override

from ckpt_core.coordination import PIECE_BYTES, Addressee, Greeting, Link
from ckpt_core.errors import failure_text
from ckpt_core.groups._wire import MOST_ANSWER_BYTES, entry_of, value_of
from ckpt_core.storage import Lock, RangeReader, RangeStream, Space, Storage, StorageEntry

_BUFFER_BYTES: Final = 1 << 20


@final
class Peer:
    """The connections of this rank to the leader of another group; idle ones are kept.

    Concurrency: any thread; each request has a connection for itself.

    Args:
        addressee: the leader, and where it is reached.
        greeting: of this rank.
        seconds: the longest wait for an answer.
    """

    def __init__(self, addressee: Addressee, greeting: Greeting, seconds: float) -> None:
        self.rank = addressee.rank
        self._addressee = addressee
        self._greeting = greeting
        self._seconds = seconds
        self._guard = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False

    @contextmanager
    def link(self) -> Generator[Link]:
        """Lend a connection; it ends if the block raises.

        Raises:
            ConnectionError: the leader cannot be reached, or was lost.
        """
        link: Link | None = None
        try:
            link = self._lent()
            yield link
        except (OSError, EOFError) as error:
            if link is not None:
                link.close()
            raise self._lost(error) from error
        except BaseException:
            if link is not None:
                link.close()
            raise
        with self._guard:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def close(self) -> None:
        """End the connections."""
        with self._guard:
            self._closed = True
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def _lent(self) -> Link:
        with self._guard:
            if self._idle:
                return self._idle.pop()
            if self._closed:
                raise ConnectionAbortedError(errno.ECONNABORTED, "this manager is closed")
            link = self._addressee.connect(self._greeting, self._seconds, begun=lambda _: None)
        link.limit(self._seconds)
        return link

    def _lost(self, error: Exception) -> ConnectionResetError:
        return ConnectionResetError(
            errno.ECONNRESET,
            f"rank {self.rank}, which serves the disk of its node to other nodes, was not reached or was "
            f"lost ({failure_text(error)})",
        )


@final
class PeerStorage(Storage):
    """The root as the ranks of another group see it."""

    supports_rename = True
    rereads_from_memory = True

    def __init__(self, peer: Peer, url: str) -> None:
        self._peer = peer
        self._url = url
        self._openings = itertools.count()

    @property
    @override
    def url(self) -> str:
        return self._url

    def close(self) -> None:
        """End the connections."""
        self._peer.close()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._peer.link() as link:
            link.send_fields(**{"do": operation, "with": arguments})
            answer = link.receive_fields(MOST_ANSWER_BYTES)
        return value_of(answer, self._peer.rank)

    @override
    def check_root(self) -> None:
        self._ask("check_root")

    @contextmanager
    @override
    def create(self, key: str) -> Generator[IO[bytes]]:
        content = io.BytesIO()
        yield content
        self._write("write", key, content.getvalue())

    @override
    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        with self.writing(key) as send:
            for piece in pieces:
                send(piece)

    @contextmanager
    def writing(self, key: str, operation: str = "write") -> Generator[Callable[[memoryview], None]]:
        """Create a file of the pieces that are sent inside the block; durable after it."""
        with self._peer.link() as link:
            link.send_fields(**{"do": operation, "with": [key]})

            def send(piece: memoryview) -> None:
                for start in range(0, len(piece), PIECE_BYTES):
                    link.send(piece[start : start + PIECE_BYTES])

            yield send
            link.send(b"")
            answer = link.receive_fields()
        value_of(answer, self._peer.rank)

    def _write(self, operation: str, key: str, content: bytes) -> None:
        with self.writing(key, operation) as send:
            send(memoryview(content))

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
        opening = next(self._openings)
        yield _PeerReader(self._peer, key, opening, int(self._ask("open", key, opening)))

    @override
    def replace(self, key: str, content: bytes) -> None:
        self._write("replace", key, content)

    @override
    def list(self, key: str) -> list[StorageEntry]:
        return [entry_of(row) for row in self._ask("list", key)]

    @override
    def directories(self, key: str) -> set[str]:
        return set(self._ask("directories", key))

    @override
    def entry(self, key: str) -> StorageEntry | None:
        found = self._ask("entry", key)
        return None if found is None else entry_of(found)

    @override
    def size(self, key: str) -> int:
        return int(self._ask("size", key))

    @override
    def crc32(self, key: str, offset: int, size_bytes: int) -> int:
        return int(self._ask("crc32", key, offset, size_bytes))  # the bytes stay where they are

    @override
    def delete(self, key: str) -> None:
        self._ask("delete", key)

    @override
    def make_directory(self, key: str) -> None:
        self._ask("make_directory", key)

    @override
    def sync_directory(self, key: str) -> None:
        self._ask("sync_directory", key)

    @override
    def rename(self, source: str, target: str) -> None:
        self._ask("rename", source, target)

    @override
    def exchange(self, first: str, second: str) -> None:
        self._ask("exchange", first, second)

    @override
    def space(self) -> Space:
        return Space(*self._ask("free"))

    @override
    def try_lock(self, key: str) -> Lock | None:
        return _PeerLock(self, key) if self._ask("lock", key) else None

    def unlock(self, key: str) -> None:
        """Release a lock of `try_lock`; harmless when repeated."""
        self._ask("unlock", key)

    @override
    def lock_holder(self, key: str) -> int | None:
        found = self._ask("lock_holder", key)
        return None if found is None else int(found)

    @override
    def other_owner(self, key: str) -> str | None:
        found = self._ask("other_owner", key)
        return None if found is None else str(found)


@final
class _PeerLock:
    """A lock that the leader of another group holds for the coordinator."""

    def __init__(self, storage: PeerStorage, key: str) -> None:
        self._storage = storage
        self._key = key

    def release(self) -> None:
        # A leader that is gone holds no lock any more.
        with suppress(OSError):
            self._storage.unlock(self._key)


@final
class _PeerReader:
    """A file on the disk of another group, open for ranged reads."""

    def __init__(self, peer: Peer, key: str, opening: int, size_bytes: int) -> None:
        self._peer = peer
        self._key = key
        self._opening = opening
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from `offset` on."""
        for start in range(0, len(buffer), PIECE_BYTES):
            part = buffer[start : start + PIECE_BYTES]
            with self._peer.link() as link:
                place = [self._key, self._opening, offset + start, len(part)]
                link.send_fields(**{"do": "read", "with": place})
                answer = link.receive_fields()
                if "error" not in answer:
                    link.receive_into(part)
            value_of(answer, self._peer.rank)
