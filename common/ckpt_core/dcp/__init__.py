"""Staged state to bytes and back, through the public extension points of torch.distributed.checkpoint."""

from ckpt_core.dcp._metadata import entries, load_metadata
from ckpt_core.dcp._plan import PartPlanner, ResolvedPlan, StagedPlanner, decide, lowest_rank_only
from ckpt_core.dcp._reader import SafeLoadPlanner, ShardReader, load_value
from ckpt_core.dcp._writer import ShardWriter

__all__ = [
    "PartPlanner",
    "ResolvedPlan",
    "SafeLoadPlanner",
    "ShardReader",
    "ShardWriter",
    "StagedPlanner",
    "decide",
    "entries",
    "load_metadata",
    "load_value",
    "lowest_rank_only",
]
