"""Files whose content can be read at any offset, put into a storage."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ckpt_core.storage._base import Storage

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


def unlimited(pieces: Iterable[memoryview]) -> Iterable[memoryview]:
    """Let all pieces pass at once."""
    return pieces


def nothing(count: int) -> None:
    """Ignore a count of bytes."""
    del count


def put_whole(storage: Storage, key: str, source: PutSource) -> None:
    """Put a file that nobody else writes, over what an earlier call left of it.

    Raises:
        FileExistsError: something that is no file is there.
        OSError: storage failed.
    """
    found = None
    with suppress(FileNotFoundError):
        found = storage.size(key)
    if found == source.size_bytes and _is_equal(storage, key, source):
        storage.sync_file(key)
        source.progress(source.size_bytes)
        return
    if found is not None:
        storage.delete(key)
    storage.write_pieces(key, _counted(source))


def _is_equal(storage: Storage, key: str, source: PutSource) -> bool:
    with storage.open_ranges(key) as reader:
        for offset in range(0, source.size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, source.size_bytes - offset)
            wanted, there = memoryview(bytearray(count)), memoryview(bytearray(count))
            source.read(offset, wanted)
            reader.read_into(offset, there)
            if wanted != there:
                return False
    return True


def _counted(source: PutSource) -> Generator[memoryview]:
    for piece in source.pace(_pieces(source)):
        yield piece
        source.progress(len(piece))


def _pieces(source: PutSource) -> Generator[memoryview]:
    """Yield pieces that begin on pages of memory, each in memory of its own."""
    for offset in range(0, source.size_bytes, PIECE_BYTES):
        piece = memoryview(mmap.mmap(-1, min(PIECE_BYTES, source.size_bytes - offset)))
        source.read(offset, piece)
        yield piece
