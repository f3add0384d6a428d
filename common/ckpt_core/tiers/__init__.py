"""Tiers, the several roots of one run, and verified copies between roots.

Nothing in this package needs torch, so that a command line can copy.
"""

from ckpt_core.tiers._copy import CheckpointCopy, copy_checkpoint, files_by_rank
from ckpt_core.tiers._copy_terms import CopyTerms
from ckpt_core.tiers._tiers_file import TierRecord, Uploading, read_tiers, write_tiers

__all__ = [
    "CheckpointCopy",
    "CopyTerms",
    "TierRecord",
    "Uploading",
    "copy_checkpoint",
    "files_by_rank",
    "read_tiers",
    "write_tiers",
]
