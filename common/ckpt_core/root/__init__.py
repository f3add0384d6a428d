"""The root of a run: the right to write to it, its lineage, and retention."""

from ckpt_core.root._ownership import Job, OwnerHooks, Ownership
from ckpt_core.root._pruner import Demoter, Pruner, WeightsDraft

__all__ = ["Demoter", "Job", "OwnerHooks", "Ownership", "Pruner", "WeightsDraft"]
