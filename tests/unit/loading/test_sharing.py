from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_core.loading.sharing import Schedule, StoredTensor, make_schedule
from ckpt_core.loading.sharing._layouts import placed_boxes
from tests.unit.loading import sharing
from tests.unit.loading.sharing import Layout, stored, whole

CELL, BUCKET, BLOCK = 64, 256, 32
MAX_DIMS = 3

placements = st.one_of(st.just(Replicate()), st.integers(0, MAX_DIMS - 1).map(Shard))


@st.composite
def layouts(draw, world: int, dims: int) -> Layout:
    """A mesh of `world` ranks and placements that a tensor of so many dimensions can have."""
    first = draw(st.sampled_from([each for each in range(1, world + 1) if world % each == 0]))
    found = draw(st.tuples(placements, placements))
    fitting = tuple(Replicate() if isinstance(p, Shard) and p.dim >= dims else p for p in found)
    return Layout(mesh=(first, world // first), placements=fitting)


@st.composite
def checkpoints(draw) -> tuple[int, list[StoredTensor]]:
    """A number of ranks, and tensors on them that were stored by another number of ranks."""
    world, writers = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 12), max_size=MAX_DIMS))
        tensors.append(
            stored(
                f"tensor {number}",
                shape,
                live=draw(layouts(world, len(shape))),
                saved=draw(layouts(writers, len(shape))),
                itemsize=draw(st.sampled_from([1, 2, 8])),
                block_bytes=draw(st.sampled_from([None, BLOCK])),
                scattered=draw(st.booleans()),
            )
        )
    return world, tensors


def plan(tensors: list[StoredTensor], world: int) -> list[Schedule]:
    return [make_schedule(tensors, rank, cell_bytes=CELL, bucket_bytes=BUCKET) for rank in range(world)]


def total(schedules: list[Schedule]) -> int:
    return sum(schedule.consistency for schedule in schedules) % 2**64


@given(checkpoints())
def test_every_needed_byte_comes_to_every_rank_exactly_once(made):
    world, tensors = made
    for schedule in plan(tensors, world):
        counts = sharing.count(sharing.given(schedule))
        assert all(each.max() == 1 for each in counts.values())
        for tensor in tensors:
            for row, mask in sharing.needed(tensor, schedule.rank).items():
                assert (counts[tensor.name, tensor.payload(row).path][mask] == 1).all()


@given(checkpoints())
def test_every_byte_is_read_by_one_rank_only(made):
    world, tensors = made
    schedules = plan(tensors, world)
    read = sharing.count(cell for schedule in schedules for cell in schedule.own_cells())
    came = sharing.count(cell for schedule in schedules for cell in sharing.given(schedule))
    assert read.keys() == came.keys()
    for key, times in read.items():
        assert times.max() == 1
        assert ((times > 0) == (came[key] > 0)).all()


@given(checkpoints())
def test_all_ranks_agree_and_never_wait_for_each_other_in_a_circle(made):
    world, tensors = made
    schedules = plan(tensors, world)
    assert total(schedules) == 0
    assert sharing.all_done(schedules)


@given(checkpoints())
def test_what_is_private_is_needed_by_nobody_else(made):
    world, tensors = made
    schedules = plan(tensors, world)
    for schedule in schedules:
        own = sharing.count(schedule.private)
        for other in schedules:
            if other is schedule:
                continue
            theirs = sharing.count(sharing.given(other))
            assert not any((own[key] & theirs[key]).any() for key in own.keys() & theirs.keys())


@given(checkpoints())
def test_buckets_are_bounded_and_made_of_cells_of_one_owner(made):
    world, tensors = made
    for schedule in plan(tensors, world):
        for bucket in schedule.buckets:
            assert schedule.rank in bucket.members
            assert bucket.owner in bucket.members
            assert sorted(bucket.route()) == list(bucket.members)
            assert bucket.route()[0] == bucket.owner
            assert bucket.num_bytes <= BUCKET
            places = list(bucket.places())
            assert [cell for cell, _, _ in places] == list(bucket.cells)
            assert all(start % 64 == 0 and stop - start <= CELL for _, start, stop in places)
            assert all(stop <= start for (_, _, stop), (_, start, _) in pairwise(places))
            assert places[-1][2] <= bucket.num_bytes


@given(st.data())
def test_the_order_in_which_tensors_are_named_does_not_matter(data):
    world, tensors = data.draw(checkpoints())
    other = data.draw(st.permutations(tensors))
    for usual, turned in zip(plan(tensors, world), plan(other, world), strict=True):
        assert sharing.contents(usual) == sharing.contents(turned)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(2, 9))
def test_replicas_read_about_the_same_number_of_bytes_each(sizes, world):
    tensors = [
        stored(f"t{number}", (size,), live=whole(world), saved=whole(1), itemsize=1, block_bytes=BLOCK)
        for number, size in enumerate(sizes)
    ]
    for schedule in plan(tensors, world):
        assert not schedule.private
        own = sum(cell.stop - cell.start for cell in schedule.own_cells())
        assert abs(own - sum(sizes) / world) <= CELL


