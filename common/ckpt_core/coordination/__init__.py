"""Coordinate the ranks of a job.

`Solo` is for one process, `StoreCoordinator` for the ranks of a process group; `JobCoordinator` chooses
between them at each call. A save in the background uses a `CommitChannel`, which has no collectives. A `Link`
carries bytes from one rank to another.
"""

from ckpt_core.coordination._base import CommitChannel, Coordinator
from ckpt_core.coordination._job import (
    JobCoordinator,
    coordinator_for_job,
    place_in_job,
    require_same_process,
)
from ckpt_core.coordination._link import (
    PIECE_BYTES,
    Addressee,
    Doorway,
    Greeting,
    Link,
    answer,
    own_addresses,
)
from ckpt_core.coordination._signer import KEY_VARIABLE, Signer
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator

__all__ = [
    "KEY_VARIABLE",
    "PIECE_BYTES",
    "Addressee",
    "CommitChannel",
    "Coordinator",
    "Doorway",
    "Greeting",
    "JobCoordinator",
    "Link",
    "Signer",
    "Solo",
    "StoreCoordinator",
    "answer",
    "coordinator_for_job",
    "own_addresses",
    "place_in_job",
    "require_same_process",
]
