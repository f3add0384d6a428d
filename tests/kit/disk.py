"""Spares tests the wait for the disk: what is synced is in the page cache, where every process reads it.

A save of some bytes syncs a dozen files and directories, which takes longer than all the rest of it. Whether
a disk has them shows in a power cut only; `tests.support.power` makes those of the calls, not of the disk.
"""

from __future__ import annotations

import os

from tests.support.thorough import THOROUGH

real_fsync = os.fsync


def fsync_of_the_cache(file: int) -> None:
    """Refuse what is no open file, as `os.fsync` does; wait for nothing."""
    os.fstat(file)


def wait_for_no_disk() -> None:
    """Let no `os.fsync` of this process and of its forks wait, but for `THOROUGH=1`."""
    if not THOROUGH:
        os.fsync = fsync_of_the_cache
