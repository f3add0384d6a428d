"""Saves and loads a state with stock DCP, as the life cycle does with ours: nothing but files in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ckpt_core.state import StateSource, decode, encode
from ckpt_core.types import SavedState, SavedTensor


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint on disk, and the JSON of the items beside it."""

    folder: Path
    per_rank: str
    shared: str
    world_size: int | None


def save(source: StateSource, folder: Path) -> Written:
    captured = source.capture()
    dcp.save(dict(captured.sharded[""]), checkpoint_id=folder)
    return Written(
        folder=folder,
        per_rank=json.dumps(encode(dict(captured.per_rank))),
        shared=json.dumps(encode(dict(captured.shared))),
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
    )


def saved_state(written: Written) -> SavedState:
    metadata = FileSystemReader(written.folder).read_metadata()
    entries = {
        metadata.planner_data[key]: SavedTensor(
            shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch.")
        )
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    return SavedState(
        sharded={"": entries},
        per_rank=decode(json.loads(written.per_rank)),
        shared=decode(json.loads(written.shared)),
        world_size=written.world_size,
        step=1,
    )


def load(source: StateSource, written: Written) -> list[str]:
    saved = saved_state(written)
    template = source.target(saved)[""]
    if template:
        dcp.load(
            template,
            checkpoint_id=written.folder,
            planner=DefaultLoadPlanner(flatten_sharded_tensors=False),
        )
    return list(source.apply({"": template}, saved))


def stock(folder: Path) -> Written:
    """A checkpoint that stock DCP wrote."""
    return Written(folder=folder, per_rank="{}", shared="{}", world_size=None)


def full(value: Any) -> Any:
    """The whole of a value that is spread over ranks; a collective."""
    if isinstance(value, Mapping):
        return {key: full(each) for key, each in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, ShardedTensor):
        return _assembled(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _assembled(value: ShardedTensor) -> torch.Tensor:
    mine = [(shard.metadata.shard_offsets, shard.tensor.detach().clone()) for shard in value.local_shards()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = torch.empty(value.size(), dtype=value.dtype)
    for offsets, tensor in (shard for shards in everyone for shard in shards):
        index = tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))
        whole[index] = tensor
    return whole


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    """Bit for bit, with types and dtypes."""
    assert type(one) is type(other), path
    if isinstance(one, Mapping):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{path}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert torch.equal(one, other), path
    else:
        assert one == other, path
