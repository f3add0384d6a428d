"""Cadence and preemption: facts for a save policy, and one decision on all ranks."""

from ckpt_core.preemption._keeper import CadenceKeeper, LastStep

__all__ = ["CadenceKeeper", "LastStep"]
