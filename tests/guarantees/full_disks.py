"""Trainings on ranks of which one finds the disk full."""

from __future__ import annotations

import errno

from ckpt_core import EverySteps
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.adapters.lightning_jobs import Job, fit, rank_and_world


def fit_on_a_full_disk(root: str) -> str:
    """Train sharded, and save in the background; the disk is full on rank 1 only. The error, if any."""
    full = OSError(errno.ENOSPC, "No space left on device")
    faults = [Fault(method="create", key="*step-000000002*", error=full)]
    storage = FaultyStorage(LocalStorage(f"{root}/run"), faults if rank_and_world()[0] == 1 else [])
    options = {"dirpath": storage, "save": EverySteps(2), "deadline_seconds": 60}
    return fit(Job(root=root, strategy="fsdp2", max_steps=3, options=options, expect="SaveError")).error
