"""Exclusive locks among live processes, by POSIX record locks.

A record lock belongs to the process: forked data-loading workers do not inherit it, the kernel drops it when
the process dies, and names its holder. It does not exclude the process that holds it, and is lost as soon as
*any* descriptor of the file is closed there: so every lock has a file of its own, and `_claims` refuses a
second lock of a file before opening it. The file is not deleted on release: a process that has opened it by
then would hold a lock that no other process sees.

A process that can open the file, even for reading, can block every job: so only users who may write to the
directory may open it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from ckpt_core.disclosure import logger_of
from ckpt_core.storage._base import Lock, is_full
from ckpt_core.storage.local._paths import make_directories, open_regular

_logger = logger_of(__name__)
_REFUSED = {errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

# `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK: Final = struct.Struct("hhqqi")

_guard = threading.Lock()
# The process id is part of the key because a forked child inherits this set but not the locks.
_claims: set[tuple[int, str]] = set()


def _note_fork() -> None:
    """Replace a guard that a thread of the parent may have held when it forked."""
    global _guard  # noqa: PLW0603 - one per process
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_note_fork)


@final
class FileLock:
    """A held record lock on a file; made by `try_lock_file` only."""

    def __init__(self, claim: tuple[int, str], descriptor: int) -> None:
        self._claim = claim
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        with _guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                _claims.discard(self._claim)


@final
class UnguardedLock:
    """A lock that excludes nothing, where locking does not exist."""

    def release(self) -> None:
        """Do nothing."""


def excludes_others(lock: Lock) -> bool:
    """Return whether a lock excludes other processes; in an object store it cannot."""
    return not isinstance(lock, UnguardedLock)


def try_lock_file(path: Path) -> Lock | None:
    """Lock a file that has no other use; None if a live process holds it.

    Where the filesystem has no locks, or no room for the file, the result excludes nothing, and a warning is
    logged. PermissionError if it is a link, no regular file, or may be opened by another user only.
    """
    claim = os.getpid(), os.path.realpath(path)
    with _guard:
        if claim in _claims:
            return None
        try:
            descriptor = _open(path)
        except OSError as error:
            if not is_full(error):
                raise
            # So no job that is alive has made the file; without an inode, room is made unguarded.
            _logger.warning("%s: there is no room for this lock file, so nothing is locked", path)
            return UnguardedLock()
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _REFUSED:
                return None
            if error.errno not in _UNSUPPORTED:
                raise
            _logger.warning(
                "%s: this filesystem cannot lock files (%s), so a second job writing here will not be "
                "noticed immediately; make sure that only one does, or mount the filesystem with locking",
                path,
                error.strerror,
            )
            return UnguardedLock()
        _claims.add(claim)
        return FileLock(claim, descriptor)


def holder_of(path: Path) -> int | None:
    """Return the process that holds the lock, if the kernel of this machine knows it."""
    with _guard:
        if (os.getpid(), os.path.realpath(path)) in _claims:
            return os.getpid()  # opening and closing the file would drop the lock
        if sys.platform != "linux" or sys.maxsize < 1 << 32:
            return None
        descriptor = open_regular(path, os.O_RDWR)
        try:
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
        finally:
            os.close(descriptor)
    # A process id that is not positive is on another machine or in another container.
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _open(path: Path) -> int:
    """Open the lock file, and keep it to those who may write to its directory."""
    make_directories(path.parent)
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError as error:
        owner = path.lstat().st_uid if os.path.lexists(path) else os.geteuid()
        if owner == os.geteuid() or path.is_symlink():
            raise
        message = (
            f"this user may not open the lock file, which user id {owner} made; if no job of that user is "
            "running, have it deleted; to share the root, give it a group with write permission"
        )
        raise PermissionError(errno.EACCES, message, str(path)) from error
    found, directory = os.fstat(descriptor), path.parent.stat()
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        return descriptor  # its second name may be used for something else
    mode = 0o660 if directory.st_mode & stat.S_IWGRP else 0o600
    with suppress(OSError):  # some filesystems have one mode for all
        if mode == 0o660 and found.st_gid != directory.st_gid:
            os.fchown(descriptor, -1, directory.st_gid)
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)
    return descriptor
