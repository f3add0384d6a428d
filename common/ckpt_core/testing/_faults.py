"""A storage that fails where a test wants it to.

Every operation has a number, counted over all threads from 0, a method and a key. Besides the methods of
`Storage` these are operations: `write` and `read`, one call on a stream, `read_into`, one range of what
`open_ranges` gave, and `close`, the clean end of a `create`, where content becomes durable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Any, cast, final

from ckpt_core.storage import RangeReader, Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One thing asked of a storage; `key` of a rename is `source -> target`."""

    number: int
    method: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An error, or calls, at operations whose `method` and `key` match by `fnmatch`.

    Attributes:
        nth: only at the nth of the matching operations, counted from 0; None for all of them.
        before: called before the operation.
        error: raised instead of the operation.
        after: called when the operation has succeeded.
    """

    method: str = "*"
    key: str = "*"
    nth: int | None = None
    before: Callable[[Operation], None] | None = None
    error: BaseException | None = None
    after: Callable[[Operation], None] | None = None

    def matches(self, operation: Operation) -> bool:
        """Return whether the patterns fit, whichever the nth."""
        return fnmatchcase(operation.method, self.method) and fnmatchcase(operation.key, self.key)


@final
class Script:
    """Faults to come and the log of operations, which any thread may perform."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._guard = threading.Lock()
        self._operations: list[Operation] = []
        self.inject(faults)

    @property
    def operations(self) -> tuple[Operation, ...]:
        with self._guard:
            return tuple(self._operations)

    def inject(self, faults: Sequence[Fault]) -> None:
        """From now on these faults and no others, each counted from 0."""
        with self._guard:
            self._faults = tuple(faults)
            self._seen = [0] * len(self._faults)

    @contextmanager
    def operation(self, method: str, key: str) -> Generator[Sequence[Fault]]:
        """Log an operation and apply its faults around the block; yields the faults."""
        with self._guard:
            operation = Operation(number=len(self._operations), method=method, key=key)
            self._operations.append(operation)
            matching = [index for index, fault in enumerate(self._faults) if fault.matches(operation)]
            due = [self._faults[i] for i in matching if self._faults[i].nth in {None, self._seen[i]}]
            for index in matching:
                self._seen[index] += 1
        for fault in due:
            if fault.before is not None:
                fault.before(operation)
            if fault.error is not None:
                raise fault.error
        yield due
        for fault in due:
            if fault.after is not None:
                fault.after(operation)


def _watched(method: str, between: str = "") -> Any:
    """Return a method of `Storage` as an operation on its key, or on two."""

    def act(storage: FaultyStorage, *arguments: Any) -> Any:
        with storage.operation(method, between.join(arguments[: 2 if between else 1])):
            return getattr(storage._inner, method)(*arguments)

    return act


@final
class FaultyStorage(Storage):
    """Passes everything on to another storage, except for the faults; keeps a log.

    Args:
        inner: the other storage.
        faults: what fails, and when.
        url: the URL to show, if not that of `inner`: the disks of simulated nodes have the same path.
    """

    def __init__(self, inner: Storage, faults: Sequence[Fault] = (), *, url: str | None = None) -> None:
        self._inner = inner
        self._url = inner.url if url is None else url
        self._script = Script(faults)
        self.supports_rename = inner.supports_rename
        self.supports_append = inner.supports_append
        self.rereads_from_memory = inner.rereads_from_memory
        self.reads_in_place = inner.reads_in_place

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was asked so far, faults included, in order."""
        return self._script.operations

    @property
    def url(self) -> str:
        return self._url

    def held_bytes(self, size_bytes: int) -> int:
        return self._inner.held_bytes(size_bytes)

    check_root = _watched("check_root")
    replace = _watched("replace")
    append = _watched("append")
    list = _watched("list")
    entry = _watched("entry")
    size = _watched("size")
    delete = _watched("delete")
    make_directory = _watched("make_directory")
    sync_directory = _watched("sync_directory")
    rename = _watched("rename", " -> ")
    exchange = _watched("exchange", " <-> ")
    space = _watched("space")
    try_lock = _watched("try_lock")
    lock_holder = _watched("lock_holder")
    other_owner = _watched("other_owner")

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        with ExitStack() as stack:
            with self.operation("create", key):
                stream = stack.enter_context(self._inner.create(key))
            yield cast("IO[bytes]", _FaultyStream(stream, self, key))
            with self.operation("close", key):
                stack.close()

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        with ExitStack() as closing:

            def watched() -> Generator[memoryview]:
                for piece in pieces:
                    with self.operation("write", key):
                        yield piece
                closing.enter_context(self.operation("close", key))

            with self.operation("create", key):
                pass
            self._inner.write_pieces(key, watched())

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        with ExitStack() as stack:
            with self.operation("open", key):
                stream = stack.enter_context(self._inner.open(key))
            yield cast("IO[bytes]", _FaultyStream(stream, self, key))

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with ExitStack() as stack:
            with self.operation("open_ranges", key):
                reader = stack.enter_context(self._inner.open_ranges(key))
            yield _FaultyRanges(reader, self, key)

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        with self.operation("abandon_uploads", ""):
            return self._inner.abandon_uploads(unwanted)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def operation(self, method: str, key: str) -> AbstractContextManager[object]:
        return self._script.operation(method, key)


@final
class _FaultyStream:
    """A stream whose reads and writes are operations; the rest is the real one's."""

    def __init__(self, stream: IO[bytes], storage: FaultyStorage, key: str) -> None:
        self._stream = stream
        self._storage = storage
        self._key = key

    def write(self, content: Any) -> int:
        with self._storage.operation("write", self._key):
            return self._stream.write(content)

    def read(self, count: int = -1) -> bytes:
        with self._storage.operation("read", self._key):
            return self._stream.read(count)

    def readinto(self, buffer: Any) -> int:
        with self._storage.operation("read", self._key):
            return int(cast("Any", self._stream).readinto(buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@final
class _FaultyRanges:
    def __init__(self, reader: RangeReader, storage: FaultyStorage, key: str) -> None:
        self._reader = reader
        self._storage = storage
        self._key = key
        self.size_bytes = reader.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._storage.operation("read_into", self._key):
            self._reader.read_into(offset, buffer)
