"""Coordinate the ranks of a job.

`Solo` is for one process, `StoreCoordinator` for the ranks of a process group; `JobCoordinator` chooses
between them at each call. A save in the background uses a `CommitChannel`, which has no collectives. A `Talk`
carries messages and bytes between two ranks.
"""

from ckpt_core.coordination._base import CommitChannel, Coordinator
from ckpt_core.coordination._job import (
    HOST_VARIABLE,
    JobCoordinator,
    Solo,
    coordinator_for_job,
    place_in_job,
    require_same_process,
)
from ckpt_core.coordination._store import StoreCoordinator
from ckpt_core.coordination._talks import Talk, Talks

__all__ = [
    "HOST_VARIABLE",
    "CommitChannel",
    "Coordinator",
    "JobCoordinator",
    "Solo",
    "StoreCoordinator",
    "Talk",
    "Talks",
    "coordinator_for_job",
    "place_in_job",
    "require_same_process",
]
