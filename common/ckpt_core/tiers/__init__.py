"""The roots of one run, nearest first: what each holds, and verified copies.

Nothing in this package needs torch, so that a command line can copy.
"""

from ckpt_core.tiers._asking import Asked, ask
from ckpt_core.tiers._copy import CheckpointCopy, copy_checkpoint, files_by_rank
from ckpt_core.tiers._copy_process import CopyProcess
from ckpt_core.tiers._copy_terms import CopyTerms
from ckpt_core.tiers._reading import Reading
from ckpt_core.tiers._run_catalog import RunCatalog
from ckpt_core.tiers._tier import FurtherTier, Tier, open_tiers, read_through
from ckpt_core.tiers._tiers_file import TierRecord, Uploading, read_tiers, write_tiers
from ckpt_core.tiers._union import Held, TierCopy, United, unite

__all__ = [
    "Asked",
    "CheckpointCopy",
    "CopyProcess",
    "CopyTerms",
    "FurtherTier",
    "Held",
    "Reading",
    "RunCatalog",
    "Tier",
    "TierCopy",
    "TierRecord",
    "United",
    "Uploading",
    "ask",
    "copy_checkpoint",
    "files_by_rank",
    "open_tiers",
    "read_through",
    "read_tiers",
    "unite",
    "write_tiers",
]
