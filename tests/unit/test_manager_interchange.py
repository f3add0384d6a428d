"""No lock-in: stock DCP reads what we write without us, and we read what stock DCP wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from tests.unit.training import Run, assert_equal, damage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

READS_WITHOUT_US = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ckpt_core", "lightning_ckpt", "accelerate_ckpt"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocker())

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

checkpoint, merged = sys.argv[1:]
expected = torch.load(merged + ".expected", weights_only=True)
target = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
dcp.load(target, checkpoint_id=checkpoint, no_dist=True)
for name, value in expected.items():
    assert torch.equal(target["model"][name], value), name

dcp_to_torch_save(checkpoint, merged)
whole = torch.load(merged, weights_only=False)
for name, value in expected.items():
    assert torch.equal(whole["model"][name], value), name
assert "exp_avg" in str(whole["optimizer"].keys()) or "state" in whole["optimizer"]
assert not [name for name in sys.modules if name.startswith("ckpt_core")]
print("read without us")
"""


@pytest.mark.slow
def test_stock_tools_read_our_checkpoint_without_our_package(tmp_path):
    run = Run.make()
    run.steps(2)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(2, run.state)
    merged = tmp_path / "merged.pt"
    torch.save(run.model.state_dict(), f"{merged}.expected")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READS_WITHOUT_US, tmp_path / "run" / "step-000000002", merged],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.strip().endswith("read without us"), result.stderr


def test_a_directory_of_stock_dcp_is_loaded_into_a_mapping(tmp_path):
    dcp.save(
        {"w": torch.arange(6.0), "n": 5, "deep": {"b": [torch.ones(2)]}}, checkpoint_id=tmp_path / "theirs"
    )
    target = {"w": torch.zeros(6), "n": 0, "deep": {"b": [torch.zeros(2)]}}
    with CheckpointManager(tmp_path) as checkpoints:
        saved = checkpoints.load(target, name="theirs")
        assert checkpoints.checkpoints() == []
    assert (saved.step, saved.world_size) == (None, None)
    assert target["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert target["n"] == 5
    assert target["deep"]["b"][0].tolist() == [1, 1]


def test_a_directory_of_stock_dcp_is_loaded_into_a_training_state(tmp_path):
    run, loaded = Run.make(), Run.make(seed=4)
    run.steps(3)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "theirs")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load(TrainState(model=loaded.model, optimizer=loaded.optimizer), name="theirs")
    assert_equal(loaded.tensors(), run.tensors())
    assert loaded.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_our_checkpoint_is_loaded_by_torchs_own_state_dict_functions(tmp_path):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    run, loaded = Run.make(), Run.make(seed=4)
    run.steps(3)
    loaded.step()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, run.state)
    model, optimizer = get_state_dict(loaded.model, loaded.optimizer)
    target = {"model": model, "optimizer": optimizer}
    dcp.load(target, checkpoint_id=tmp_path / "step-000000003")
    set_state_dict(
        loaded.model, loaded.optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    assert_equal(loaded.tensors(), run.tensors())


def test_damage_in_a_directory_of_stock_dcp_is_found_by_its_own_checksums(tmp_path):
    dcp.save({"w": torch.arange(10_000.0)}, checkpoint_id=tmp_path / "theirs")
    damage(tmp_path, "theirs", place=20_000)
    target = {"w": torch.zeros(10_000)}
    told = r"theirs is damaged.*__0_0\.distcp"
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CorruptCheckpointError, match=told):
        checkpoints.load(target, name="theirs")
    assert not target["w"].any()


def test_a_directory_of_stock_dcp_must_fit_too(tmp_path):
    dcp.save({"model": nn.Linear(2, 3)}, checkpoint_id=tmp_path / "theirs")
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(IncompatibleCheckpointError, match="weight"),
    ):
        checkpoints.load(TrainState(model=nn.Linear(2, 4)), name="theirs")


def test_a_name_with_nothing_of_either_kind_is_not_found(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with CheckpointManager(tmp_path) as checkpoints:
        for name in ("empty", "absent"):
            with pytest.raises(CheckpointNotFoundError, match=name):
                checkpoints.load({"a": torch.ones(1)}, name=name)
