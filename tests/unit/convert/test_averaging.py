"""Averages of checkpoints: exact to the bit against a plain loop over whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.cli import main
from ckpt_core.convert import _fill, export
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError

STEPS = (1, 2, 3, 4, 5, 6, 7)


def save(root: Path, states: Sequence[Any]) -> None:
    with CheckpointManager(root) as manager:
        for step, state in enumerate(states, 1):
            manager.save(step, state)
            manager.wait()


def average(root: Path, out: Path, count: int, decay: float | None = None, **options: Any) -> dict[str, Any]:
    export(root, out, to="torch", average=count, decay=decay, **options)
    return torch.load(out, weights_only=True)


def plain(tensors: Sequence[torch.Tensor], ema: float | None) -> torch.Tensor:
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    wide = torch.complex64 if tensors[0].is_complex() else wide
    total = tensors[0].to(wide)
    for each in tensors[1:]:
        total = total + each.to(wide) if ema is None else total * ema + each.to(wide) * (1 - ema)
    return (total if ema else total / len(tensors)).to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_average_is_that_of_a_plain_loop_to_the_bit(tmp_path, monkeypatch, ema):
    monkeypatch.setattr(_fill, "WINDOW_BYTES", 4099)  # windows that begin within elements and vectors
    torch.manual_seed(1)
    kinds = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    ]
    states = [
        {
            "model": {str(kind): (torch.randn(77, 53) * 3 ** (step % 5)).to(kind) for kind in kinds}
            | {"count": torch.tensor(step), "mask": torch.rand(9) > 0.5}
        }
        for step in STEPS
    ]
    save(tmp_path / "root", states)
    found = average(tmp_path / "root", tmp_path / "x.pt", len(STEPS), ema)["model"]
    for kind in map(str, kinds):
        expected = plain([state["model"][kind] for state in states], ema)
        assert found[kind].dtype == expected.dtype
        assert bits(found[kind]) == bits(expected)
    assert found["count"] == STEPS[-1]
    assert found["mask"].equal(states[-1]["model"]["mask"])
    two = average(tmp_path / "root", tmp_path / "y.pt", 2, ema, step=3, dtype="bf16")["model"]
    exact = plain([state["model"]["torch.float32"] for state in states[1:3]], ema)
    assert bits(two["torch.float32"]) == bits(exact.bfloat16())


def test_the_state_of_optimizers_is_that_of_the_newest(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights = []
    with CheckpointManager(tmp_path / "root") as manager:
        for step in (1, 2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            weights.append(model.weight.detach().clone())
            manager.save(step, TrainState(model=model, optimizer=optimizer))
            manager.wait()
    found = average(tmp_path / "root", tmp_path / "x.pt", 2)
    assert found["model"]["weight"].equal((weights[0] + weights[1]) / 2)
    newest = optimizer.state_dict()["state"]
    assert all(found["optimizer"]["state"][0][key].equal(value) for key, value in newest[0].items())


def test_any_format_and_the_command_get_the_average(tmp_path, capsys):
    weights = [torch.randn(5, 3) for _ in range(3)]
    save(tmp_path / "root", [{"model": {"w": each}} for each in weights])
    for to, out in (("hf", "hf"), ("dcp", "dcp"), ("torch", "x.pt")):
        command = ["average", str(tmp_path / "root"), "--last", "2", "--to", to, str(tmp_path / out)]
        assert main(command) == 0
    assert "step 3" in capsys.readouterr().out
    expected = (weights[1] + weights[2]) / 2
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].equal(expected)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "y.pt")
    for name in ("x.pt", "y.pt"):
        assert torch.load(tmp_path / name, weights_only=True)["model"]["w"].equal(expected)
    smooth = str(tmp_path / "smooth")
    assert (
        main(["average", str(tmp_path / "root"), smooth, "--ema", "0.5", "--last", "3", "--dtype", "bf16"])
        == 0
    )
    total = weights[0] * 0.5 + weights[1] * 0.5
    found = load_file(tmp_path / "smooth" / "model.safetensors")["w"]
    assert found.equal((total * 0.5 + weights[2] * 0.5).bfloat16())


@pytest.mark.parametrize(
    ("other", "named"),
    [({"w": torch.ones(3)}, "model.w"), ({"v": torch.ones(2)}, "model.v"), ({}, "model.w")],
)
def test_checkpoints_of_other_models_are_refused_before_anything_is_written(tmp_path, other, named):
    extra = {"b": torch.ones(1)}
    save(tmp_path / "root", [{"model": other | extra}, {"model": {"w": torch.ones(2)} | extra}])
    with pytest.raises(IncompatibleCheckpointError, match=named):
        average(tmp_path / "root", tmp_path / "x.pt", 2)
    for count, decay, text in ((3, None, "fewer than the 3"), (1, None, "average"), (2, 1.0, "decay")):
        with pytest.raises(ConfigError, match=text):
            average(tmp_path / "root", tmp_path / "x.pt", count, decay)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
