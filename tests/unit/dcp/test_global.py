"""DCP's own planner is the reference, here as in what stock `dcp.load` does with the result."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckpt_core.dcp._metadata import describe

Box = tuple[tuple[int, ...], tuple[int, ...]]


def shard(name: str, box: Box, size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WriteItem:
    offsets, lengths = map(torch.Size, box)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, lengths),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(size),
        ),
    )


def plan(*items: WriteItem) -> SavePlan:
    return SavePlan(list(items), planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def value(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut into a grid of boxes."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))}) for length in size]
    cells = product(*(list(pairwise(each)) for each in cuts))
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return tuple(size), draw(st.permutations(boxes))


def of_dcp(plans: list[SavePlan]):
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    return planner.create_global_plan(plans)[1]


@given(grids())
def test_the_metadata_is_what_dcp_would_make(grid):
    size, boxes = grid
    plans = [plan(shard("w", box, size)) for box in boxes] + [plan(value("n"))]
    own, reference = describe(plans), of_dcp(plans)
    assert own.state_dict_metadata == reference.state_dict_metadata
    assert own.planner_data == reference.planner_data


@given(grids(), st.data())
def test_what_dcp_refuses_is_refused(grid, data):
    size, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets, lengths = boxes[at]
    change = data.draw(st.sampled_from(["drop", "double", "move", "grow"]))
    dim = data.draw(st.integers(0, len(size) - 1))
    moved = tuple(o + (d == dim) for d, o in enumerate(offsets))
    grown = tuple(n + (d == dim) for d, n in enumerate(lengths))
    changed = {"drop": [], "double": [boxes[at]] * 2, "move": [(moved, lengths)], "grow": [(offsets, grown)]}
    plans = [plan(shard("w", box, size)) for box in [*boxes[:at], *changed[change], *boxes[at + 1 :]]]
    plans += [plan(), plan()]
    if plans[0].items:
        with pytest.raises(ValueError, match=r"the shards do not make up the state: .*w"):
            describe(plans)


def test_shards_of_different_tensors_under_one_name_are_refused():
    halves = [((0,), (2,)), ((2,), (2,))]
    for other in (shard("w", halves[1], (4,), torch.float16), shard("w", halves[1], (5,)), value("w")):
        plans = [plan(shard("w", halves[0], (4,))), plan(other)]
        for each in (plans, plans[::-1]):
            with pytest.raises(ValueError, match=r"w is .* on one rank and .* on another"):
                describe(each)


def test_boxes_that_only_touch_and_empty_ones_do_not_overlap():
    boxes = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2)), ((1, 1), (0, 2))]
    assert (
        len(describe([plan(shard("w", box, (2, 3))) for box in boxes]).state_dict_metadata["w"].chunks) == 4
    )


def test_overlaps_are_found_where_the_volume_is_right():
    boxes = [((0, 0), (1, 2)), ((0, 1), (1, 2)), ((1, 0), (1, 2))]
    with pytest.raises(ValueError, match=r"chunks of 'w' .* overlap"):
        describe([plan(shard("w", box, (2, 3))) for box in boxes])
