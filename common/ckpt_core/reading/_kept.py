"""Bytes that were read once from a place that is slow to read again."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right, insort
from typing import final

from ckpt_core.storage import RangeReader


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
