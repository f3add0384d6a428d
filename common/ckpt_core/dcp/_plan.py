"""Who writes what: DCP's planner, driven so that the collective part is one exchange on the main thread."""

from __future__ import annotations

import io
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from ckpt_core.dcp._dedup import assign
from ckpt_core.dcp._kinds import check_kind


@final
class PartPlanner:
    """Plans one DCP part of a save on one rank.

    Who calls what: 1. (all ranks) `local_plan`. 2. (coordinator) `decide` over all local plans.
    3. (all ranks) `resolve` for the plan that came back.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(dict(state_dict), None, is_coordinator=False)

    def fingerprint(self) -> Hashable:
        """Equal for states that are planned alike: the same paths, kinds, dtypes, shapes and placements."""
        paths = self._planner.mappings
        return tuple((fqn, paths[fqn], _describe(value)) for fqn, value in self._planner.state_dict.items())

    def local_plan(self) -> SavePlan:
        """What this rank could write.

        Raises:
            ConfigError: a tensor is of a kind that no checkpoint can hold.
        """
        for fqn, value in self._planner.state_dict.items():
            if isinstance(value, torch.Tensor):
                check_kind(value, fqn)
        return self._planner.create_local_plan()

    def resolve(self, plan: SavePlan) -> ResolvedPlan:
        """The live tensors and the serialised values that this rank is to write."""
        shards: dict[MetadataIndex, torch.Tensor] = {}
        values: dict[MetadataIndex, bytes] = {}
        for item in plan.items:
            data = self._planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                values[item.index] = _buffer_of(data)
            else:
                shards[item.index] = _tensor_of(data, item.index.fqn)
        return ResolvedPlan(plan=plan, shards=shards, values=values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPlan:
    """A final plan with the data behind it: live local tensors, and values already serialised."""

    plan: SavePlan
    shards: Mapping[MetadataIndex, torch.Tensor]
    values: Mapping[MetadataIndex, bytes]


def decide(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Deduplicate over replicas and build the metadata. Coordinator only.

    Raises:
        ConfigError: ranks hold one entry with different dtypes or shapes.
        ValueError: the ranks' shards overlap or leave holes.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    final_plans, metadata = planner.create_global_plan(assign(plans, ()))
    # The path of every leaf is already in the metadata: sending it back to every rank would be waste.
    return [SavePlan(plan.items) for plan in final_plans], metadata


def lowest_rank_only(plans: Sequence[SavePlan], keys: Collection[str]) -> list[SavePlan]:
    """Plans in which entries of these keys are left to the lowest rank that has them.

    DCP gives a replicated entry to the least loaded rank, which is only right if all replicas are equal.
    """
    taken: set[MetadataIndex] = set()
    kept: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.index.fqn not in keys or item.index not in taken]
        taken.update(item.index for item in items if item.index.fqn in keys)
        kept.append(replace(plan, items=items))
    return kept


def _describe(value: object) -> Hashable:
    if isinstance(value, ShardedTensor):
        shards = [
            (tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in value.local_shards()
        ]
        return "sharded", value.dtype, tuple(value.size()), tuple(shards)
    if isinstance(value, DTensor):
        return "placed", value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return "plain", value.dtype, value.shape, value.layout, value.device.type
    return "value"


def _buffer_of(data: object) -> bytes:
    if not isinstance(data, io.BytesIO):
        raise TypeError(f"the planner gave {type(data).__name__} for a byte entry")
    return data.getvalue()


def _tensor_of(data: object, fqn: str) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"the planner gave {type(data).__name__} for the tensor {fqn}")
    return data
