"""Durable directory operations that `os` does not offer as such."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_core.names import aside_name

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that the names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
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


def delete_tree(path: Path) -> None:
    """Delete a file, a link (not what it points to) or a directory; what is gone already is fine."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            for child in list(path.iterdir()):
                delete_tree(child)
            path.rmdir()
    else:
        # NotADirectoryError: a file is where a parent should be, so there is nothing at `path`.
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def rename_exclusively(source: Path, target: Path) -> None:
    """Rename, refusing to replace anything, even an empty directory as `os.rename` would.

    Raises:
        FileExistsError: `target` exists.
    """
    number = errno.ENOSYS if _renameat2 is None else _renameat2(source, target, _RENAME_NOREPLACE)
    if number in _UNSUPPORTED:
        rename_checked(source, target)
    elif number:
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def rename_checked(source: Path, target: Path) -> None:
    """The next best thing where the kernel or the filesystem cannot do it in one step.

    A target that appears between the check and the rename is replaced if it is an empty directory.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(target))
    source.rename(target)


def exchange(first: Path, second: Path) -> None:
    """Exchange two names in one step; in three renames where the kernel or the filesystem cannot.

    A crash between the three leaves what was `second` under a name by which `set_aside` knows it.

    Raises:
        FileNotFoundError: one of them does not exist.
    """
    number = errno.ENOSYS if _renameat2 is None else _renameat2(first, second, _RENAME_EXCHANGE)
    if number in _UNSUPPORTED:
        aside = second.with_name(aside_name(second.name, secrets.token_hex(4)))
        # Each is durable before the next: a power cut that kept only the last would leave `second` to nobody.
        second.rename(aside)
        sync_directory(second.parent)
        first.rename(second)
        sync_directory(second.parent)
        aside.rename(first)
    elif number:
        raise OSError(number, os.strerror(number), str(first), None, str(second))


def _bind_renameat2() -> Callable[[Path, Path, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int

    def renameat2(source: Path, target: Path, flags: int) -> int:
        failed: int = function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
        return ctypes.get_errno() if failed else 0

    return renameat2


_renameat2 = _bind_renameat2()
