"""Jobs that are killed between two system calls of something small, each in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.cli import main as main_of_ckpt
from ckpt_core.commit import Catalog, Lease, quarantine, remove
from ckpt_core.commit._catalog import read_marks
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.local import _paths
from tests.reliability.disk.traps import Recorder, Trap
from tests.unit.commit.checkpoints import save, save_over

STEP, OTHER, LAST = "step-000000001", "step-000000002", "last.ckpt"
OTHER_STEP = 2


def claim(root: Path) -> None:
    Lease.acquire(LocalStorage(root), "a job")


def pin(root: Path) -> None:
    Catalog(LocalStorage(root)).pin(1, "paper")


def mark(root: Path) -> None:
    Catalog(LocalStorage(root)).mark_damaged(STEP, "a bit")


Kill = tuple[bool, list[str], list[str], int]
"""Whether it was one; what it leaves marked as damaged and as bad; the exit code of the command after it."""


def sweep_mark(root: Path) -> list[Kill]:
    """Kill `ckpt mark` before and after every call that changes the disk; tell what each kill leaves."""
    prepare(root)
    mark(root)
    command = ["mark", f"@{OTHER_STEP}", "bad", "--reason", "a spike"]
    rehearsal = copy_of(root, "rehearsal")
    calls = Recorder(rehearsal).record(lambda: ckpt(rehearsal, command))
    found: list[Kill] = []
    for nth, call in enumerate(calls):
        for when in call.moments:
            copy = copy_of(root, f"{nth}-{when}")
            child = os.fork()
            if child == 0:
                Trap(nth, when, everyone=False).spring(copy, lambda where=copy: ckpt(where, command))
                os._exit(0)
            killed = os.waitpid(child, 0)[1] == signal.SIGKILL
            marks = read_marks(LocalStorage(copy))
            found.append((killed, sorted(marks.damaged), sorted(marks.bad), ckpt(copy, command)))
    return found


def copy_of(root: Path, name: str) -> Path:
    return Path(shutil.copytree(root, root.with_name(f"{root.name}-{name}")))


def ckpt(root: Path, command: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return main_of_ckpt([command[0], f"{root}{command[1]}", *command[2:]])


def replace_last(root: Path) -> None:
    """As where the kernel or the filesystem cannot exchange two directories in one step."""
    _paths._renameat2 = None
    save_over(LocalStorage(root), 2, LAST)


def set_quarantine(root: Path) -> None:
    _paths._renameat2 = None
    quarantine(LocalStorage(root), STEP)


def prune(root: Path) -> None:
    _paths._renameat2 = None
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


def run(job: Callable[[Path], None], root: Path, method: str, nth: int) -> None:
    """Do a job; SIGKILL before the nth call of that function of `os`."""
    prepare(root)
    die_before(method, nth)
    job(root)
