"""Ranged reads of files that have no descriptor: of a stream, and of bytes at hand."""

from __future__ import annotations

import io
import threading
from typing import IO, cast, final


@final
class StreamRanges:
    """Ranges of a seekable stream; reads take turns, because a stream has one position."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = cast("io.BufferedIOBase", stream)
        self._where = where
        self._guard = threading.Lock()
        self.size_bytes = stream.seek(0, io.SEEK_END)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what follows `offset`."""
        end = offset + len(buffer)
        with self._guard:
            self._stream.seek(offset)
            while buffer and (count := self._stream.readinto(buffer)):
                buffer = buffer[count:]
        if buffer:
            raise ends_early(self._where, end, min(end - len(buffer), self.size_bytes))


@final
class BytesRanges:
    """Ranges of bytes in memory."""

    def __init__(self, content: bytes, where: str) -> None:
        self._content = memoryview(content)
        self._where = where
        self.size_bytes = len(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what follows `offset`."""
        end = offset + len(buffer)
        if end > self.size_bytes:
            raise ends_early(self._where, end, self.size_bytes)
        buffer[:] = self._content[offset:end]


def ends_early(where: str, needed: int, found: int) -> EOFError:
    """The error of a file that has fewer bytes than were asked of it."""
    return EOFError(f"{where}: ends at byte {found}, but bytes up to {needed} were to be read")
