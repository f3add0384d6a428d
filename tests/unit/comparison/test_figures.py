"""Figures of two tensors that differ."""

from __future__ import annotations

import math

import torch

from ckpt_core.comparison._tensor_pairs import TensorDifference, figures
from ckpt_core.types import SavedTensor


def compared(a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    return figures("w", SavedTensor(shape=tuple(a.shape), dtype=str(a.dtype)), a, b)


def test_figures_are_of_changed_elements_alone():
    a = torch.tensor([1.0, math.inf, math.nan, 4.0])
    b = torch.tensor([1.0, math.inf, math.nan, 6.0])
    found = compared(a, b)
    assert found is not None
    assert (found.changed, found.max_abs) == (1, 2.0)
    assert compared(a, a) is None
    found = compared(torch.cat([a, torch.tensor([0.0])]), torch.cat([b, torch.tensor([math.nan])]))
    assert found is not None
    assert found.changed == 2
    assert math.isnan(found.max_abs or 0.0)


def test_figures_are_right_for_every_dtype():
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        found = compared(torch.tensor([3.0, 4.0, 0.0]).to(dtype), torch.tensor([3.0, 2.0, 1.0]).to(dtype))
        assert found is not None
        assert (found.changed, found.max_abs) == (2, 2.0)
        assert found.relative_norm is not None
        assert math.isclose(found.relative_norm, math.sqrt(5) / 5)
    whole = compared(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert whole is not None
    assert whole.max_abs is None
