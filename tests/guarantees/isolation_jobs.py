"""Processes that use a root while others do; they need no torch.

Usage: isolation_jobs.py JOB ROOT: says `ready`, then waits for a line on standard input.
"""

from __future__ import annotations

import sys

from ckpt_core.commit import Catalog, Lease
from ckpt_core.storage import LocalStorage

STEPS = range(1, 21)


def ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def hold(root: str) -> None:
    """A live job."""
    lease = Lease.acquire(LocalStorage(root), "train.py")
    ready()
    lease.release()


def pin_even(root: str) -> None:
    ready()
    for step in STEPS[1::2]:
        Catalog(LocalStorage(root)).pin(step, "even")


def pin_odd_and_unpin(root: str) -> None:
    ready()
    for step in STEPS[::2]:
        Catalog(LocalStorage(root)).pin(step, "odd")
        Catalog(LocalStorage(root)).unpin(step)
        Catalog(LocalStorage(root)).pin(step, "odd")


def mark_even(root: str) -> None:
    ready()
    for step in STEPS[1::2]:
        Catalog(LocalStorage(root)).mark_damaged(f"step-{step:09d}", "even")


def mark_odd_and_unmark(root: str) -> None:
    ready()
    for step in STEPS[::2]:
        name = f"step-{step:09d}"
        Catalog(LocalStorage(root)).mark_damaged(name, "odd")
        Catalog(LocalStorage(root)).unmark(name)
        Catalog(LocalStorage(root)).mark_damaged(name, "odd")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
