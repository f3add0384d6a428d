"""Cadence and preemption: the facts a save policy asks for, and one decision on every rank."""

from ckpt_core.preemption._keeper import CadenceKeeper

__all__ = ["CadenceKeeper"]
