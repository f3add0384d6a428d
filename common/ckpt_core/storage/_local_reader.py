"""Reading files of a directory: by ranges, and never through a link that leads out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from ckpt_core.storage._keys import key_parts
from ckpt_core.storage._ranges import ends_early
from ckpt_core.storage._small import ForeignFileError


def path_inside(root: Path, key: str) -> Path:
    """Where the file at `key` really lies, all links followed.

    The caller opens what is returned, so that a link put in its place since is not followed.

    Raises:
        FileNotFoundError: there is none.
        ForeignFileError: a link on the way leads out of the root (the root itself may be a link), or what is
            there is neither a file nor a directory.
    """
    real_root, path = root.resolve(), root.joinpath(*key_parts(key))
    real = _followed(path)
    if real.is_relative_to(real_root):
        _refuse_special(real)
        return real
    link = next(step for step in _steps(root, key) if not step.resolve().is_relative_to(real_root))
    message = (
        f"a symbolic link in the way of {key!r} leads out of the checkpoint root, to {link.resolve()}; "
        "if that is meant, put the files themselves here, or make the directory they are in the root"
    )
    raise ForeignFileError(errno.EACCES, message, str(link))


@contextmanager
def open_local_ranges(path: Path) -> Generator[LocalRanges]:
    """Open a file for reads on several threads."""
    with path.open("rb", buffering=0) as file:
        _announce_order(file.fileno())
        yield LocalRanges(file.fileno(), str(path))


@final
class LocalRanges:
    """Ranges of an open file, by `preadv`: no position is shared, and the GIL is free meanwhile."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self.size_bytes = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what follows `offset`."""
        end = offset + len(buffer)
        while offset < end:
            count = self._read_some(offset, buffer)
            if count == 0:
                raise ends_early(self._where, end, min(offset, os.fstat(self._descriptor).st_size))
            offset += count
            buffer = buffer[count:]

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset)
        except OSError as error:
            # The kernel knows a descriptor only; whoever reads the error needs the name.
            error.filename = self._where
            raise


def _announce_order(descriptor: int) -> None:
    # Threads that take turns look like random reads: told, the kernel reads ahead, 1.3 times as fast from a
    # cold disk. It is a hint only.
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _refuse_special(path: Path) -> None:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        # To open a named pipe is to wait for its writer.
        message = "not a regular file but a pipe, socket or device, which no checkpoint has; remove it"
        raise ForeignFileError(errno.EACCES, message, str(path))


def _followed(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:
        # What Python 3.12 and earlier make of a loop.
        raise FileNotFoundError(errno.ENOENT, "a symbolic link that leads in a circle", str(path)) from None


def _steps(root: Path, key: str) -> list[Path]:
    parts = key_parts(key)
    return [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
