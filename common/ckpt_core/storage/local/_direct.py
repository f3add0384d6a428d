"""Direct writes of large files to the device, past the page cache.

Buffered writes of gigabytes are several times slower than the disk, evict the training data from the page
cache, and make fsync wait for all of it. Direct writes need aligned memory, offsets and lengths. Where a
filesystem refuses them, which only a real write shows, the same bytes go through the page cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ckpt_core.crew import Workers
from ckpt_core.storage._base import ALIGNMENT

_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def write_direct(path: Path, pieces: Iterable[memoryview], writers: int) -> None:
    """Create a file from aligned pieces and fsync it; an error leaves a partial file."""
    with open(path, "xb", buffering=0) as file, ExitStack() as opened:
        # Twice: directly, and through the page cache for unaligned bytes.
        direct, buffered = _open_directly(path), file.fileno()
        if direct is not None:
            opened.callback(os.close, direct)
        with Workers(partial(_write, direct, buffered), writers, name="ckpt-write") as crew:
            offset = 0
            for piece in pieces:
                crew.take((piece, offset))
                offset += len(piece)
        crew.raise_first()
        os.fsync(buffered)


def _open_directly(path: Path) -> int | None:
    if not (flag := getattr(os, "O_DIRECT", 0)):  # Linux only
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flag)
    except OSError as error:
        if error.errno in _REFUSALS:
            return None
        raise


def _write(direct: int | None, buffered: int, task: tuple[memoryview, int]) -> None:
    """Write all of a piece at an offset; called from several threads at the same time."""
    piece, offset = task
    while len(piece):
        whole = len(piece) - len(piece) % ALIGNMENT
        # The end of the file is rarely a whole block; after a short write nothing may be aligned.
        if direct is None or offset % ALIGNMENT or not whole:
            written = os.pwrite(buffered, piece, offset)
        else:
            try:
                written = os.pwrite(direct, piece[:whole], offset)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                direct, written = None, 0
        piece = piece[written:]
        offset += written
