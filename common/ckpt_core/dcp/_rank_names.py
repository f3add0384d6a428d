"""Names of values that differ between ranks: local buffers, parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import ShardedTensor
from ckpt_core.names import KEPT


def kept_name(rank: int, name: str) -> str:
    """Return the flattened name of a rank's own value of the entry `name`."""
    return ".".join(kept_path(rank, name))


def kept_path(rank: int, name: str) -> tuple[str, str, str]:
    """Return the path, in the nested state, of a rank's own value of the entry `name`."""
    return KEPT, f"{rank:05d}", name


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's only shard of a live tensor; empty if it has none or several."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor if len(shards) == 1 else torch.empty(0)
    return tensor


GroupNames: TypeAlias = Mapping[tuple[str | int, ...], Sequence[tuple[str, ...]]]
"""Path of a list of parameter groups in the nested state -> the names in each group."""

_Path: TypeAlias = tuple[str | int, ...]


def renumber(
    plans: Sequence[SavePlan], groups: Sequence[GroupNames]
) -> tuple[list[SavePlan], list[dict[str, str]]]:
    """Number the parameter groups of all ranks.

    Args:
        plans: every rank's local plan, by rank; they are not changed.
        groups: every rank's parameter groups.

    Returns:
        The plans with the names of the checkpoint; for each rank its names -> those, where they differ.
    """
    moved: list[dict[str, _Path]] = [{} for _ in plans]
    for path in dict.fromkeys(path for of_rank in groups for path in of_rank):
        lists = [of_rank.get(path, ()) for of_rank in groups]
        if len({tuple(each) for each in lists if each}) < 2:
            continue
        numbers: dict[tuple[object, ...], int] = {}
        for rank, own in enumerate(lists):
            new = [numbers.setdefault(tuple(names) or (at,), len(numbers)) for at, names in enumerate(own)]
            moved[rank] |= _moved(plans[rank], path, new)
    renamed = [{old: ".".join(map(str, path)) for old, path in of_rank.items()} for of_rank in moved]
    return [_under(*each) for each in zip(plans, renamed, moved, strict=True)], renamed


def _moved(plan: SavePlan, path: _Path, new: Sequence[int]) -> dict[str, _Path]:
    depth = len(path)
    paths: Mapping[str, _Path] = plan.planner_data or {}
    return {
        key: (*path, new[at], *each[depth + 1 :])
        for key, each in paths.items()
        if each[:depth] == path and len(each) > depth and isinstance(at := each[depth], int) and new[at] != at
    }


def _under(plan: SavePlan, renamed: Mapping[str, str], moved: Mapping[str, _Path]) -> SavePlan:
    if not renamed:
        return plan
    items = [
        replace(item, index=replace(item.index, fqn=renamed[item.index.fqn]))
        if item.index.fqn in renamed
        else item
        for item in plan.items
    ]
    paths: Mapping[str, _Path] = plan.planner_data or {}
    data = {renamed.get(key, key): moved.get(key, path) for key, path in paths.items()}
    return replace(plan, items=items, planner_data=data)
