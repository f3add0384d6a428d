"""The open data files of a checkpoint, and the bytes kept of them."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, final

from ckpt_core.reading._buffers import allocate
from ckpt_core.storage import RangeReader, SpreadReader, Storage

_SLAB_BYTES: Final = 64 << 20


@final
class KeptMemory:
    """The memory for kept bytes of all files together, of bounded size.

    In large pages where the system has them: touching small ones costs more than the copy.
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
                self._slab = allocate(max(size_bytes, _SLAB_BYTES))
            taken, self._slab = self._slab[:size_bytes], self._slab[size_bytes:]
            return taken


@final
class KeptFile:
    """A file with some ranges in memory; the others are read from `inner`.

    Concurrency: all methods may be called from several threads.
    """

    def __init__(self, inner: SpreadReader, memory: KeptMemory) -> None:
        self._inner = inner
        self._memory = memory
        self._guard = threading.Lock()
        self._starts: list[int] = []
        self._kept: dict[int, memoryview] = {}

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._inner.size_bytes

    def room(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return memory for bytes at `offset`; None if they are kept already, or too many."""
        return None if offset in self._kept else self._memory.take(size_bytes)

    def keep(self, offset: int, content: memoryview) -> None:
        """Keep the bytes at `offset`, in memory from `room`."""
        with self._guard:
            if offset not in self._kept:
                self._kept[offset] = content
                insort(self._starts, offset)

    def holds(self, start: int, stop: int) -> bool:
        """Return whether every byte of the range is kept."""
        while start < stop:
            found = self._at(start)
            if found is None:
                return False
            start = found[0] + len(found[1])
        return True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer, from memory where bytes are kept."""
        while buffer:
            found = self._at(offset)
            if found is None:
                count = min(len(buffer), self._next_start(offset) - offset)
                self._inner.read_into(offset, buffer[:count])
            else:
                start, content = found
                piece = content[offset - start : offset - start + len(buffer)]
                count = len(piece)
                buffer[:count] = piece
            offset, buffer = offset + count, buffer[count:]

    def read_spread(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, from memory where bytes are kept."""
        if self._kept:
            for buffer in buffers:
                self.read_into(offset, buffer)
                offset += len(buffer)
        else:
            self._inner.read_spread(offset, buffers)

    def _at(self, offset: int) -> tuple[int, memoryview] | None:
        """Return the kept range that contains `offset`, and its start."""
        with self._guard:
            place = bisect_right(self._starts, offset)
            if not place:
                return None
            start = self._starts[place - 1]
            content = self._kept[start]
        return (start, content) if offset < start + len(content) else None

    def _next_start(self, offset: int) -> int:
        """Return the start of the first kept range after `offset`, or a huge number."""
        with self._guard:
            place = bisect_right(self._starts, offset)
            return self._starts[place] if place < len(self._starts) else sys.maxsize


_MAX_OPEN: Final = 128
"""With more files, each is closed when a pass has finished with it, to save descriptors."""


@final
class OpenFiles:
    """All files of one checkpoint, and the number of bytes requested from them.

    Concurrency: `at`, `kept` and `done` may be called from several threads during a pass.
    """

    def __init__(self, storage: Storage, directory: str, keep_bytes: int) -> None:
        self._storage = storage
        self._directory = directory
        self._memory = None if storage.rereads_from_memory else KeptMemory(keep_bytes)
        self._sources: dict[str, _SourceFile] = {}
        self._kept: dict[str, KeptFile] = {}
        self._remaining: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes requested from storage so far."""
        return sum(source.bytes_read for source in self._sources.values())

    @property
    def reopens(self) -> bool:
        """Whether the passes open files separately, and so perhaps different ones."""
        return len(self._sources) > _MAX_OPEN

    def begin(self, requests: Mapping[str, int]) -> None:
        """Begin a pass with that number of requests for each path."""
        self._remaining = dict(requests)
        for path in requests:
            if path not in self._sources:
                key = f"{self._directory}/{path}" if self._directory else path
                self._sources[path] = _SourceFile(self._storage, key)
                if self._memory is not None:
                    self._kept[path] = KeptFile(self._sources[path], self._memory)

    def at(self, path: str) -> SpreadReader:
        """Return the file of a path that was given to `begin`."""
        return self._kept.get(path) or self._sources[path]

    def kept(self, path: str) -> KeptFile | None:
        """Return the same file, where bytes are kept between passes."""
        return self._kept.get(path)

    def done(self, path: str) -> None:
        """Count a served request; close a file after its last one if needed."""
        with self._guard:
            self._remaining[path] -= 1
            last = self._remaining[path] == 0
        if last and self.reopens:
            self._sources[path].close()

    def close(self) -> None:
        """Close all files and drop kept bytes."""
        self._kept.clear()
        for source in self._sources.values():
            source.close()


@final
class _SourceFile:
    """A file of a storage; a read after `close` opens it again."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._guard = threading.Lock()
        self._closing = ExitStack()
        self._reader: RangeReader | None = None
        self.bytes_read = 0

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._open().size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from `offset` on."""
        with self._named():
            self._open(asked_bytes=len(buffer)).read_into(offset, buffer)

    def read_spread(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, by one request where requests are dear."""
        with self._named():
            reader = self._open(asked_bytes=sum(map(len, buffers)))
            if isinstance(reader, SpreadReader):
                reader.read_spread(offset, buffers)
                return
            for buffer in buffers:
                reader.read_into(offset, buffer)
                offset += len(buffer)

    def close(self) -> None:
        """Close the file; no thread is reading it."""
        with self._guard:
            self._reader = None
            self._closing.close()

    @contextmanager
    def _named(self) -> Generator[None]:
        """Name the file in errors that name none."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or f"{self._storage.url}/{self._key}"
            raise

    def _open(self, asked_bytes: int = 0) -> RangeReader:
        with self._guard:
            self.bytes_read += asked_bytes
            if self._reader is None:
                self._reader = self._closing.enter_context(self._storage.open_ranges(self._key))
            return self._reader
