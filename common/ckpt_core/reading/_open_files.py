"""The data files of a checkpoint, each opened when it is first read."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, final

from ckpt_core.storage import RangeReader, Storage


@final
class Budget:
    """How many bytes may still be kept, for all files together."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._guard = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Whether as much was left; it is not from now on."""
        with self._guard:
            if size_bytes > self._left:
                return False
            self._left -= size_bytes
            return True


@final
class KeptFile:
    """A file of which some ranges lie in memory; the others are read from `inner`.

    Concurrency: all methods may be called from several threads at once.
    """

    def __init__(self, inner: RangeReader, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget
        self._guard = threading.Lock()
        self._starts: list[int] = []
        self._kept: dict[int, bytes] = {}

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._inner.size_bytes

    def keep(self, offset: int, content: memoryview) -> None:
        """Keep a copy of what lies at `offset`, unless the budget is spent."""
        if offset in self._kept or not self._budget.take(len(content)):
            return
        copy = bytes(content)
        with self._guard:
            if offset not in self._kept:
                self._kept[offset] = copy
                insort(self._starts, offset)

    def holds(self, start: int, stop: int) -> bool:
        """Whether every byte of the range is kept."""
        while start < stop:
            found = self._at(start)
            if found is None:
                return False
            start = found[0] + len(found[1])
        return True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from memory as far as possible."""
        while buffer:
            found = self._at(offset)
            if found is None:
                count = min(len(buffer), self._next_start(offset) - offset)
                self._inner.read_into(offset, buffer[:count])
            else:
                start, content = found
                piece = memoryview(content)[offset - start : offset - start + len(buffer)]
                count = len(piece)
                buffer[:count] = piece
            offset, buffer = offset + count, buffer[count:]

    def _at(self, offset: int) -> tuple[int, bytes] | None:
        """The kept range that `offset` lies in, and where it starts."""
        with self._guard:
            place = bisect_right(self._starts, offset)
            if not place:
                return None
            start = self._starts[place - 1]
            content = self._kept[start]
        return (start, content) if offset < start + len(content) else None

    def _next_start(self, offset: int) -> int:
        """Where the first kept range after `offset` starts, or a place after all files."""
        with self._guard:
            place = bisect_right(self._starts, offset)
            return self._starts[place] if place < len(self._starts) else sys.maxsize


_MAX_OPEN: Final = 128
"""With more files than this, each is closed when a pass is done with it: descriptors are few."""


@final
class OpenFiles:
    """All files of one checkpoint, and how many bytes were asked of them.

    Concurrency: `at`, `kept` and `done` may be called from several threads at once during a pass.
    """

    def __init__(self, storage: Storage, directory: str, keep_bytes: int) -> None:
        self._storage = storage
        self._directory = directory
        self._budget = None if storage.rereads_from_memory else Budget(keep_bytes)
        self._sources: dict[str, _SourceFile] = {}
        self._kept: dict[str, KeptFile] = {}
        self._left: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes asked of storage so far."""
        return sum(source.bytes_read for source in self._sources.values())

    @property
    def reopens(self) -> bool:
        """Whether what one pass has opened may be another file when the next opens it again."""
        return len(self._sources) > _MAX_OPEN

    def begin(self, requests: Mapping[str, int]) -> None:
        """Expect as many requests of each path in the pass that begins."""
        self._left = dict(requests)
        for path in requests:
            if path not in self._sources:
                key = f"{self._directory}/{path}" if self._directory else path
                self._sources[path] = _SourceFile(self._storage, key)
                if self._budget is not None:
                    self._kept[path] = KeptFile(self._sources[path], self._budget)

    def at(self, path: str) -> RangeReader:
        """The file, of a path that was announced by `begin`."""
        return self._kept.get(path) or self._sources[path]

    def kept(self, path: str) -> KeptFile | None:
        """The same, where bytes are kept from pass to pass."""
        return self._kept.get(path)

    def done(self, path: str) -> None:
        """One of the requests has been served."""
        with self._guard:
            self._left[path] -= 1
            last = self._left[path] == 0
        if last and self.reopens:
            self._sources[path].close()

    def close(self) -> None:
        """Close all files and forget what was kept."""
        self._kept.clear()
        for source in self._sources.values():
            source.close()


@final
class _SourceFile:
    """A file of a storage; opened again if it is read after `close`."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._guard = threading.Lock()
        self._closing = ExitStack()
        self._reader: RangeReader | None = None
        self.bytes_read = 0

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._open().size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what follows `offset`."""
        try:
            reader = self._open(asked_bytes=len(buffer))
            reader.read_into(offset, buffer)
        except OSError as error:
            error.filename = error.filename or f"{self._storage.url}/{self._key}"
            raise

    def close(self) -> None:
        """Close the file, which nobody is reading."""
        with self._guard:
            self._reader = None
            self._closing.close()

    def _open(self, asked_bytes: int = 0) -> RangeReader:
        with self._guard:
            self.bytes_read += asked_bytes
            if self._reader is None:
                self._reader = self._closing.enter_context(self._storage.open_ranges(self._key))
            return self._reader
