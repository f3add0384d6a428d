"""Names for values of one name of which every rank keeps its own, to have it back at the resume."""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpt_core.names import KEPT


def kept_name(rank: int, name: str) -> str:
    """Flattened name under which `rank` keeps its own value of the entry `name`."""
    return ".".join(kept_path(rank, name))


def kept_path(rank: int, name: str) -> tuple[str, str, str]:
    """The same as a path in the nested state."""
    return KEPT, f"{rank:05d}", name


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a live tensor on this rank; empty if it has no part of it, or several."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if len(shards) == 1 else torch.empty(0)
    return tensor
