"""Large files straight to the device, past the page cache.

Buffered writes of gigabytes are several times slower than the disk, evict what the training reads, and make
fsync wait for all of it at once. Direct writes need aligned memory, offsets and lengths; where a filesystem
refuses them, which only a real write tells, the same bytes go through the page cache.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

ALIGNMENT = 4096
_THREADS = 2
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def write_direct(path: Path, pieces: Iterable[memoryview]) -> None:
    """Create `path` from aligned pieces and fsync it; on an error a partial file is left.

    Raises:
        FileExistsError: it exists already.
        OSError: a write or the fsync failed.
    """
    with path.open("xb", buffering=0) as file, _DirectFile(path, file.fileno()) as direct:
        _write_concurrently(direct, pieces)
        os.fsync(file.fileno())


def _write_concurrently(direct: _DirectFile, pieces: Iterable[memoryview]) -> None:
    offset = 0
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-write") as pool:
        for piece in pieces:
            # One piece being prepared while the threads write: more would only lengthen the queue.
            while len(pending) > _THREADS:
                pending.popleft().result()
            pending.append(pool.submit(direct.write, piece, offset))
            offset += len(piece)
        for future in pending:
            future.result()


@final
class _DirectFile:
    """A file opened twice: directly, and through the page cache for what cannot be direct."""

    def __init__(self, path: Path, buffered: int) -> None:
        self._buffered = buffered
        self._direct = self._open(path)

    def __enter__(self) -> _DirectFile:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def write(self, piece: memoryview, offset: int) -> None:
        """Write all of `piece` at `offset`; called from several threads at once."""
        while len(piece):
            written = self._write_some(piece, offset)
            piece = piece[written:]
            offset += written

    def _write_some(self, piece: memoryview, offset: int) -> int:
        direct = self._direct
        whole = len(piece) - len(piece) % ALIGNMENT
        # The end of the file is rarely a whole block; after a short write nothing may be aligned.
        if direct is None or offset % ALIGNMENT or not whole:
            return os.pwrite(self._buffered, piece, offset)
        try:
            return os.pwrite(direct, piece[:whole], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return os.pwrite(self._buffered, piece, offset)

    @staticmethod
    def _open(path: Path) -> int | None:
        flag = getattr(os, "O_DIRECT", 0)  # Linux only
        if not flag:
            return None
        try:
            return os.open(path, os.O_WRONLY | flag)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return None
