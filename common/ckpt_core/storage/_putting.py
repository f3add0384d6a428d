"""Files whose content can be read at any offset, put into a storage."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ckpt_core.storage._base import RangeReader, Storage

ReadAt: TypeAlias = Callable[[int, memoryview], None]
"""Fills a whole buffer from an offset on; called from several threads, also twice for the same bytes."""
Pace: TypeAlias = Callable[[Iterable[memoryview]], Iterable[memoryview]]
"""Lets pieces pass as fast as they may; a `Throttle` is one."""
Progress: TypeAlias = Callable[[int], None]

PIECE_BYTES: Final = 8 * 2**20


class PutSource(NamedTuple):
    """The content of a file to put, and how to do it; see `Storage.put_file`."""

    size_bytes: int
    read: ReadAt
    pace: Pace
    progress: Progress

    def counted(self) -> Generator[memoryview]:
        """Yield pieces, each in pages of memory of its own; count those taken."""
        for piece in self.pace(self._pieces()):
            yield piece
            self.progress(len(piece))

    def equals(self, reader: RangeReader) -> bool:
        """Compare with a file of the same size, up to the first difference."""
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, self.size_bytes - offset)
            wanted, there = memoryview(bytearray(count)), memoryview(bytearray(count))
            self.read(offset, wanted)
            reader.read_into(offset, there)
            if wanted != there:
                return False
        return True

    def _pieces(self) -> Generator[memoryview]:
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            piece = memoryview(mmap.mmap(-1, min(PIECE_BYTES, self.size_bytes - offset)))
            self.read(offset, piece)
            yield piece


def unlimited(pieces: Iterable[memoryview]) -> Iterable[memoryview]:
    """Let all pieces pass at once."""
    return pieces


def nothing(count: int) -> None:
    """Ignore a count of bytes."""
    del count


def put_whole(storage: Storage, key: str, source: PutSource) -> None:
    """Put a file that nobody else writes, over what an earlier call left of it."""
    found = None
    with suppress(FileNotFoundError):
        found = storage.size(key)
    if found == source.size_bytes:
        with storage.open_ranges(key) as reader:
            equal = source.equals(reader)
        if equal:
            # The process that wrote it may have been killed before its fsync. Memory has no descriptor.
            with storage.open(key) as stream, suppress(io.UnsupportedOperation):
                os.fsync(stream.fileno())
            source.progress(source.size_bytes)
            return
    if found is not None:
        storage.delete(key)
    storage.write_pieces(key, source.counted())
