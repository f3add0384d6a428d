"""The root of a run: the right to write to it, its lineage, and retention."""

from ckpt_core.root._ownership import Job, OwnerHooks, Ownership
from ckpt_core.root._pruner import Pruner

__all__ = ["Job", "OwnerHooks", "Ownership", "Pruner"]
