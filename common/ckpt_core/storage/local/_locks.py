"""Exclusive claims among live processes, by POSIX record locks.

A record lock belongs to the process: forked data-loading workers do not inherit it, and the kernel drops it
when the process dies, however it dies. Two properties of it are dangerous and handled here: it does not
exclude the process that holds it, and it is lost as soon as *any* descriptor of the file is closed in that
process. So every claim has a file that nobody else opens, and a registry refuses a second claim before it
opens that file. The file stays behind when the claim is given up: whoever has opened it by then would hold a
lock that nobody else sees, and whether its name still leads to it network filesystems answer from a cache.

Whoever can open the file, even for reading, can keep every job out: only who may write to its directory may.
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
from ckpt_core.storage._base import Lock
from ckpt_core.storage.local._paths import Place

_logger = logger_of(__name__)
_REFUSED = {errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

# `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK: Final = struct.Struct("hhqqi")

_guard = threading.Lock()
# The process id is part of a claim because a forked child inherits this set but not the locks.
_claims: set[tuple[int, str]] = set()


@final
class FileLock:
    """Holds the record lock on a file; only `try_lock_file` makes one."""

    def __init__(self, claim: tuple[int, str], descriptor: int) -> None:
        self._claim = claim
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Give the claim up; harmless when repeated."""
        with _guard:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
            _claims.discard(self._claim)


@final
class UnguardedLock:
    """Excludes nobody, where locking does not exist."""

    def release(self) -> None:
        """Do nothing."""


def excludes_others(lock: Lock) -> bool:
    """Whether a lock keeps anybody out: on object stores and some network filesystems it cannot."""
    return not isinstance(lock, UnguardedLock)


def try_lock_file(place: Place) -> Lock | None:
    """Claim a file that is used for nothing else; None if a live process holds it.

    Where the filesystem has no locks the result excludes nobody, and a warning says so.

    Raises:
        PermissionError: it is a link, no regular file, or another user's whom alone it is for.
    """
    claim = _claim(place)
    with _guard:
        if claim in _claims:
            return None
        descriptor = _open(place)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return _without_lock(place.path, error)
        _claims.add(claim)
        return FileLock(claim, descriptor)


def holder_of(place: Place) -> int | None:
    """The process that holds the lock on a file, as far as the kernel of this machine knows it."""
    with _guard:
        if _claim(place) in _claims:
            return os.getpid()  # to open the file, and close it, would drop the lock
        descriptor = place.open_existing(os.O_RDWR)
        try:
            return _ask_holder(descriptor)
        finally:
            os.close(descriptor)


def _claim(place: Place) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(place.path)


def _ask_holder(descriptor: int) -> int | None:
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    # What is not positive is on another machine or in another container.
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _open(place: Place) -> int:
    try:
        descriptor = _open_or_create(place)
    except PermissionError as error:
        raise _kept_to_another(place, error) from error
    try:
        _keep_to_writers(descriptor, place)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_or_create(place: Place) -> int:
    with suppress(FileNotFoundError):
        return place.open_existing(os.O_RDWR)
    with suppress(FileExistsError):
        return place.open_descriptor(os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    return place.open_existing(os.O_RDWR)


def _keep_to_writers(descriptor: int, place: Place) -> None:
    """Take the file, also one of an earlier version, from those who may only read the directory."""
    found, directory = os.fstat(descriptor), os.fstat(place.directory)
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        return  # a second name may be that of something else
    mode = 0o600
    if directory.st_mode & stat.S_IWGRP:
        with suppress(OSError):
            if found.st_gid != directory.st_gid:
                os.fchown(descriptor, -1, directory.st_gid)
            mode = 0o660
    if stat.S_IMODE(found.st_mode) != mode:
        with suppress(OSError):  # some filesystems have one mode for all
            os.fchmod(descriptor, mode)


def _kept_to_another(place: Place, error: PermissionError) -> PermissionError:
    """The error for a file that this user may not open."""
    try:
        owner = place.status().st_uid
    except OSError:
        return error
    if owner == os.geteuid():
        return error
    message = (
        f"this user may not open the lock file, which user id {owner} made; if no job of that user is "
        "running, let it be deleted; to share the root, let a group own it and write to it"
    )
    return PermissionError(errno.EACCES, message, str(place.path))


def _without_lock(path: Path, error: OSError) -> UnguardedLock | None:
    if error.errno in _REFUSED:
        return None
    if error.errno not in _UNSUPPORTED:
        raise error
    _logger.warning(
        "%s: this filesystem cannot lock files (%s), so a second job writing here will not be noticed at "
        "once; make sure that only one does, or mount the filesystem with locking",
        path,
        error.strerror,
    )
    return UnguardedLock()
