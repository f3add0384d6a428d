"""Weights of Hugging Face go straight into a sharded model, and each rank reads its own bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_core import CheckpointManager, TrainState, import_checkpoint
from ckpt_core.convert import _importing
from ckpt_core.coordination import coordinator_for_job
from ckpt_core.errors import CheckpointExistsError, CorruptCheckpointError
from ckpt_core.reading import Engine
from ckpt_core.saving import RankFiles
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

FILES = {
    "model-00001-of-00002.safetensors": {"embed.weight": (257, 64), "layers.0.weight": (64, 65)},
    "model-00002-of-00002.safetensors": {"layers.1.weight": (130, 64), "norm.weight": (64,)},
}
SHAPES = {name: shape for shapes in FILES.values() for name, shape in shapes.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 64)
        self.layers = nn.ModuleList([nn.Linear(65, 64, bias=False), nn.Linear(64, 130, bias=False)])
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, 257, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight


def value(name: str) -> torch.Tensor:
    shape = SHAPES["embed.weight" if name == "head.weight" else name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + len(shape)


def load(root: str, folder: str, groups: int) -> int:
    """Load on this rank; return how many bytes it asked for."""
    with torch.device("meta"):
        model = Model()
    world = int(os.environ["WORLD_SIZE"])
    names = ("replicas", "shards")[-1 if groups == 1 else 0 :]
    mesh = init_device_mesh("cpu", (groups, world // groups)[-len(names) :], mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie()
    engines: list[Engine] = []
    made = Engine.__init__

    def noted(self: Engine, *args: object, **kwargs: object) -> None:
        engines.append(self)
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    Engine.__init__ = noted  # type: ignore[method-assign]
    with CheckpointManager(root) as checkpoints:
        found = checkpoints.load(TrainState(model=model), source=folder, items=["model"])
    assert (found.matched, list(found.missing), list(found.unexpected)) == (4, [], [])
    for name, each in model.state_dict().items():
        assert isinstance(each, DTensor)
        assert torch.equal(each.full_tensor(), value(name)), name
    return sum(each.bytes_read for each in engines)


def take_in(root: str, folder: str) -> list[int]:
    """Import on this rank; return which data files it wrote."""
    _importing._FILE_BYTES = 16 << 10
    written: list[int] = []
    write = RankFiles.write_image

    def noted(self: RankFiles, *args: Any, **kwargs: Any) -> None:
        written.append(self._rank)
        write(self, *args, **kwargs)

    RankFiles.write_image = noted  # type: ignore[method-assign]
    ranks = coordinator_for_job()
    info = import_checkpoint(folder, root, step=4, coordinator=ranks)
    with pytest.raises(CheckpointExistsError, match="step 4 already"):
        import_checkpoint(folder, root, step=4, coordinator=ranks)
    ranks.close()
    assert info.step == 4
    return written


def begin(root: str, folder: str) -> None:
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(root, init_from=folder) as checkpoints:
        assert checkpoints.resume(state) is None
        assert torch.equal(model.layers[0].weight.full_tensor(), value("layers.0.weight"))
        checkpoints.save(1, state)


def refuse(root: str, folder: str) -> str:
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    before = [each.to_local().clone() for each in model.parameters() if isinstance(each, DTensor)]
    with CheckpointManager(root) as checkpoints, pytest.raises(CorruptCheckpointError) as error:
        checkpoints.load(TrainState(model=model), source=folder, items=["model"])
    after = [each.to_local() for each in model.parameters() if isinstance(each, DTensor)]
    assert all(map(torch.equal, before, after))
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    made.mkdir()
    for file, shapes in FILES.items():
        save_file({name: value(name) for name in shapes}, made / file)
    return made


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2)])
def test_a_folder_is_read_once_by_all_ranks_together(tmp_path, folder, ranks, groups):
    asked = run_ranks(load, ranks, str(tmp_path / "run"), str(folder), groups)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert sum(asked) <= 1.05 * size


def test_a_run_of_ranks_begins_with_a_folder(tmp_path, folder):
    run_ranks(begin, 2, str(tmp_path / "run"), str(folder))


def test_a_missing_shard_is_one_error_on_every_rank(tmp_path, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    one, other = run_ranks(refuse, 2, str(tmp_path / "run"), str(folder))
    assert one == other
    assert "not all there" in one


def test_ranks_share_the_files_of_an_import(tmp_path, folder):
    shares = run_ranks(take_in, 2, str(tmp_path / "run"), str(folder), timeout_seconds=120)
    assert sorted(shares[0] + shares[1]) == [*range(len(shares[0]) + len(shares[1]))]
    assert all(len(share) > 1 for share in shares)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.verify() == []
        checkpoints.load(TrainState(model=(model := Model())), items=["model"])
    assert all(torch.equal(each, value(name)) for name, each in model.state_dict().items())
