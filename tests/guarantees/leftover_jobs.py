"""Processes that are killed between two system calls of something small; they need no torch.

Usage: leftover_jobs.py JOB ROOT METHOD NTH: SIGKILL before the nth call of that function of `os`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ckpt_core.commit import Catalog, Lease, quarantine, remove
from ckpt_core.storage import LocalStorage, _rename
from tests.unit.commit.checkpoints import save, save_over

STEP, OTHER, LAST = "step-000000001", "step-000000002", "last.ckpt"


def claim(root: Path) -> None:
    Lease.acquire(LocalStorage(root), "a job")


def pin(root: Path) -> None:
    Catalog(LocalStorage(root)).pin(1, "paper")


def mark(root: Path) -> None:
    Catalog(LocalStorage(root)).mark_damaged(STEP, "a bit")


def replace_last(root: Path) -> None:
    """As where the kernel or the filesystem cannot exchange two directories in one step."""
    _rename._renameat2 = None
    save_over(LocalStorage(root), 2, LAST)


def set_quarantine(root: Path) -> None:
    _rename._renameat2 = None
    quarantine(LocalStorage(root), STEP)


def prune(root: Path) -> None:
    _rename._renameat2 = None
    storage = LocalStorage(root)
    remove(storage, Catalog(storage).find(step=1))


def prepare(root: Path) -> None:
    """What every job finds: two steps, and a checkpoint that is to be replaced."""
    storage = LocalStorage(root)
    save(storage, 1)
    save(storage, 2)
    save_over(storage, 1, LAST)


def die_before(method: str, nth: int) -> None:
    real, seen = getattr(os, method), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, method, counted)


def main() -> None:
    job, root, method, nth = sys.argv[1:]
    prepare(Path(root))
    die_before(method, int(nth))
    globals()[job](Path(root))


if __name__ == "__main__":
    main()
