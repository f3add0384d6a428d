"""Reads of one object: by ranges, and as a seekable stream over them."""

from __future__ import annotations

import io
import os
from typing import Any, final

from ckpt_core.storage._keys import ends_early
from ckpt_core.storage.object._client import ObjectClient

_BUFFER_BYTES = 4 * 2**20


def open_object(client: ObjectClient, path: str, size_bytes: int) -> io.BufferedReader:
    """Open a buffered stream over an object.

    Small reads are served from blocks, large ones are one ranged request. fsspec's own files are not used
    because some share their position between readers, and others read tens of megabytes ahead.
    """
    raw = _ObjectReader(client, path, size_bytes)
    return io.BufferedReader(raw, min(_BUFFER_BYTES, max(size_bytes, 1)))


@final
class ObjectRanges:
    """Ranges of an object, one request each, so that several threads run in parallel."""

    def __init__(self, client: ObjectClient, path: str, size_bytes: int) -> None:
        self._client = client
        self._path = path
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from `offset` on."""
        if not buffer:
            return
        end = offset + len(buffer)
        # Stores differ in their answers to a range past the end.
        if end > self.size_bytes:
            raise ends_early(self._client.shown(self._path), end, self.size_bytes)
        count = self._client.read_into(self._path, offset, buffer)
        if count != len(buffer):
            raise ends_early(self._client.shown(self._path), end, offset + count)


@final
class _ObjectReader(io.RawIOBase):
    def __init__(self, client: ObjectClient, path: str, size_bytes: int) -> None:
        super().__init__()
        self._client = client
        self._path = path
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset} in {self._client.shown(self._path)}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._position)]
        count = self._client.read_into(self._path, self._position, view) if view else 0
        self._position += count
        return count

    def readall(self) -> bytes:
        content = bytearray(max(0, self._size_bytes - self._position))
        return bytes(content[: self.readinto(content)])
