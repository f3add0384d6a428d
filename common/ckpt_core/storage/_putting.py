"""Files whose content can be read at any offset, put into a storage at a rate."""

from __future__ import annotations

import io
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

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


@final
class Throttle:
    """Rate limiter for the pieces of files; any thread, all files share the cap.

    A token bucket of the size of one piece: after a pause of any length, one piece passes without waiting.
    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._guard = threading.Lock()

    def __call__(self, pieces: Iterable[memoryview]) -> Generator[memoryview]:
        """Yield each of `pieces` as soon as the average rate permits it."""
        for piece in pieces:
            # Asleep, too: a file that waits its turn is as slow as the cap demands.
            with self._guard:
                pause = self._free_at - self._clock()
                if pause > 0:
                    self._sleep(pause)
                self._free_at = max(self._free_at, self._clock()) + len(piece) / self._bytes_per_second
            yield piece
