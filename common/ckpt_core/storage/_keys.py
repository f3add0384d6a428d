"""Validation of keys, and ranged reads of streams and bytes."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import IO, Any, cast, final


def key_parts(key: str) -> tuple[str, ...]:
    """Split a key into its parts, () for the root; ValueError if it is not plain."""
    if key == "":
        return ()
    parts = tuple(key.split("/"))
    if not all(map(is_plain, parts)):
        raise ValueError(
            f"storage key {key!r} must be relative to the root, in plain form: no leading or doubled '/', "
            "no '.' or '..'"
        )
    return parts


def is_plain(name: str) -> bool:
    return name not in {"", ".", ".."} and "\0" not in name


def file_key(key: str) -> str:
    """Return the key; ValueError if it is malformed, or the root."""
    if not key_parts(key):
        raise ValueError("the root itself cannot be written, renamed or deleted through its storage")
    return key


def parent_keys(key: str) -> list[str]:
    parts = key_parts(key)
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


@final
class StreamRanges:
    """Ranges of a seekable stream; reads take turns for its one position."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = cast("io.BufferedIOBase", stream)
        self._where = where
        self._guard = threading.Lock()
        self.size_bytes = stream.seek(0, io.SEEK_END)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        with self._guard:
            self._stream.seek(offset)
            while buffer and (count := self._stream.readinto(buffer)):
                buffer = buffer[count:]
        if buffer:
            raise ends_early(self._where, end, min(end - len(buffer), self.size_bytes))


@final
class RangeStream(io.RawIOBase):
    """A seekable stream; `read` fills a buffer from an offset on, as far as it goes."""

    def __init__(self, size_bytes: int, read: Callable[[int, memoryview], int], where: str) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._read = read
        self._where = where
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
            raise ValueError(f"negative position {start + offset} in {self._where}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._position)]
        count = self._read(self._position, view) if view else 0
        self._position += count
        return count

    def readall(self) -> bytes:
        content = bytearray(max(0, self._size_bytes - self._position))
        return bytes(content[: self.readinto(content)])


def ends_early(where: str, needed: int, found: int) -> EOFError:
    return EOFError(f"{where}: ends at byte {found}, but bytes up to {needed} are needed")
