"""What a manager holds of its root: the right to write, the lineage of its saves, and retention."""

from ckpt_core.root._ownership import Ownership
from ckpt_core.root._pruner import Pruner

__all__ = ["Ownership", "Pruner"]
