"""What saves cost a training, measured while it runs."""

from ckpt_core.measuring._meter import CostMeter

__all__ = ["CostMeter"]
