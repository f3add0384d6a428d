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

from ckpt_core.errors import ConfigError
from tests.unit.dcp.plans import Item, decided, value

Box = tuple[tuple[int, ...], tuple[int, ...]]
Chunks = list[Box]


def shard(name: str, box: Box, size: tuple[int, ...], dtype: str = "float32") -> Item:
    return Item(name, *box, size, dtype)


def chunks(ranks: list[list[Item]], name: str) -> Chunks:
    """The boxes of a tensor, as the index has them."""
    index = decided(ranks).planned.index
    boxes = index.entries[index.names.index(name)].boxes
    return [(tuple(a), tuple(b)) for a, b in zip(boxes.starts.tolist(), boxes.sizes.tolist(), strict=True)]


def of_dcp(ranks: list[list[Item]]):
    """What DCP's own planner makes of the same items."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    plans = [SavePlan([stock(item) for item in items], planner_data={}) for items in ranks]
    return planner.create_global_plan(plans)[1].state_dict_metadata


def stock(item: Item) -> WriteItem:
    if item.start is None:
        return WriteItem(index=MetadataIndex(item.name), type=WriteItemType.BYTE_IO)
    offsets, lengths = torch.Size(item.start), torch.Size(item.sizes)
    return WriteItem(
        index=MetadataIndex(item.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, lengths),
            properties=TensorProperties(dtype=getattr(torch, item.dtype)),
            size=torch.Size(item.shape),
        ),
    )


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut into a grid of boxes."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))}) for length in size]
    cells = product(*(list(pairwise(each)) for each in cuts))
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return tuple(size), draw(st.permutations(boxes))


@given(grids())
def test_the_index_is_what_dcp_would_make(grid):
    size, boxes = grid
    ranks = [[shard("w", box, size)] for box in boxes] + [[value("n")]]
    reference = of_dcp(ranks)
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in reference["w"].chunks] == chunks(
        ranks, "w"
    )
    index = decided(ranks).planned.index
    assert index.names == list(reference)
    assert index.entries[-1] is None
    assert index.entries[0].size == tuple(reference["w"].size)
    assert index.entries[0].properties == ("float32", "torch.strided", False, 0, False)


@given(grids(), st.data())
def test_what_dcp_refuses_is_refused(grid, data):
    size, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets, lengths = boxes[at]
    change = data.draw(st.sampled_from(["drop", "move", "grow"]))
    dim = data.draw(st.integers(0, len(size) - 1))
    moved = tuple(o + (d == dim) for d, o in enumerate(offsets))
    grown = tuple(n + (d == dim) for d, n in enumerate(lengths))
    changed = {"drop": [], "move": [(moved, lengths)], "grow": [(offsets, grown)]}
    ranks = [[shard("w", box, size)] for box in [*boxes[:at], *changed[change], *boxes[at + 1 :]]] + [[], []]
    if ranks[0]:
        # Where a moved shard begins as another one, they are replicas that are not alike.
        with pytest.raises(
            (ValueError, ConfigError), match=r"the shards do not make up the state: .*w|has .* as w"
        ):
            decided(ranks)


def test_a_refusal_names_every_tensor_up_to_five():
    half = [shard(f"w{at}", ((0,), (2,)), (4,)) for at in range(7)]
    with pytest.raises(
        ValueError, match=r"'w0' have 2 of its 4 .*'w4' have 2 of its 4 elements, and 2 more$"
    ):
        decided([half])


def test_shards_of_different_tensors_under_one_name_are_refused():
    halves = [((0,), (2,)), ((2,), (2,))]
    for other in (shard("w", halves[1], (4,), "float16"), shard("w", halves[1], (5,)), value("w")):
        ranks = [[shard("w", halves[0], (4,))], [other]]
        for each in (ranks, ranks[::-1]):
            with pytest.raises(ValueError, match=r"w is .* on one rank and .* on another"):
                decided(each)


def test_boxes_that_only_touch_do_not_overlap():
    boxes = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2))]
    assert chunks([[shard("w", box, (2, 3))] for box in boxes], "w") == boxes


def test_overlaps_are_found_where_the_volume_is_right():
    boxes = [((0, 0), (1, 2)), ((0, 1), (1, 2)), ((1, 0), (1, 2))]
    with pytest.raises(ValueError, match=r"chunks of 'w' .* overlap"):
        decided([[shard("w", box, (2, 3))] for box in boxes])
