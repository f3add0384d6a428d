"""The roots of one run, nearest first: what each holds, and copies between them."""

from ckpt_core.tiers._reading import Reading
from ckpt_core.tiers._run_catalog import RunCatalog
from ckpt_core.tiers._tier import Tier, open_tiers
from ckpt_core.tiers._union import Held, TierCopy, United, unite

__all__ = ["Held", "Reading", "RunCatalog", "Tier", "TierCopy", "United", "open_tiers", "unite"]
