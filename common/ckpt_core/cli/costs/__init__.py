"""Commands about what checkpoints cost, before a training."""

from ckpt_core.cli.costs import _plan as plan
from ckpt_core.cli.costs import _simulate as simulate

__all__ = ["plan", "simulate"]
