"""The roots of one run, nearest first: what each holds, and verified copies.

Nothing in this package needs torch, so that a command line can copy.
"""

from ckpt_core.tiers._compressing import Choices, Gain, Rows, choose_codecs
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms, copy_checkpoint
from ckpt_core.tiers._copy_process import CopyProcess
from ckpt_core.tiers._export_service import DemotionTerms, ExportTerms, read_exports
from ckpt_core.tiers._tier import (
    Asked,
    FurtherTier,
    Tier,
    TierRecord,
    Uploading,
    ask,
    open_tiers,
    read_through,
    read_tiers,
    write_tiers,
)
from ckpt_core.tiers._union import Held, Reading, RunCatalog, TierCopy, United, unite
from ckpt_core.tiers._work_process import WorkProcess

__all__ = [
    "Asked",
    "CheckpointCopy",
    "Choices",
    "CopyProcess",
    "CopyTerms",
    "DemotionTerms",
    "ExportTerms",
    "FurtherTier",
    "Gain",
    "Held",
    "Reading",
    "Rows",
    "RunCatalog",
    "Tier",
    "TierCopy",
    "TierRecord",
    "United",
    "Uploading",
    "WorkProcess",
    "ask",
    "choose_codecs",
    "copy_checkpoint",
    "open_tiers",
    "read_exports",
    "read_through",
    "read_tiers",
    "unite",
    "write_tiers",
]
