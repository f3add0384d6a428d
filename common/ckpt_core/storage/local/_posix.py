"""Durable directory operations that `os` does not offer."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def sync_directory(path: str | Path, *, dir_fd: int | None = None) -> None:
    """Fsync a directory, so that its names survive a power cut.

    With `dir_fd` a link is refused.
    """
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
    """Create a directory and its parents, each one durable; harmless when repeated.

    Raises:
        NotADirectoryError: a file is on the way.
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
    """Make an existing directory and its parents durable, as far as possible.

    The process that created it may have been killed before its fsync; then a power cut could lose it.
    """
    for parent in path.resolve().parents:
        # A directory that this user cannot read was not created by this user.
        with suppress(OSError):
            sync_directory(parent)
