"""Commands about what checkpoints cost, before a training and of a storage."""

from ckpt_core.cli.costs import _bench as bench
from ckpt_core.cli.costs import _plan as plan
from ckpt_core.cli.costs import _simulate as simulate

__all__ = ["bench", "plan", "simulate"]
