"""Renames that `os` does not offer: onto free names only, and exchanges."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from typing import Final

from ckpt_core.names import aside_name
from ckpt_core.storage.local._paths import PathAt

_NOREPLACE: Final = 1
_EXCHANGE: Final = 2
_UNSUPPORTED: Final = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def rename_exclusively(source: PathAt, target: PathAt) -> None:
    """Rename onto a free name only; `os.rename` would replace an empty directory.

    Raises:
        FileExistsError: `target` exists.
    """
    number = _in_one_step(source, target, _NOREPLACE)
    if number in _UNSUPPORTED:
        _rename_checked(source, target)
    elif number:
        raise _failed(number, source, target)


def exchange(first: PathAt, second: PathAt) -> None:
    """Exchange two names in one step; in three renames where that is not supported.

    A crash between the three leaves the old `second` under a name that `set_aside` recognises.

    Raises:
        FileNotFoundError: one of them does not exist.
    """
    number = _in_one_step(first, second, _EXCHANGE)
    if number in _UNSUPPORTED:
        aside = second.beside(aside_name(second.name, secrets.token_hex(4)))
        # Each is durable before the next: if a power cut kept only the last, `second` would not exist.
        _rename(second, aside)
        second.sync()
        _rename(first, second)
        second.sync()
        _rename(aside, first)
    elif number:
        raise _failed(number, first, second)


def _rename_checked(source: PathAt, target: PathAt) -> None:
    """Rename in two steps, where the kernel or the filesystem has no atomic way.

    An empty directory that appears between the check and the rename is replaced.
    """
    try:
        target.status()
    except FileNotFoundError:
        _rename(source, target)
    else:
        raise _failed(errno.EEXIST, source, target)


def _rename(source: PathAt, target: PathAt) -> None:
    try:
        os.rename(source.name, target.name, src_dir_fd=source.directory, dst_dir_fd=target.directory)
    except OSError as error:
        error.filename, error.filename2 = str(source.path), str(target.path)
        raise


def _in_one_step(source: PathAt, target: PathAt, flags: int) -> int:
    """Return the error number, 0 for success."""
    if _renameat2 is None:
        return errno.ENOSYS
    return _renameat2(source, target, flags)


def _failed(number: int, source: PathAt, target: PathAt) -> OSError:
    return OSError(number, os.strerror(number), str(source.path), None, str(target.path))


def _bind_renameat2() -> Callable[[PathAt, PathAt, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int

    def renameat2(source: PathAt, target: PathAt, flags: int) -> int:
        old, new = os.fsencode(source.name), os.fsencode(target.name)
        failed: int = function(source.directory, old, target.directory, new, flags)
        return ctypes.get_errno() if failed else 0

    return renameat2


_renameat2 = _bind_renameat2()
