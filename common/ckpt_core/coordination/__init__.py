"""Agreement among ranks: `Solo` for one process, `StoreCoordinator` over a torch.distributed Store."""

from ckpt_core.coordination._base import Coordinator

__all__ = ["Coordinator"]
