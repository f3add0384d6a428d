"""A checkpoint takes about as many bytes as one file of `torch.save`, of whatever sizes its tensors are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.formats.chunks import BLOCK_BYTES
from tests.unit.state.round_trip import assert_equal


def tensors(*sizes: int, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(size, generator=generator).to(**options) for size in sizes]
    return {"model": {f"layers.{number}.weight": each for number, each in enumerate(made)}}


def trained(model: nn.Module) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def gpt(width: int, layers: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.Sequential(nn.Embedding(65, width), nn.TransformerEncoder(block, layers), nn.Linear(width, 65))


STATES: dict[str, Callable[[], Any]] = {
    "550 tensors with 54 kB": lambda: tensors(*[24, 25] * 275, dtype=torch.float32),
    "an optimizer of small layers": lambda: trained(nn.Sequential(*(nn.Linear(4, 5) for _ in range(69)))),
    "a tiny GPT": lambda: trained(gpt(64, 4)),
    "single elements and none": lambda: tensors(*[1, 0] * 100, dtype=torch.bool),
    "a little more than a page": lambda: tensors(*[1025] * 100, dtype=torch.float32),
    "small beside large": lambda: tensors(*[1 << 18, 3] * 4, dtype=torch.float32),
    "below and at a block": lambda: tensors(BLOCK_BYTES - 1, BLOCK_BYTES, 7, dtype=torch.uint8),
    "a large layer": lambda: trained(nn.Linear(1000, 700)),
}


def bytes_of(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir())


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_takes_few_bytes_and_stock_dcp_reads_it(tmp_path, name):
    state = STATES[name]()
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, state)
    tree = dict(state.capture().sharded[""]) if isinstance(state, TrainState) else state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=tmp_path / "stock")
        # What each rank has beside tensors: its random states, and names.
        fixed = 20_000 if isinstance(state, TrainState) else 8_000
        ours = bytes_of(tmp_path / "step-000000001")
        assert ours <= bytes_of(tmp_path / "stock") + fixed
        torch.save(tree, tmp_path / "one.pt")
        assert ours <= 1.5 * (tmp_path / "one.pt").stat().st_size + fixed
        model = {key: torch.zeros_like(value) for key, value in tree["model"].items()}
        dcp.load({"model": model}, checkpoint_id=tmp_path / "step-000000001")
    assert_equal(model, dict(tree["model"]))


def test_of_packed_tensors_any_can_be_read_alone(tmp_path):
    saved = tensors(*[24, 25] * 20, dtype=torch.float32)["model"]
    picked = {name: torch.zeros_like(saved[name]) for name in ("layers.7.weight", "layers.38.weight")}
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.load(picked)
    assert_equal(picked, {name: saved[name] for name in picked})


def test_the_files_beside_the_tensors_are_small(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, trained(nn.Linear(2, 2)))
    assert bytes_of(tmp_path / "step-000000001") <= 60_000
