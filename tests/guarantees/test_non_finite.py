"""`reject_non_finite`: what has diverged is never committed, and never costs what was fine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, SaveError, TrainState


def steps(manager):
    return [info.step for info in manager.checkpoints()]


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, math.nan),
        (torch.bfloat16, math.inf),
        (torch.float8_e5m2, -math.inf),
        (torch.complex64, math.nan),
    ],
)
def test_weights_that_are_not_finite_are_not_committed(tmp_path, value, dtype, staging):
    fine = torch.zeros(1000)
    with CheckpointManager(tmp_path, keep=KeepLatest(1), reject_non_finite=True, staging=staging) as manager:
        manager.save(1, {"w": fine.to(dtype)})
        diverged = fine.clone()
        diverged[500] = value
        with pytest.raises(SaveError, match=r"step 2 was not saved.*NaN or infinity in w\b"):
            manager.save(2, {"w": diverged.to(dtype)}).result()
        assert steps(manager) == [1]
        manager.wait()
        manager.save(3, {"w": fine.to(dtype)})
        manager.wait()
        assert steps(manager) == [3]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_committed(tmp_path, loss):
    with CheckpointManager(tmp_path, reject_non_finite=True) as manager:
        with pytest.raises(SaveError, match=r"the metric 'loss' is (nan|inf)"):
            manager.save(1, {"w": torch.zeros(1)}, metrics={"loss": torch.tensor(loss)})
        manager.save(1, {"w": torch.zeros(1)}, metrics={"loss": 1.0, "val_loss": loss})
        manager.wait()
        assert steps(manager) == [1]


def test_training_goes_on_from_what_was_fine_if_errors_are_only_told(tmp_path, caplog):
    with CheckpointManager(tmp_path, keep=KeepLatest(1), reject_non_finite=True, on_error="warn") as manager:
        for step, value in enumerate([0.0, math.nan, math.nan], start=1):
            manager.save(step, {"w": torch.full((3,), value)})
        manager.save(4, {"w": torch.zeros(1)}, metrics={"loss": math.nan})
        manager.wait()
        assert steps(manager) == [1]
    assert caplog.text.count("NaN or infinity in w") >= 2


def test_buffers_may_be_infinite_and_weights_without_the_option_too(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, reject_non_finite=True) as manager:
        manager.save(1, TrainState(model=model, optimizer=optimizer)).result()
        manager.save(2, {"n": torch.zeros(3, dtype=torch.int64), "empty": torch.zeros(0)}).result()
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, {"w": torch.full((3,), math.nan)}).result()
