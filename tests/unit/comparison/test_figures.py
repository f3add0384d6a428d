"""Figures of two tensors that differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.comparison import TensorDifference, compare
from ckpt_core.storage import open_storage


def compared(root: Path, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    for step, tensor in ((1, a), (2, b)):
        with CheckpointManager(root / str(step)) as manager:
            manager.save(step, {"w": tensor})
    one, other = ((open_storage(str(root / str(step))), f"step-{step:09d}") for step in (1, 2))
    found = compare(one, other)
    assert found.equal == (not found.tensors)
    return found.tensors[0] if found.tensors else None


def test_figures_are_of_changed_elements_alone(tmp_path):
    a = torch.tensor([1.0, math.inf, math.nan, 4.0])
    b = torch.tensor([1.0, math.inf, math.nan, 6.0])
    found = compared(tmp_path / "changed", a, b)
    assert found is not None
    assert (found.changed, found.max_abs) == (1, 2.0)
    assert compared(tmp_path / "same", a, a) is None
    found = compared(
        tmp_path / "nan", torch.cat([a, torch.tensor([0.0])]), torch.cat([b, torch.tensor([math.nan])])
    )
    assert found is not None
    assert found.changed == 2
    assert math.isnan(found.max_abs or 0.0)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_figures_are_right_for_every_dtype(tmp_path, dtype):
    found = compared(
        tmp_path, torch.tensor([3.0, 4.0, 0.0]).to(dtype), torch.tensor([3.0, 2.0, 1.0]).to(dtype)
    )
    assert found is not None
    assert (found.changed, found.max_abs) == (2, 2.0)
    assert found.relative_norm is not None
    assert math.isclose(found.relative_norm, math.sqrt(5) / 5)


def test_whole_numbers_have_no_largest_difference(tmp_path):
    whole = compared(tmp_path, torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert whole is not None
    assert (whole.changed, whole.max_abs) == (1, None)
