"""One process at a time reads, changes and replaces a small file of the root."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from ckpt_core.storage import Lock, Storage

_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.01


@contextmanager
def locked(storage: Storage, key: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> Generator[None]:
    """Keep others from changing `key` meanwhile: what one reads and writes here, none writes in between.

    Where storage cannot lock (object stores, some network filesystems) nobody is kept out: of two changes
    at the same moment one may be lost, but never the file.

    Raises:
        TimeoutError: somebody else has been changing it for so long; that takes milliseconds.
    """
    lock = _claimed(storage, key, patience_seconds)
    try:
        yield
    finally:
        lock.release()


def _holder(storage: Storage, key: str) -> str:
    pid = storage.lock_holder(key)
    if pid == os.getpid():
        return "this very process"
    return "another process" if pid is None else f"another process (pid {pid})"


def _claimed(storage: Storage, key: str, patience_seconds: float) -> Lock:
    deadline = time.monotonic() + patience_seconds
    while (lock := storage.try_lock(key)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"{_holder(storage, key)} has held the lock for {patience_seconds:g} s, which takes "
                "milliseconds; is it stopped? End it, then try again",
                f"{storage.url}/{key}",
            )
        time.sleep(_PAUSE_SECONDS)
    return lock
