"""Reads of one object: by ranges, and as a seekable stream over them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from ckpt_core.storage._keys import RangeStream, ends_early

if TYPE_CHECKING:
    from ckpt_core.storage.object._storage import ObjectStorage

_BUFFER_BYTES = 4 * 2**20
_START_BYTES = 2**20


def open_object(storage: ObjectStorage, path: str) -> io.BufferedReader:
    """Open a buffered stream over an object; a small one has been read by then.

    Small reads are served from blocks, large ones are one ranged request. fsspec's own files are not used
    because some share their position between readers, and others read tens of megabytes ahead.
    """
    size, start = storage.read_start(path, _START_BYTES)

    def read_into(offset: int, buffer: memoryview) -> int:
        known = start[offset : offset + len(buffer)]
        buffer[: len(known)] = known
        rest = buffer[len(known) :]
        return len(known) + (storage.read_into(path, offset + len(known), rest) if rest else 0)

    return io.BufferedReader(
        RangeStream(size, read_into, storage.shown(path)), min(_BUFFER_BYTES, max(size, 1))
    )


@final
class ObjectRanges:
    """Ranges of an object, one request each, so that several threads run in parallel."""

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int, start: bytes = b"") -> None:
        """Read from an object of that size; its first bytes may be known."""
        self._storage = storage
        self._start = start
        self._path = path
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from `offset` on."""
        if buffer:
            end = self._checked_end(offset, len(buffer))
            if end <= len(self._start):
                buffer[:] = self._start[offset:end]
                return
            count = self._storage.read_into(self._path, offset, buffer)
            if offset + count != end:
                raise ends_early(self._storage.shown(self._path), end, offset + count)

    def read_spread(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, by one request where the client can."""
        end = self._checked_end(offset, sum(map(len, buffers)))
        count = self._storage.read_spread(self._path, offset, buffers)
        if offset + count != end:
            raise ends_early(self._storage.shown(self._path), end, offset + count)

    def _checked_end(self, offset: int, size_bytes: int) -> int:
        """Return the end of a range; stores differ in their answers to one past the end."""
        end = offset + size_bytes
        if end > self.size_bytes:
            raise ends_early(self._storage.shown(self._path), end, self.size_bytes)
        return end
