"""Durable directory operations that `os` does not offer as such."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def sync_directory(path: str | Path, *, dir_fd: int | None = None) -> None:
    """Fsync a directory, so that the names in it survive a power cut; with `dir_fd` a link is refused."""
    no_link = 0 if dir_fd is None else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | no_link, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE filesystems refuse to fsync a directory; they keep names on the server.
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a directory and its parents, each of them durable in the one above; harmless when repeated.

    Raises:
        NotADirectoryError: something on the way is a file.
    """
    missing: list[Path] = []
    nearest = path
    while not nearest.is_dir():
        missing.append(nearest)
        nearest = nearest.parent
    for directory in reversed(missing):
        try:
            directory.mkdir()
        except FileExistsError:
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(directory)) from None
        sync_directory(directory.parent)


def sync_parents(path: Path) -> None:
    """Make a directory that is there durable, with all above it, as far as that can be done.

    Who made it may have been killed before that; then nothing below it would survive a power cut.
    """
    for parent in path.resolve().parents:
        # Where this user may not even read, the directory is not of this user's making either.
        with suppress(OSError):
            sync_directory(parent)
