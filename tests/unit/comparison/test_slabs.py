"""Slabs cover a tensor once, in order, and meet every box of it in one piece."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.comparison._slabs import Figures, slabs
from ckpt_core.types import SavedTensor

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@settings(max_examples=60)
@given(shapes, st.integers(1, 20), st.data())
def test_slabs_cover_a_tensor_in_order_and_meet_a_box_in_one_piece(shape, most, data):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = list(slabs(shape, most))
    cuts = [numbers[tuple(map(lambda o, s: slice(o, o + s), *slab))].reshape(-1) for slab in found]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *cuts]), numbers.reshape(-1))
    assert all(0 < len(cut) <= most for cut in cuts)
    box = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape)
    own = numbers[box].reshape(-1).tolist()  # the box, in the order in which its file has it
    met = [number for cut in cuts for number in cut.tolist() if number in set(own)]
    assert met == own


def test_figures_are_of_changed_elements_alone():
    a = torch.tensor([1.0, math.inf, math.nan, 4.0])
    b = torch.tensor([1.0, math.inf, math.nan, 6.0])
    figures = Figures(torch.float32)
    figures.add(a, b)
    found = figures.of("w", SavedTensor(shape=(4,), dtype="float32"))
    assert (found.changed, found.max_abs) == (1, 2.0)
    figures.add(torch.tensor([0.0]), torch.tensor([math.nan]))
    assert math.isnan(figures.of("w", SavedTensor(shape=(5,), dtype="float32")).max_abs or 0.0)


def test_figures_are_right_for_every_dtype():
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        a = torch.tensor([3.0, 4.0, 0.0]).to(dtype)
        b = torch.tensor([3.0, 2.0, 1.0]).to(dtype)
        figures = Figures(dtype)
        figures.add(a, b)
        found = figures.of("w", SavedTensor(shape=(3,), dtype=str(dtype)))
        assert (found.changed, found.max_abs) == (2, 2.0)
        assert found.relative_norm is not None
        assert math.isclose(found.relative_norm, math.sqrt(5) / 5)
    whole = Figures(torch.int64)
    whole.add(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert whole.of("w", SavedTensor(shape=(2,), dtype="int64")).max_abs is None
