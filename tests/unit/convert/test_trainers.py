"""What is written for DeepSpeed and Megatron-Core is what their own loaders have read, bit by bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.convert import export
from ckpt_core.dcp import load_metadata
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.names import METADATA
from tests.archives import unpack
from tests.unit.training import Run, assert_equal

SOURCES = Path(__file__).parents[1] / "sources"
SINKS = ["universal", "torch_dist"]


def write_sample(kind: str, out: Path) -> Path:
    """Write for a trainer what it saved itself, see `read_universal` and `read_torch_dist`; return that."""
    package, name = {"universal": ("deepspeed", "stage1-bf16"), "torch_dist": ("megatron", "tp2")}[kind]
    sample = out.with_name(f"{out.name}-of")
    unpack(SOURCES / f"{package}.tar.xz", sample)
    export(sample / name, out, to=kind)
    return sample / name


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kind", SINKS)
def test_the_trainers_own_loader_has_read_these_files_and_found_these_tensors(
    tmp_path: Path, kind: str
) -> None:
    source = write_sample(kind, tmp_path / "out")
    read: dict[str, Any] = json.loads(Path(__file__).with_name(f"{kind}_read.json").read_text())
    files = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    found = {str(each.relative_to(tmp_path / "out")): digest_of(each) for each in files}
    assert found == read["files"]
    expected = load_file(source / "expected.safetensors")
    compared = {key: digest(each) for key, each in expected.items() if key in read}
    assert len(compared) >= 16
    assert compared == {key: read[key] for key in compared}
    if kind == "universal":
        assert (read["global_steps"], read["step"]) == (3, [3.0, 3.0])
        assert read["scheduler"] == {"last_batch_iteration": 2}
        assert [decay for _, decay in read["groups"]] == [0.1, 0.0]
    else:
        assert (read["iteration"], read["rng_state"]) == (7, [[{"seed": 0}]])


def digest_of(file: Path) -> str:
    content = file.read_bytes()
    if file.name == METADATA:  # releases of Python pickle its enums in two ways
        metadata = load_metadata(content, file.name)
        metadata.storage_data = dict(metadata.storage_data)
        content = repr(metadata).encode()
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("kind", SINKS)
def test_a_checkpoint_comes_back_from_the_format_as_it_was(tmp_path: Path, kind: str) -> None:
    run = Run.make()
    run.steps(3)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(3, run.state)
    export(tmp_path / "root" / "step-000000003", tmp_path / "out", to=kind)
    new = Run.make(5)
    with CheckpointManager(tmp_path / "other") as manager:
        if kind == "universal":
            manager.load(
                TrainState(model=new.model, optimizer=new.optimizer, rng=False), source=tmp_path / "out"
            )
            assert_equal(new.tensors(), run.tensors())
            return
        model = {name: each.clone() for name, each in new.model.state_dict().items()}
        saved = {
            f"optimizer.state.exp_avg.{name}": run.optimizer.state[each]["exp_avg"]
            for name, each in run.model.named_parameters()
            if each in run.optimizer.state
        }
        moments = {name: torch.zeros_like(each) for name, each in saved.items()}
        manager.load(
            {"model": model, **moments},
            source=tmp_path / "out",
            include=["model.*", "optimizer.state.exp_avg.*"],
        )
    assert_equal(model, run.model.state_dict())
    assert_equal(moments, saved)


def test_weights_without_an_optimizer_are_no_universal_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(3, TrainState(model=nn.Linear(2, 2)))
    with pytest.raises(IncompatibleCheckpointError, match="a single optimizer"):
        export(tmp_path / "root" / "step-000000003", tmp_path / "out", to="universal")
    assert not (tmp_path / "out").exists()
