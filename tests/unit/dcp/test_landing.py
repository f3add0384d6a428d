"""Bytes of a stored chunk land where they belong, whatever window of it they come in."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ckpt_core.dcp._tensor_reads import TensorTarget, boxes_of_range, bytes_of

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def parts(draw):
    shape = draw(shapes)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, offsets, sizes


@given(shapes, st.data())
def test_boxes_of_a_range_hold_each_of_its_elements_once(shape, data):
    total = torch.Size(shape).numel()
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = torch.arange(total).reshape(shape)
    found = [
        numbers[tuple(slice(*span) for span in box)].reshape(-1) for box in boxes_of_range(shape, start, stop)
    ]
    assert [int(n) for n in itertools.chain(*found)] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)
@given(parts(), st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]), st.data())
def test_windows_in_any_order_fill_exactly_the_part(part, dtype, data):
    shape, offsets, sizes = part
    chunk = torch.randint(0, 2, shape).to(dtype)
    target = torch.full(sizes, 7).to(dtype)
    into = TensorTarget(shape=shape, dtype=dtype, offsets=offsets, tensor=target)
    content = bytes_of(chunk)
    elements = len(content) // dtype.itemsize
    cuts = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=4))})
    windows = [(a * dtype.itemsize, b * dtype.itemsize) for a, b in itertools.pairwise(cuts)]
    for start, stop in data.draw(st.permutations(windows)):
        into.fill(start, content[start:stop])
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        chunk = chunk.narrow(dim, offset, size)
    assert torch.equal(target, chunk)


@given(parts())
def test_the_byte_range_is_all_that_is_needed(part):
    shape, offsets, sizes = part
    chunk = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    target = torch.full(sizes, -1, dtype=torch.int32)
    into = TensorTarget(shape=shape, dtype=torch.int32, offsets=offsets, tensor=target)
    start, stop = into.byte_range
    into.fill(start, bytes_of(chunk)[start:stop])
    assert int(target.reshape(-1)[0]) * 4 == start
    assert int(target.reshape(-1)[-1]) * 4 + 4 == stop
    assert (target >= 0).all()


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "is_run"),
    [
        ((8, 4), (2, 0), (3, 4), True),
        ((8, 4), (0, 1), (8, 2), False),
        ((8, 4), (5, 1), (1, 2), True),
        ((), (), (), True),
        ((3, 0), (1, 0), (2, 0), True),
    ],
    ids=["rows", "columns", "within a row", "0-d", "empty"],
)
def test_a_run_of_the_payload_can_be_read_straight_into_place(shape, offsets, sizes, is_run):
    target = torch.zeros(sizes, dtype=torch.bfloat16)
    into = TensorTarget(shape=shape, dtype=torch.bfloat16, offsets=offsets, tensor=target)
    start, stop = into.byte_range
    assert (into.memory is not None) == is_run
    if into.memory is not None:
        assert len(into.memory) == stop - start == target.nbytes


def test_other_layouts_and_dtypes_are_not_read_straight_into_place_but_copied():
    chunk = torch.arange(12.0).reshape(3, 4)
    for target in (torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64)):
        into = TensorTarget(shape=(3, 4), dtype=torch.float32, offsets=(0, 0), tensor=target)
        assert into.memory is None
        into.fill(0, bytes_of(chunk))
        assert torch.equal(target.float(), chunk)
