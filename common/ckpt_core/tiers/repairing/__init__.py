"""Repairs of checkpoints on disks that only one node sees, by a running job."""

from ckpt_core.tiers.repairing._disk_parts import CannotRepairError
from ckpt_core.tiers.repairing._parts_repair import PartsRepair

__all__ = ["CannotRepairError", "PartsRepair"]
