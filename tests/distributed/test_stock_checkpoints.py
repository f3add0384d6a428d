"""What stock DCP writes on real ranks, in every sharding, is consistent and its payloads are found."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_core import CheckpointManager
from ckpt_core.dcp import ChunkLocator, check_metadata, load_metadata
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

WORLD_SIZE = 4
SHAPES = [(3,), (10, 7), (4, 4), (1, 5), (9, 2, 3)]


def tensors() -> dict[str, torch.Tensor]:
    return {f"{shape}": torch.arange(float(math.prod(shape))).reshape(shape) for shape in SHAPES}


def sharded() -> dict[str, Any]:
    flat = init_device_mesh("cpu", (WORLD_SIZE,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state: dict[str, Any] = {"plain": tensors(), "lr": 0.1}
    state["rows"] = {name: distribute_tensor(each, flat, [Shard(0)]) for name, each in tensors().items()}
    wide = {name: each for name, each in tensors().items() if each.dim() > 1}
    for name, placements in {
        "columns": [Shard(1), Shard(1)],
        "cells": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
        "hybrid": [Replicate(), Shard(0)],
    }.items():
        state[name] = {key: distribute_tensor(each, grid, placements) for key, each in wide.items()}
    return state


def save(directory: str) -> None:
    warnings.simplefilter("ignore")
    dcp.save(sharded(), checkpoint_id=directory)


def save_fsdp1(directory: str) -> None:
    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": wrapped.state_dict()}, checkpoint_id=directory)
    dist.barrier()


def check(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, put together from the payloads of its chunks."""
    metadata = load_metadata((directory / ".metadata").read_bytes(), ".metadata")
    check_metadata(metadata, ".metadata", lambda path: (directory / path).stat().st_size)

    def read_at(path: str, offset: int, size: int) -> bytes:
        with (directory / path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    whole: dict[str, torch.Tensor] = {}
    for index, place in ChunkLocator(metadata, read_at=read_at).find(metadata.storage_data).items():
        if place.dtype is None:
            continue
        assert place.payload is not None, place.reason
        raw = read_at(place.payload.path, place.payload.offset, place.payload.size_bytes)
        entry: Any = metadata.state_dict_metadata[index.fqn]
        target = whole.setdefault(index.fqn, torch.full(entry.size, math.nan))
        if raw:
            chunk = torch.frombuffer(bytearray(raw), dtype=place.dtype).reshape(place.shape)
            target[tuple(slice(o, o + n) for o, n in zip(index.offset, place.shape, strict=True))] = chunk
    return whole


@pytest.mark.slow
def test_every_sharding_of_dtensors_is_consistent_and_found(tmp_path):
    run_ranks(save, WORLD_SIZE, str(tmp_path / "x"))
    whole = check(tmp_path / "x")
    assert len(whole) > 20
    for key, tensor in whole.items():
        assert torch.equal(tensor, tensors()[key.partition(".")[2]]), key


@pytest.mark.slow
def test_what_fsdp1_saves_is_consistent_and_found(tmp_path):
    run_ranks(save_fsdp1, WORLD_SIZE, str(tmp_path / "x"))
    assert not any(tensor.isnan().any() for tensor in check(tmp_path / "x").values())


def trained(*, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def continue_from_a_mapping(root: str) -> None:
    """Train, save in every form, load into an optimizer that has made no step, and train on."""
    warnings.simplefilter("ignore")
    model, optimizer = trained(steps=2)
    by_name, by_number = get_state_dict(model, optimizer)[1], optimizer.state_dict()
    dcp.save({"model": model.state_dict(), "optim": by_name}, checkpoint_id=f"{root}/names")
    dcp.save({"model": model.state_dict(), "optim": by_number}, checkpoint_id=f"{root}/numbers")
    with CheckpointManager(f"{root}/runs") as checkpoints:
        checkpoints.save(1, {"model": model, "optim": optimizer}).result()
        live = [trained(steps=0) for _ in range(3)]
        for (one, other), place in zip(live, ("names", "numbers", "runs/step-000000001"), strict=True):
            checkpoints.load({"model": one, "optim": other}, source=f"{root}/{place}")
    step(model, optimizer)
    for one, other in live:
        step(one, other)
        for own, theirs in zip(one.parameters(), model.parameters(), strict=True):
            assert isinstance(own, DTensor)
            assert isinstance(theirs, DTensor)
            assert torch.equal(own.to_local(), theirs.to_local())
            moment = other.state[own]["exp_avg"]
            assert moment.placements == own.placements
            assert torch.equal(moment.to_local(), optimizer.state[theirs]["exp_avg"].to_local())


def test_a_sharded_run_goes_on_from_a_mapping_with_its_optimizer(tmp_path):
    run_ranks(continue_from_a_mapping, 2, str(tmp_path))
