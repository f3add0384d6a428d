"""The root of a run: the right to write to it, its lineage, and retention."""

from ckpt_core.root._demoter import Demoter, WeightsDraft
from ckpt_core.root._ownership import Job, OwnerHooks, Ownership
from ckpt_core.root._pruner import Pruner

__all__ = ["Demoter", "Job", "OwnerHooks", "Ownership", "Pruner", "WeightsDraft"]
