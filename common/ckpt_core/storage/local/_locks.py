"""Exclusive locks among live processes, by POSIX record locks.

A record lock belongs to the process: forked data-loading workers do not inherit it, and the kernel drops it
when the process dies. Two of its properties are dangerous and handled here: it does not exclude the process
that holds it, and it is lost as soon as *any* descriptor of the file is closed in that process. So every lock
has a file of its own, and a registry refuses a second lock of a file before opening it. The file is not
deleted on release: a process that has opened it by then would hold a lock that no other process sees, and
network filesystems answer from a cache whether the name still leads to it.

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
from ckpt_core.storage.local._paths import PathAt

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
        """Release the lock; harmless when repeated."""
        with _guard:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
            _claims.discard(self._claim)


@final
class UnguardedLock:
    """A lock that excludes nothing, where locking does not exist."""

    def release(self) -> None:
        """Do nothing."""


def excludes_others(lock: Lock) -> bool:
    """Return whether a lock excludes other processes.

    On object stores and some network filesystems it cannot.
    """
    return not isinstance(lock, UnguardedLock)


def try_lock_file(file: PathAt) -> Lock | None:
    """Lock a file that has no other use; None if a live process holds it.

    Where the filesystem has no locks, or no room for the file, the result excludes nothing, and a warning is
    logged.

    Raises:
        PermissionError: it is a link, no regular file, or may be opened by another user only.
    """
    claim = _claim(file)
    with _guard:
        if claim in _claims:
            return None
        try:
            descriptor = _open(file)
        except OSError as error:
            if not is_full(error):
                raise
            # So no job that is alive has made the file; without an inode, room is made unguarded.
            _logger.warning("%s: there is no room for this lock file, so nothing is locked", file.path)
            return UnguardedLock()
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return _without_lock(file.path, error)
        _claims.add(claim)
        return FileLock(claim, descriptor)


def holder_of(file: PathAt) -> int | None:
    """Return the process that holds the lock, if the kernel of this machine knows it."""
    with _guard:
        if _claim(file) in _claims:
            return os.getpid()  # opening and closing the file would drop the lock
        descriptor = file.open_existing(os.O_RDWR)
        try:
            return _ask_holder(descriptor)
        finally:
            os.close(descriptor)


def _claim(file: PathAt) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(file.path)


def _ask_holder(descriptor: int) -> int | None:
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    # A process id that is not positive is on another machine or in another container.
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _open(file: PathAt) -> int:
    try:
        descriptor = _open_or_create(file)
    except PermissionError as error:
        raise _not_permitted(file, error) from error
    try:
        _keep_to_writers(descriptor, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_or_create(file: PathAt) -> int:
    with suppress(FileNotFoundError):
        return file.open_existing(os.O_RDWR)
    with suppress(FileExistsError):
        return file.open_descriptor(os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    return file.open_existing(os.O_RDWR)


def _keep_to_writers(descriptor: int, file: PathAt) -> None:
    """Restrict the file to users who may write to its directory."""
    found, directory = os.fstat(descriptor), os.fstat(file.directory)
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        return  # its second name may be used for something else
    mode = 0o600
    if directory.st_mode & stat.S_IWGRP:
        with suppress(OSError):
            if found.st_gid != directory.st_gid:
                os.fchown(descriptor, -1, directory.st_gid)
            mode = 0o660
    if stat.S_IMODE(found.st_mode) != mode:
        with suppress(OSError):  # some filesystems have one mode for all
            os.fchmod(descriptor, mode)


def _not_permitted(file: PathAt, error: PermissionError) -> PermissionError:
    """Build the error for a file that this user may not open."""
    try:
        owner = file.status().st_uid
    except OSError:
        return error
    if owner == os.geteuid():
        return error
    message = (
        f"this user may not open the lock file, which user id {owner} made; if no job of that user is "
        "running, have it deleted; to share the root, give it a group with write permission"
    )
    return PermissionError(errno.EACCES, message, str(file.path))


def _without_lock(path: Path, error: OSError) -> UnguardedLock | None:
    if error.errno in _REFUSED:
        return None
    if error.errno not in _UNSUPPORTED:
        raise error
    _logger.warning(
        "%s: this filesystem cannot lock files (%s), so a second job writing here will not be noticed "
        "immediately; make sure that only one does, or mount the filesystem with locking",
        path,
        error.strerror,
    )
    return UnguardedLock()