def test_ranks_read_at_the_same_time_not_one_after_the_other():
    tensors = [stored("t", (4 * 10 * BUCKET,), live=whole(4), saved=whole(1), itemsize=1, block_bytes=BLOCK)]
    owners = [bucket.owner for bucket in plan(tensors, 4)[0].buckets]
    assert owners == [0, 1, 2, 3] * 10


@given(st.data())
def test_ranks_that_differ_in_what_they_share_are_found_out(data):
    world, tensors = data.draw(checkpoints())
    odd = data.draw(st.integers(0, world - 1))
    left_out = data.draw(st.integers(0, len(tensors) - 1))
    schedules = plan(tensors, world)
    others = [tensor for number, tensor in enumerate(tensors) if number != left_out]
    changed = plan(others, world)[odd]
    assume(sharing.contents(changed) != sharing.contents(schedules[odd]))
    schedules[odd] = changed
    assert total(schedules) != 0


@pytest.mark.parametrize(
    "odd",
    [
        stored("t", (100,), live=whole(2), saved=whole(1), block_bytes=BLOCK),
        stored("u", (120,), live=whole(2), saved=whole(1), block_bytes=BLOCK),
        stored(
            "t", (120,), live=whole(2), saved=Layout(mesh=(2,), placements=(Shard(0),)), block_bytes=BLOCK
        ),
        stored("t", (120,), live=whole(2), saved=whole(1), itemsize=2, block_bytes=BLOCK),
        stored("t", (120,), live=whole(3), saved=whole(1), block_bytes=BLOCK),
        stored(
            "t", (120,), live=Layout(mesh=(2,), placements=(Shard(0),)), saved=whole(1), block_bytes=BLOCK
        ),
    ],
    ids=["shape", "name", "chunks", "itemsize", "members", "placement"],
)
def test_a_rank_with_another_idea_of_a_tensor_is_found_out(odd):
    usual = stored("t", (120,), live=whole(2), saved=whole(1), block_bytes=BLOCK)
    first, second = plan([usual], 2)
    assert total([first, second]) == 0
    assert total([first, plan([odd], 2)[1]]) != 0
    assert total([plan([odd], 2)[0], second]) != 0


def test_what_is_verified_as_a_whole_is_read_as_a_whole_by_one_rank():
    live = Layout(mesh=(3,), placements=(Shard(0),))
    tensor = stored("t", (1000,), live=live, saved=whole(1), itemsize=1, block_bytes=None)
    schedules = plan([tensor], 3)
    (read,) = (cell for schedule in schedules for cell in schedule.own_cells())
    assert (read.start, read.stop) == (0, 1000)
    for schedule in schedules:
        assert {bucket.members for bucket in schedule.buckets} == {(0, 1, 2)}
        assert len({bucket.owner for bucket in schedule.buckets}) == 1


def test_cells_are_cut_at_blocks_so_that_each_can_be_verified_alone():
    tensor = stored("t", (1000,), live=whole(2), saved=whole(1), itemsize=1, block_bytes=24)
    cells = [cell for bucket in plan([tensor], 2)[0].buckets for cell in bucket.cells]
    assert {cell.start % 24 for cell in cells} == {0}
    assert max(cell.stop - cell.start for cell in cells) == 48


def test_a_payload_of_another_size_than_its_chunk_is_refused():
    tensor = stored("t", (10,), live=whole(2), saved=whole(1))
    wrong = replace(tensor.payload(0), size_bytes=39)
    with pytest.raises(ValueError, match=r"t: the payload of t in __0_0.distcp has 39 bytes, .* takes 40"):
        plan([replace(tensor, payload=lambda _: wrong)], 2)


mixed = st.one_of(
    placements, st.builds(_StridedShard, st.integers(0, MAX_DIMS - 1), split_factor=st.integers(1, 4))
)


@given(
    st.lists(st.integers(0, 13), min_size=MAX_DIMS, max_size=MAX_DIMS),
    st.lists(st.tuples(st.integers(1, 4), mixed), min_size=1, max_size=3),
)
def test_boxes_are_those_that_torch_gives_each_rank_by_itself(shape, mesh_and_placements):
    mesh = tuple(size for size, _ in mesh_and_placements)
    placed = [placement for _, placement in mesh_and_placements]
    boxes = placed_boxes(shape, np.arange(np.prod(mesh)).reshape(mesh), placed)
    if boxes is None:  # some rank's shard is no box: torch can only tell where it begins
        assert any(isinstance(placement, _StridedShard) for placement in placed)
        return
    for place, coordinate in enumerate(np.ndindex(mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placed)
        assert tuple(boxes.hi[place] - boxes.lo[place]) == sizes
        if all(sizes):
            assert tuple(boxes.lo[place]) == offsets


@pytest.mark.parametrize(("width", "told"), [(8, True), (10, True), (7, True), (9, True)])
def test_a_comb_that_a_second_cut_makes_whole_is_told(width, told):
    """FSDP2 over tensor parallelism of 2: first a comb over the data ranks, then a cut."""
    comb = [_StridedShard(0, split_factor=2), Shard(0)]
    assert (placed_boxes((width,), np.arange(4).reshape(2, 2), comb) is not None) is told
    assert placed_boxes((width,), np.arange(4), comb[:1]) is None


def test_sums_that_have_not_been_made_have_no_boxes():
    assert placed_boxes((4,), np.arange(2), [Partial()]) is None
