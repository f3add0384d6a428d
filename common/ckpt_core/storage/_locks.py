"""Exclusive claims among live processes, by POSIX record locks.

A record lock belongs to the process: forked data-loading workers do not inherit it, and the kernel drops it
when the process dies, however it dies. Two properties of it are dangerous and handled here: it does not
exclude the process that holds it, and it is lost as soon as *any* descriptor of the file is closed in that
process. So every claim has a file that nobody else opens, and a registry refuses a second claim before it
opens that file. The file stays behind when the claim is given up: whoever has opened it by then would hold a
lock that nobody else sees, and whether its name still leads to it network filesystems answer from a cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import final

from ckpt_core.disclosure import logger_of
from ckpt_core.storage._base import Lock

_logger = logger_of(__name__)
_REFUSED = {errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

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


def try_lock_file(path: Path) -> Lock | None:
    """Claim `path`, a file that is used for nothing else; None if a live process holds it.

    Where the filesystem has no locks the result excludes nobody, and a warning says so.
    """
    claim = os.getpid(), os.path.realpath(path)
    with _guard:
        if claim in _claims:
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return _without_lock(path, error)
        _claims.add(claim)
        return FileLock(claim, descriptor)


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
