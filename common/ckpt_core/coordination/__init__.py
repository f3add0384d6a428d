"""Agreement among ranks: `Solo` for one process, `StoreCoordinator` over a torch.distributed Store."""

from ckpt_core.coordination._base import Coordinator, failure_text
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator, coordinator_for_job

__all__ = ["Coordinator", "Solo", "StoreCoordinator", "coordinator_for_job", "failure_text"]
