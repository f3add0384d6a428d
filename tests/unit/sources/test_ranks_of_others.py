"""What others wrote is loaded by several ranks, and what several ranks of others wrote by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.sources import recognise
from ckpt_core.storage import LocalStorage
from tests.kit.ranks import run_ranks
from tests.unit.sources.test_torch_save import bits, read_tensors

pytestmark = pytest.mark.distributed


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 5)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


def to_shard() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.rand(7, 4), "b.weight": torch.rand(6, 2).bfloat16(), "bias": torch.rand(3)}


def job(folder: Path) -> tuple[dict[str, object], dict[int, dict[str, object]]]:
    """Write shards, and take over a file of `torch.save` into a sharded model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {"a.weight": Shard(0), "b.weight": Shard(1)}
    sharded = {
        name: distribute_tensor(each, mesh, [placed[name]]) if name in placed else each
        for name, each in to_shard().items()
    }
    dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True))
    model = net(3)
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), lr=0.1)
    with CheckpointManager(folder / "ours") as checkpoints:
        checkpoints.load(TrainState(model=model, optimizer=optimizer), source=folder / "run/ckpt.pt")
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"]
    return (
        {name: whole(each) for name, each in model.state_dict().items()},
        {number: {key: whole(each) for key, each in own.items()} for number, own in state.items()},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(folder):
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    (folder / "run").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run/ckpt.pt")
    train(model, optimizer, 2)
    return run_ranks(job, 2, folder), model.state_dict(), optimizer.state_dict()["state"]


def test_a_file_of_torch_save_is_taken_over_by_a_sharded_model(results):
    of_ranks, expected, state = results
    for weights, moments in of_ranks:
        for name, each in expected.items():
            assert torch.equal(weights[name], each), name
        for number, own in state.items():
            assert all(torch.equal(moments[number][key], each) for key, each in own.items()), number


def test_shards_of_dcps_hugging_face_writer_are_read_as_whole_tensors(results, folder):
    shards = folder / "shards"
    assert len(list(shards.glob("shard-*.safetensors"))) == 2
    found = read_tensors(shards)
    assert {name: bits(each) for name, each in found.items()} == {
        f"model.{name}": bits(each) for name, each in to_shard().items()
    }
    (shards / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="only 2"):
        recognise(LocalStorage(folder), "shards")
