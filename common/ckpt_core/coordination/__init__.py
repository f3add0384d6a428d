"""Coordinate the ranks of a job.

`Solo` is for one process, `StoreCoordinator` for the ranks of a process group; `JobCoordinator` chooses
between them at each call. A save in the background uses a `CommitChannel`, which has no collectives.
"""

from ckpt_core.coordination._base import CommitChannel, Coordinator
from ckpt_core.coordination._job import (
    JobCoordinator,
    coordinator_for_job,
    place_in_job,
    require_same_process,
)
from ckpt_core.coordination._signer import KEY_VARIABLE, Signer
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator

__all__ = [
    "KEY_VARIABLE",
    "CommitChannel",
    "Coordinator",
    "JobCoordinator",
    "Signer",
    "Solo",
    "StoreCoordinator",
    "coordinator_for_job",
    "place_in_job",
    "require_same_process",
]
