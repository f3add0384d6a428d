"""Many small windows of one file, read with few requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, final

from ckpt_core.zips import ReadAt

ReadFile: TypeAlias = Callable[[str, int, int], bytes]
"""(path, offset, size) -> the bytes; fewer only where the file ends."""

_MAX_GAP_BYTES: Final = 16 << 10
_MAX_SPAN_BYTES: Final = 4 << 20


@final
class Spans:
    """Reads windows of a file; neighbours are read together, and the last two reads are kept.

    Args:
        path: of the file.
        read: reads it.
        windows: start and end of what will be asked for, ordered by start. More may be asked for, and is
            read by itself.
    """

    def __init__(self, path: str, read: ReadFile, windows: Iterable[tuple[int, int]]) -> None:
        self._path = path
        self._read = read
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in windows:
            self._add(start, end)
        self._kept: list[tuple[int, bytes]] = []

    def _add(self, start: int, end: int) -> None:
        if self._ends:
            close = start - self._ends[-1] <= _MAX_GAP_BYTES
            if close and max(end, self._ends[-1]) - self._starts[-1] <= _MAX_SPAN_BYTES:
                self._ends[-1] = max(end, self._ends[-1])
                return
        self._starts.append(start)
        self._ends.append(end)

    def within(self, origin: int, size_bytes: int) -> ReadAt:
        """Reads the part of the file of that size at `origin`, and nothing outside of it."""

        def read_at(offset: int, size: int) -> bytes:
            offset, end = max(0, offset), min(size_bytes, offset + size)
            return self._get(origin + offset, end - offset) if offset < end else b""

        return read_at

    def _get(self, offset: int, size: int) -> bytes:
        for start, content in self._kept:
            if start <= offset and offset + size <= start + len(content):
                return content[offset - start : offset - start + size]
        place = bisect_right(self._starts, offset) - 1
        if place < 0 or offset + size > self._ends[place]:
            return self._read(self._path, offset, size)
        start, end = self._starts[place], self._ends[place]
        if any(start == kept for kept, _ in self._kept):  # it was read, and the file ends before it does
            return self._read(self._path, offset, size)
        content = self._read(self._path, start, end - start)
        self._kept = [(start, content), *self._kept[:1]]
        return content[offset - start : offset - start + size]
