"""Commands that verify, protect, mark and prune checkpoints."""

from ckpt_core.cli.upkeep import _mark as mark
from ckpt_core.cli.upkeep import _pin as pin
from ckpt_core.cli.upkeep import _prune as prune
from ckpt_core.cli.upkeep import _verify as verify

__all__ = ["mark", "pin", "prune", "verify"]
