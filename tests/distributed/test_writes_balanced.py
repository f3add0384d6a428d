"""Replicas share the writing: of four ranks that hold the same each writes about a quarter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_core import CheckpointManager, TrainState
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

RANKS = 4
STRATEGIES = ("ddp", "hsdp")


def build(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of unequal size, the largest last, where a choice in order of appearance goes wrong."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)), nn.Linear(128, 1536))
    if strategy == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    return net, optimizer


def saved(root: Path) -> None:
    for strategy in STRATEGIES:
        net, optimizer = build(strategy)
        with CheckpointManager(root / strategy, deadline_seconds=60) as checkpoints:
            checkpoints.save(1, TrainState(model=net, optimizer=optimizer))
        dist.barrier()


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("balanced")
    run_ranks(saved, RANKS, folder, timeout_seconds=120)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_writes_about_a_quarter_of_the_bytes(root, strategy):
    folder = root / strategy / "step-000000001"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(RANKS)]
    assert max(sizes) <= 1.1 * sum(sizes) / RANKS, sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_chunk_is_written_twice_and_none_is_missing(root, strategy):
    metadata = FileSystemReader(root / strategy / "step-000000001").read_metadata()
    shards = 2 if strategy == "hsdp" else 1
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            places = {tuple(chunk.offsets) for chunk in entry.chunks}
            assert len(places) == len(entry.chunks), name
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    weight = metadata.state_dict_metadata["model.0.weight"]
    assert len(weight.chunks) == shards
