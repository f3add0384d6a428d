"""Temporary directories for stock methods, which no kill leaves behind for good."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "accelerate-ckpt-"


@contextmanager
def private_directory() -> Generator[Path]:
    """Make a directory of this rank alone.

    Stock Accelerate lets ranks write to the same file.

    It is locked while in use. One without a lock was left by a killed process; the next process with the same
    temporary directory removes it.
    """
    _remove_abandoned(os.getpid())
    path, descriptor = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(descriptor)


def _locked_directory() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Until it is locked, another process takes it for abandoned: then it is gone, and the next is tried.
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a filesystem without locks: no other process can lock it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


@functools.cache
def _remove_abandoned(_process: int) -> None:
    """Remove what killed processes left, once per process: there may be many entries."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
