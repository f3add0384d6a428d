"""Agreement among ranks: `Solo` for one process, `StoreCoordinator` over a torch.distributed Store.

`JobCoordinator` chooses between them, by the process group that there is when ranks have to agree.
"""

from ckpt_core.coordination._base import Coordinator
from ckpt_core.coordination._job import JobCoordinator, coordinator_for_job, require_same_process
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator

__all__ = [
    "Coordinator",
    "JobCoordinator",
    "Solo",
    "StoreCoordinator",
    "coordinator_for_job",
    "require_same_process",
]
