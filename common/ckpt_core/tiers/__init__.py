"""The roots of one run, nearest first: what each holds, and copies between them."""

from ckpt_core.tiers._reading import Reading
from ckpt_core.tiers._run_catalog import RunCatalog
from ckpt_core.tiers._tier import Tier, open_tiers
from ckpt_core.tiers._union import Copy, Held, Union, unite

__all__ = ["Copy", "Held", "Reading", "RunCatalog", "Tier", "Union", "open_tiers", "unite"]
