"""The open files of a checkpoint, memory to read into, and bytes kept."""

from __future__ import annotations

import mmap
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Final, Protocol, final

from ckpt_core.reading._requests import REQUEST_BYTES
from ckpt_core.storage import ALIGNMENT, MappedReader, RangeReader, SpreadReader, Storage

_SLAB_BYTES: Final = 64 << 20
_MAPPED_BYTES: Final = 256 << 10
"""From this size on it is quicker to look at bytes where they lie than to copy them into a cache."""
_MAX_OPEN: Final = 128
"""With more files, each is closed when a pass has finished with it, to save descriptors."""


class Lender(Protocol):
    """Memory that reading threads borrow."""

    def lend(self, offset: int, size_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend memory for bytes at `offset` in a file."""
        ...


@final
class Buffers:
    """A pool of memory for reading threads: a buffer for each, 12 * 8 MiB at most.

    Where the blocks of a file are larger than any that a save writes, a request may need more for a moment.
    """

    def __init__(self, size_bytes: int = REQUEST_BYTES) -> None:
        self._size_bytes = size_bytes + ALIGNMENT
        self._free: list[memoryview] = []

    @contextmanager
    def lend(self, offset: int, size_bytes: int) -> Generator[memoryview]:
        """Lend memory for bytes at `offset` in a file, with the same alignment to a page."""
        skew = offset % ALIGNMENT
        # The last one returned is the likeliest to be in a cache. `pop` and `append` are atomic.
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = page_memory(self._size_bytes)
        try:
            fits = skew + size_bytes <= self._size_bytes
            yield (buffer if fits else page_memory(skew + size_bytes))[skew : skew + size_bytes]
        finally:
            self._free.append(buffer)


def page_memory(size_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@final
class _KeptMemory:
    """Memory of bounded size for the kept bytes of all files together.

    In slabs, for large pages: touching small ones costs more than the copy.
    """

    def __init__(self, size_bytes: int) -> None:
        self._remaining = size_bytes
        self._guard = threading.Lock()
        self._slab = memoryview(b"")

    def take(self, size_bytes: int) -> memoryview | None:
        """Return new memory of that size; None if too little remains."""
        with self._guard:
            if size_bytes > self._remaining:
                return None
            self._remaining -= size_bytes
            if size_bytes > len(self._slab):
                self._slab = page_memory(max(size_bytes, _SLAB_BYTES))
            taken, self._slab = self._slab[:size_bytes], self._slab[size_bytes:]
            return taken


@final
class DataFile:
    """A file, some of it in memory; a read after `close` opens it again.

    Concurrency: all methods may be called from several threads; `close` while no thread reads.
    """

    def __init__(self, storage: Storage, key: str, memory: _KeptMemory | None) -> None:
        self._storage = storage
        self._key = key
        self._memory = memory
        self._guard = threading.Lock()
        self._closing = ExitStack()
        self._reader: RangeReader | None = None
        self._starts: list[int] = []
        self._kept: dict[int, memoryview] = {}
        self.bytes_read = 0

    @property
    def size_bytes(self) -> int:
        return self._open().size_bytes

    def room(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return memory to keep bytes in; None if they are kept, too many, or need not be."""
        return None if self._memory is None or offset in self._kept else self._memory.take(size_bytes)

    def keep(self, offset: int, content: memoryview) -> None:
        with self._guard:
            if offset not in self._kept:
                self._kept[offset] = content
                insort(self._starts, offset)

    def holds(self, start: int, stop: int) -> bool:
        """Return whether every byte of the range is kept."""
        while start < stop:
            content, start = self._at(start, stop)
            if content is None:
                return False
        return True

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after another, from memory where bytes are kept."""
        if not self._kept:
            self._ask(offset, buffers)
            return
        for buffer in buffers:
            end = offset + len(buffer)
            while offset < end:
                content, stop = self._at(offset, end)
                part, buffer = buffer[: stop - offset], buffer[stop - offset :]  # noqa: PLW2901 - what is left
                if content is None:
                    self._ask(offset, [part])
                else:
                    part[:] = content
                offset = stop

    @contextmanager
    def mapped(self, offset: int, size_bytes: int) -> Generator[memoryview | None]:
        """Lend bytes where they lie in memory, read only; None if they must be read."""
        reader = None
        if size_bytes >= _MAPPED_BYTES and self._memory is None:
            with suppress(OSError):  # raised by the read
                reader = self._open()
        if not isinstance(reader, MappedReader):
            yield None
            return
        with reader.mapped(offset, size_bytes) as view:
            if view is not None:
                self._open(asked_bytes=size_bytes)
            yield view

    def close(self) -> None:
        with self._guard:
            self._reader = None
            self._closing.close()

    def _at(self, offset: int, end: int) -> tuple[memoryview | None, int]:
        """Return what is kept from `offset` on, None if nothing, and where that ends."""
        with self._guard:
            place = bisect_right(self._starts, offset)
            start = self._starts[place - 1] if place else offset
            content = self._kept[start][offset - start : end - start] if place else memoryview(b"")
            following = self._starts[place] if place < len(self._starts) else sys.maxsize
        return (content, offset + len(content)) if content else (None, min(end, following))

    def _ask(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers from storage, by one request where requests are dear."""
        try:
            reader = self._open(asked_bytes=sum(map(len, buffers)))
            if len(buffers) > 1 and isinstance(reader, SpreadReader):
                reader.read_spread(offset, buffers)
                return
            for buffer in buffers:
                reader.read_into(offset, buffer)
                offset += len(buffer)
        except OSError as error:
            error.filename = error.filename or f"{self._storage.url}/{self._key}"
            raise

    def _open(self, asked_bytes: int = 0) -> RangeReader:
        with self._guard:
            self.bytes_read += asked_bytes
            if self._reader is None:
                self._reader = self._closing.enter_context(self._storage.open_ranges(self._key))
            return self._reader


@final
class DataFiles:
    """All files of one checkpoint.

    Concurrency: `at` and `served` may be called from several threads during a pass.
    """

    def __init__(self, storage: Storage, directory: str, keep_bytes: int) -> None:
        self._storage = storage
        self._prefix = f"{directory}/" if directory else ""
        self._memory = None if storage.rereads_from_memory else _KeptMemory(keep_bytes)
        self._files: dict[str, DataFile] = {}
        self._remaining: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes requested from storage so far."""
        return sum(file.bytes_read for file in self._files.values())

    @property
    def reopens(self) -> bool:
        """Whether the passes open files separately, and so perhaps different ones."""
        return len(self._files) > _MAX_OPEN

    def begin(self, requests: Mapping[str, int]) -> None:
        """Begin a pass with that number of requests for each path."""
        self._remaining = dict(requests)
        for path in requests:
            if path not in self._files:
                self._files[path] = DataFile(self._storage, self._prefix + path, self._memory)

    def at(self, path: str) -> DataFile:
        return self._files[path]

    @contextmanager
    def served(self, path: str) -> Generator[DataFile]:
        """Lend a file for one request; close it after the last one if needed."""
        try:
            yield self._files[path]
        finally:
            with self._guard:
                self._remaining[path] -= 1
                last = self._remaining[path] == 0
            if last and self.reopens:
                self._files[path].close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
