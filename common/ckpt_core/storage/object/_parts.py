"""Objects sent in parts: whole or not at all, and never over another.

Every upload has a token, which the service keeps with the object. If the outcome of an upload is unknown, or
it was refused because the object exists, the token tells whether the object is this upload's.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, Protocol, Self, cast, final

from ckpt_core.crew import Workers, run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.formats.checksums import crc32
from ckpt_core.storage._base import Pace, PutSource, StorageEntry, file_key
from ckpt_core.storage.object._storage import ObjectStorage
from ckpt_core.storage.object._translation import translated_errors

_MIB: Final = 2**20
_BLOCK_BYTES: Final = 16 * _MIB
CONNECTIONS: Final = 8
MOST_PARTS: Final = 9_999
"""S3 takes one more."""

_MEMORY_BYTES: Final = 64 * _MIB
# Parts double after so many, so that no object needs too many of them.
_EQUAL_PARTS: Final = 1_000
# Of what a stream holds: one part being filled, one waiting, two on their way.
_STREAM_THREADS: Final = 2

_logger = logger_of(__name__)


class PartedObject(Protocol):
    """A new object that arrives in parts; `send` may be called on several threads."""

    def name_of(self, number: int, mark: str) -> str:
        """Name a part by its place, from 0 on, and its CRC-32 in hexadecimal."""
        ...

    def there(self) -> frozenset[str]:
        """Return the names of the parts that have arrived."""
        ...

    def send(self, name: str, content: Sequence[memoryview]) -> None:
        """Send one part, from where it lies in memory."""

    def complete(self, names: Sequence[str]) -> None:
        """Make the object; FileExistsError if there is one."""

    def abandon(self) -> None:
        """Drop the parts; to be called after `complete`, too."""


class PartStorage(ObjectStorage):
    """An object store that takes large objects in parts, each of 16 MiB by default.

    `connections` is how many parts of one object are on their way at the same time.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any], *, block_bytes: int | None, connections: int
    ) -> None:
        super().__init__(url, storage_options)
        self._block_bytes = block_bytes or _BLOCK_BYTES
        self._connections = connections
        self._buffers = _PartMemory(max(_MEMORY_BYTES, self._block_bytes))

    @abstractmethod
    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        """Create an object, with the token, in one request; FileExistsError."""

    @abstractmethod
    def size_and_token(self, path: str) -> tuple[int, str | None]:
        """Return size and token of an object; FileNotFoundError if there is none."""

    @abstractmethod
    def listed(self, prefix: str, delimiter: str) -> Sequence[StorageEntry]:
        """List objects by their prefix, up to the next delimiter; names are whole."""

    @abstractmethod
    def begin(self, path: str, token: str, *, again: bool) -> PartedObject:
        """Begin an upload; `again`: continue one with that token, if there is one."""

    def size_of(self, path: str) -> int:
        return self.size_and_token(path)[0]

    def children(self, path: str) -> Sequence[StorageEntry]:
        prefix = f"{path}/" if path else ""
        found = [entry for entry in self.listed(prefix, "/") if entry.is_directory or entry.name != prefix]
        return [entry._replace(name=entry.name[len(prefix) :]) for entry in found]

    def below(self, path: str) -> Sequence[str]:
        """List an object, even one that no listing shows yet, and all below it."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            self.size_of(path)
            found.append(path)
        return found + [entry.name for entry in self.listed(f"{path}/", "")]

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        path = self._free_path(key)
        with _Sending(self, path, self._block_bytes, _STREAM_THREADS) as upload:
            with io.BufferedWriter(_Stream(upload, self._block_bytes), 1 << 16) as stream:
                try:
                    yield cast("IO[bytes]", stream)
                except BaseException:
                    upload.fail()
                    raise
            upload.finish()

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        path = self._free_path(key)
        with _Sending(self, path, self._block_bytes, self._connections) as upload:
            for piece in pieces:
                upload.take(piece)
            upload.finish()

    def held_bytes(self, size_bytes: int) -> int:
        part, rest = self._block_bytes, size_bytes
        while rest > part * _EQUAL_PARTS:
            part, rest = part * 2, rest - part * _EQUAL_PARTS
        return part

    def put_source(self, key: str, source: PutSource, identity: str) -> None:
        path, size = self.path(file_key(key)), source.size_bytes
        token = hashlib.sha256(f"{identity} {size}".encode()).hexdigest()[:32]
        with suppress(FileNotFoundError):
            if self.size_and_token(path) != (size, token):
                raise self._occupied(path)
            source.progress(size)
            return
        if size > self._block_bytes:
            self._put_parts(path, source, token)
            return
        with self._buffers.lend(size) as buffer:
            source.read(0, buffer)
            for piece in source.pace([buffer]):
                with self.decided(path, token):
                    self.put_new(path, [piece], token)
        source.progress(size)

    def put_pieces(
        self, key: str, pieces: Callable[[], Iterable[memoryview]], *, identity: str, pace: Pace = iter
    ) -> None:
        path = self.path(file_key(key))
        token = hashlib.sha256(identity.encode()).hexdigest()[:32]
        there: str | None = ""
        with suppress(FileNotFoundError):
            there = self.size_and_token(path)[1]
        if there is None:
            raise self._occupied(path)  # by what no upload of ours has made
        if there == token:
            for _ in pieces():
                pass  # who makes them wants to know their sizes
            return
        if there:
            self.delete(key)
        with _Sending(self, path, self._block_bytes, _STREAM_THREADS, goes_on=(token, pace)) as upload:
            for piece in pieces():
                upload.take(piece)
            upload.finish()

    @contextmanager
    def decided(self, path: str, token: str) -> Generator[None]:
        """Pass over an error after which the object is there, made with the token.

        FileExistsError if another one is there; other errors if the outcome is unknown, or nothing is there.
        """
        try:
            with translated_errors(self.url, self.redaction):
                yield
        except Exception as error:
            there = None
            with suppress(Exception):
                there = self.size_and_token(path)[1]
            if there == token:
                _logger.info("%s is there, although its upload ended with: %s", path, self.shown(error))
                return
            if isinstance(error, FileExistsError):
                raise self._occupied(path) from error
            raise

    def dropped(self, parts: PartedObject, path: str) -> None:
        """Drop parts; a failure is logged only, for another error may be on its way."""
        try:
            parts.abandon()
        except Exception as error:  # noqa: BLE001
            shown = path, type(error).__name__, self.shown(error)
            _logger.warning("%s: could not clean up after an upload: %s: %s", *shown)

    def _put_parts(self, path: str, source: PutSource, token: str) -> None:
        with translated_errors(self.url, self.redaction):
            parts = self.begin(path, token, again=True)
            there = parts.there()
        step = max(self._block_bytes, (source.size_bytes // (MOST_PARTS * _MIB) + 1) * _MIB)
        starts = range(0, source.size_bytes, step)
        names = [""] * len(starts)

        def put(number: int) -> None:
            size = min(step, source.size_bytes - starts[number])
            with self._buffers.lend(size) as buffer:
                source.read(starts[number], buffer)
                name = names[number] = parts.name_of(number, mark([buffer]))
                if name not in there:
                    for piece in source.pace([buffer]):
                        with translated_errors(self.url, self.redaction):
                            parts.send(name, [piece])
            source.progress(size)

        run_all(put, range(len(starts)), self._connections, name="ckpt-part")
        try:
            with self.decided(path, token):
                parts.complete(names)
        except FileExistsError:
            self.dropped(parts, path)
            raise
        self.dropped(parts, path)

    def _free_path(self, key: str) -> str:
        path = self.path(file_key(key))
        with suppress(FileNotFoundError):
            self.size_of(path)
            raise self._occupied(path)
        return path

    def _occupied(self, path: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, "the object exists already", f"{self.url}: {self.shown(path)}")


def mark(content: Sequence[memoryview]) -> str:
    value = 0
    for piece in content:
        value = crc32(piece, value)
    return f"{value:08x}"


@final
class _Sending:
    """An object that is sent while its pieces arrive; none of them is copied.

    `goes_on` is the token of an upload that a later one continues, and what slows it.
    """

    def __init__(
        self,
        storage: PartStorage,
        path: str,
        block_bytes: int,
        threads: int,
        *,
        goes_on: tuple[str, Pace] | None = None,
    ) -> None:
        self._storage = storage
        self._path = path
        self._again = goes_on is not None
        self._token, self._pace = goes_on or (secrets.token_hex(8), iter)
        self._there: frozenset[str] = frozenset()
        self._done = False
        self._block_bytes = block_bytes
        self._parts: PartedObject | None = None
        self._names: list[str] = []
        self._held: list[memoryview] = []
        self._room = block_bytes
        self._workers = Workers(self._send, threads, name="ckpt-part")
        self._failed = False

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the threads; leave nothing of what nobody completes or continues."""
        self._workers.__exit__()
        if self._parts is not None and (self._done or not self._again):
            self._storage.dropped(self._parts, self._path)

    def take(self, piece: memoryview) -> None:
        """Take a piece that does not change; raise the failure of an earlier one."""
        while piece and not self._failed:
            if not self._room:
                self._pass_on()
            taken = piece[: self._room]
            self._held.append(taken)
            self._room -= len(taken)
            piece = piece[len(taken) :]

    def fail(self) -> None:
        self._failed = True
        self._held.clear()

    def finish(self) -> None:
        if self._parts is None:
            held = list(self._pace(self._held))
            with self._storage.decided(self._path, self._token):
                self._storage.put_new(self._path, held, self._token)
            return
        self._pass_on()
        self._workers.__exit__()
        self._workers.raise_first()
        with self._storage.decided(self._path, self._token):
            self._parts.complete(self._names)
        self._done = True

    def _pass_on(self) -> None:
        if self._parts is None:
            with translated_errors(self._storage.url, self._storage.redaction):
                self._parts = self._storage.begin(self._path, self._token, again=self._again)
                self._there = self._parts.there() if self._again else self._there
        number = len(self._names)
        self._names.append("")
        self._workers.take((number, self._held))
        self._held = []
        self._room = self._block_bytes << ((number + 1) // _EQUAL_PARTS)

    def _send(self, task: tuple[int, Sequence[memoryview]]) -> None:
        number, content = task
        parts = cast("PartedObject", self._parts)
        name = self._names[number] = parts.name_of(number, mark(content))
        if name not in self._there:
            content = list(self._pace(content))
            with translated_errors(self._storage.url, self._storage.redaction):
                parts.send(name, content)


@final
class _Stream(io.RawIOBase):
    """A stream into an upload, which gets copies of what is written."""

    def __init__(self, upload: _Sending, block_bytes: int) -> None:
        super().__init__()
        self._upload = upload
        self._block_bytes = block_bytes

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        with memoryview(content) as view:
            bytes_view = view.cast("B")
            # In pieces of a block at most, so that the memory of parts that are sent is free at once.
            for start in range(0, len(bytes_view), self._block_bytes):
                self._upload.take(memoryview(bytes(bytes_view[start : start + self._block_bytes])))
            return len(bytes_view)


@final
class _PartMemory:
    """Memory for parts, bounded over all uploads of a client."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._lent = 0
        self._free: list[mmap.mmap] = []
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, size_bytes: int) -> Generator[memoryview]:
        """Wait until so much is free; one buffer may always be lent, however large."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent or self._lent + size_bytes <= self._total)
            self._lent += size_bytes
            buffer = self._free.pop() if self._free and len(self._free[-1]) >= size_bytes else None
        if buffer is None:
            buffer = mmap.mmap(-1, max(size_bytes, 1))
        try:
            yield memoryview(buffer)[:size_bytes]
        finally:
            with self._changed:
                self._lent -= size_bytes
                if self._lent:
                    self._free.append(buffer)
                else:
                    self._free.clear()
                self._changed.notify_all()
