"""The twin of one file, from its pieces."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import numpy as np

from ckpt_core.formats.checksums import crc32
from ckpt_core.names import twin_name
from ckpt_core.saving._reports import ReportCache
from ckpt_core.storage import Storage


@final
class TwinFiles:
    """The writer of twins of one save.

    Args:
        storage: the root.
        working: the directory of the save.
        reports: has the limit of the rate of writes.
    """

    def __init__(self, storage: Storage, working: str, reports: ReportCache) -> None:
        self._storage = storage
        self._working = working
        self._pace = reports.pace

    def write(self, path: str, pieces: Iterable[memoryview]) -> int:
        """Write the twin of the file `path` durably; return its CRC-32."""
        running = 0

        def watched() -> Iterator[memoryview]:
            nonlocal running
            for piece in pieces:
                running = crc32(piece, running)
                yield piece

        key = f"{self._working}/{twin_name(path)}"
        self._storage.write_pieces(key, watched() if self._pace is None else self._pace(watched()))
        self._storage.sync_directory(key.rpartition("/")[0])
        return running


@final
class PieceMemory:
    """Memory for pieces, used again once nothing refers to a piece.

    It is on page boundaries. A storage may keep pieces until a file is written: as many are made as it keeps.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes: Final = size_bytes
        self._free: list[mmap.mmap] = []

    def take(self) -> memoryview:
        """Return memory for one piece."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._size_bytes)
        # A view of its own for each use: its end is the end of all that was made of it.
        view: Any = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(view, self._free.append, memory).atexit = False
        return memoryview(view)
