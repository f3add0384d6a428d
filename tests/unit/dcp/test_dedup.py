"""Of what several ranks hold one writes, and all write about as much."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckpt_core.dcp import Part, decide
from ckpt_core.dcp._dedup import ENTRY_BYTES
from ckpt_core.dcp._dedup import assign_writers as divide
from ckpt_core.errors import ConfigError

LARGE = 1 << 20


def assign_writers(plans: Sequence[SavePlan], uneven: Iterable[str]) -> list[SavePlan]:
    return divide(plans, frozenset(uneven)).plans


def shard(
    name: str, start: int, length: int, *, of: int, dtype: torch.dtype = torch.uint8, hint: int | None = None
) -> WriteItem:
    """Elements [start, start + length) of a one-dimensional tensor of `of` elements."""
    return WriteItem(
        index=MetadataIndex(name, (start,), hint),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size((start,)), torch.Size((length,))),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size((of,)),
        ),
    )


def whole(name: str, length: int, *, dtype: torch.dtype = torch.uint8) -> WriteItem:
    return shard(name, 0, length, of=length, dtype=dtype)


def value(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def plan(*items: WriteItem) -> SavePlan:
    return SavePlan(list(items), planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return ENTRY_BYTES + (data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0)


def loads(plans: Iterable[SavePlan]) -> list[int]:
    return [sum(map(size_bytes, each.items)) for each in plans]


def names(plans: Iterable[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in each.items] for each in plans]


def stock(plans: Sequence[SavePlan]):
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    return planner.create_global_plan(list(plans))


@st.composite
def worlds(draw: st.DrawFn) -> list[SavePlan]:
    """Ranks with replicated, sharded and partly replicated entries in any order, some of which they lack."""
    ranks = draw(st.integers(1, 6))
    items: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 12))):
        groups = draw(st.integers(1, ranks))
        bounds = [
            0,
            *sorted(draw(st.lists(st.integers(0, 99_999), min_size=groups - 1, max_size=groups - 1))),
        ]
        bounds.append(100_000)
        dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.complex128]))
        lacking = draw(st.sets(st.integers(0, ranks - 1)))
        for rank in sorted({*range(ranks)} - lacking):
            start, end = bounds[rank % groups : rank % groups + 2]
            if groups == 1 and number % 5 == 4:
                items[rank].append(value(f"v{number}"))
            elif start < end:  # an empty shard has a place of its own in DTensor's eyes: the end
                item = shard(f"t{number}", start, end - start, of=100_000, dtype=dtype, hint=rank or None)
                items[rank].append(item)
    return [plan(*draw(st.permutations(each))) for each in items]


@given(worlds(), st.sets(st.integers(0, 11)))
def test_every_chunk_is_written_exactly_once_by_one_that_holds_it(plans, numbers):
    uneven = {f"{kind}{number}" for kind in "tv" for number in numbers}
    held = [list(each.items) for each in plans]
    kept = assign_writers(plans, uneven)
    written = Counter(item.index for each in kept for item in each.items)
    assert set(written) == {item.index for each in plans for item in each.items}
    assert set(written.values()) <= {1}
    for before, after in zip(plans, kept, strict=True):
        own = iter(before.items)
        assert all(any(item is other for other in own) for item in after.items)  # its own items, in order
        assert after.planner_data == before.planner_data
    assert held == [each.items for each in plans]


@given(worlds(), st.sets(st.integers(0, 11)))
def test_what_may_be_uneven_is_written_by_the_lowest_rank_that_has_it(plans, numbers):
    uneven = {f"t{number}" for number in numbers}
    kept = assign_writers(plans, uneven)
    for rank, each in enumerate(kept):
        lower = {item.index for other in plans[:rank] for item in other.items}
        assert not [item for item in each.items if item.index.fqn in uneven and item.index in lower]


@given(worlds())
def test_no_rank_could_pass_its_last_shared_chunk_to_one_with_less_to_write(plans):
    kept = assign_writers(plans, ())
    total = loads(kept)
    for rank, each in enumerate(kept):
        shared = [(item, holders(plans, item)) for item in each.items if len(holders(plans, item)) > 1]
        if not shared:
            continue
        # Largest first: the smallest one came last, when all the rest of this rank was there already.
        least = min(size_bytes(item) for item, _ in shared)
        last = [of_item for item, of_item in shared if size_bytes(item) == least]
        assert any(total[rank] - least <= min(total[other] for other in of_item) for of_item in last)


@given(st.integers(1, 3), st.lists(st.integers(0, LARGE), max_size=7))
def test_replicas_are_within_a_third_of_the_best_balance_that_there_is(ranks, sizes):
    everybody = plan(*(whole(f"w{number}", size) for number, size in enumerate(sizes)))
    written = max(loads(assign_writers([everybody] * ranks, ())))
    best = min(max(shared_out(ranks, sizes, writers)) for writers in product(range(ranks), repeat=len(sizes)))
    assert written <= best * (4 / 3 - 1 / (3 * ranks))  # Graham 1969, of largest first


def shared_out(ranks: int, sizes: Sequence[int], writers: Sequence[int]) -> list[int]:
    total = [0] * ranks
    for size, rank in zip(sizes, writers, strict=True):
        total[rank] += size + ENTRY_BYTES
    return total


@given(st.integers(1, 64), st.lists(st.integers(0, LARGE), max_size=200))
def test_replicas_leave_no_rank_further_above_the_mean_than_its_smallest_chunk(ranks, sizes):
    everybody = plan(*(whole(f"w{number}", size) for number, size in enumerate(sizes)))
    kept = assign_writers([everybody] * ranks, ())
    for each, total in zip(kept, loads(kept), strict=True):
        smallest = min(map(size_bytes, each.items), default=0)
        assert total * ranks <= sum(loads(kept)) + smallest * (ranks - 1)


def holders(plans: Sequence[SavePlan], item: WriteItem) -> list[int]:
    return [rank for rank, each in enumerate(plans) if any(item.index == other.index for other in each.items)]


def test_the_bytes_of_the_chunk_count_and_not_those_of_the_whole_tensor():
    # Rank 0 alone holds a small piece of a huge tensor; by that tensor's size it would have enough to do.
    piece = shard("huge", 0, 10, of=1 << 40)
    shared = [whole("a", 1000), whole("b", 1000)]
    kept = assign_writers([plan(piece, *shared), plan(*shared)], ())
    assert names(kept) == [["huge", "b"], ["a"]]


def test_wide_dtypes_weigh_more_than_narrow_ones():
    narrow, wide = whole("narrow", 100_000), whole("wide", 60_000, dtype=torch.float64)
    third = whole("third", 90_000, dtype=torch.float32)
    assert names(assign_writers([plan(narrow, third, wide)] * 2, ())) == [["wide"], ["narrow", "third"]]


def test_what_a_rank_must_write_anyhow_counts_before_it_is_given_more():
    own = shard("sharded", 0, 50_000, of=100_000), shard("sharded", 50_000, 50_000, of=100_000)
    uneven = whole("stats", 40_000)
    shared = [whole(f"w{number}", 10_000) for number in range(4)]
    kept = assign_writers([plan(own[0], uneven, *shared), plan(own[1], uneven, *shared)], {"stats"})
    assert names(kept) == [["sharded", "stats"], ["sharded", "w0", "w1", "w2", "w3"]]


def test_a_large_tensor_at_the_end_does_not_land_on_top_of_an_even_load():
    items = [*(whole(f"w{number}", 100_000) for number in range(4)), whole("head", 400_000)]
    assert sorted(loads(assign_writers([plan(*items)] * 2, ()))) == [
        400_000 + ENTRY_BYTES,
        400_000 + 4 * ENTRY_BYTES,
    ]


def test_hybrid_shards_are_shared_out_within_their_group_of_replicas():
    def of_rank(rank: int) -> SavePlan:
        start = (rank % 2) * 500_000
        sharded = [shard(f"t{number}", start, 500_000, of=1_000_000) for number in range(4)]
        return plan(*sharded, whole("step", 4))

    kept = assign_writers([of_rank(rank) for rank in range(4)], ())
    assert [len([n for n in each if n != "step"]) for each in names(kept)] == [2, 2, 2, 2]
    assert sum(each.count("step") for each in names(kept)) == 1


def test_byte_entries_are_shared_out_too():
    kept = assign_writers([plan(*(value(f"v{number}") for number in range(6)))] * 3, ())
    assert [len(each) for each in names(kept)] == [2, 2, 2]


def test_ranks_that_lack_a_part_are_left_without_and_keep_their_place():
    kept = assign_writers([plan(), plan(whole("w", 10)), plan(), plan(whole("w", 10))], ())
    assert names(kept) == [[], ["w"], [], []]


def test_empty_shards_of_several_ranks_are_written_once_beside_the_full_ones():
    # DTensor gives every empty shard the same place, the end.
    ranks = [(0, 2), (2, 1), (3, 0), (3, 0)]
    kept = assign_writers([plan(shard("bias", start, length, of=3)) for start, length in ranks], ())
    assert names(kept) == [["bias"], ["bias"], ["bias"], []]


def test_equal_entries_with_other_hints_are_one_chunk():
    hinted = [plan(shard("w", 0, 8, of=8, hint=hint)) for hint in (None, 0, 7)]
    kept = assign_writers(hinted, ())
    assert names(kept) == [["w"], [], []]
    assert kept[0].items[0].index.index is None


def test_plans_without_replicas_are_returned_as_they_are():
    plans = [plan(shard("w", rank * 5, 5, of=15)) for rank in range(3)]
    assert all(after is before for after, before in zip(assign_writers(plans, ()), plans, strict=True))
    assert assign_writers([], ()) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (whole("w", 9), r"uint8 \(9,\) as w, rank 0 uint8 \(8,\)"),
        (whole("w", 8, dtype=torch.int8), r"int8 \(8,\) as w, rank 0 uint8 \(8,\)"),
        (shard("w", 0, 5, of=8), r"uint8 \(8,\), of which it holds \(5,\) as w, rank 0 uint8 \(8,\)"),
    ],
    ids=["shape", "dtype", "piece"],
)
def test_replicas_that_are_not_alike_are_refused_and_not_written_by_chance(other, told):
    plans = [plan(whole("w", 8)), plan(whole("w", 8)), plan(other)]
    with pytest.raises(ConfigError, match=f"rank 2 has {told}"):
        assign_writers(plans, ())


def test_replicas_that_may_be_uneven_may_be_of_another_shape():
    assert names(assign_writers([plan(), plan(whole("w", 8)), plan(whole("w", 9))], {"w"})) == [[], ["w"], []]


def test_dcp_finds_nothing_left_to_choose_and_describes_all_of_it():
    plans = [
        plan(
            shard("sharded", (rank % 2) * 10, 10, of=20, hint=rank),
            *(whole(f"w{number}", 100 * number) for number in range(5)),
            value("n"),
        )
        for rank in range(4)
    ]
    kept = assign_writers(plans, {"w1"})
    final_plans, metadata = stock(kept)
    assert names(final_plans) == names(kept)
    assert set(metadata.state_dict_metadata) == {"sharded", "n", *(f"w{number}" for number in range(5))}
    entry = metadata.state_dict_metadata["sharded"]
    assert isinstance(entry, TensorStorageMetadata)
    assert sorted(chunk.offsets[0] for chunk in entry.chunks) == [0, 10]
    for each in final_plans:
        for item in each.items:
            if item.index.fqn == "sharded":  # the hint must find the chunk that the item is about
                assert entry.chunks[item.index.index].offsets == item.index.offset


def test_the_life_cycle_shares_out_by_bytes():
    tree = {"small": [torch.zeros(10_000) for _ in range(4)], "large": torch.zeros(40_000)}
    part = Part()
    part.update(tree)
    plans = [part.local_plan() for _ in range(2)]
    shares = [task.share for task in decide(plans).tasks]
    written = [
        [plan.items[at].index.fqn for at in share or ()] for plan, share in zip(plans, shares, strict=True)
    ]
    assert written == [["large"], [f"small.{number}" for number in range(4)]]


@pytest.mark.slow
def test_equal_plans_give_equal_results_in_every_process():
    """Here, and where the hashes of strings are others."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = subprocess.run(
        [sys.executable, "-c", "from tests.unit.dcp import test_dedup; print(test_dedup.many_assigned())"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there.strip() == str(many_assigned())
    assert "w39" in there


def many_assigned() -> list[list[str]]:
    items = [whole(f"w{n}", 1000 * (n % 3)) for n in range(40)] + [value(f"v{n}") for n in range(9)]
    return names(assign_writers([plan(*items)] * 5, {"w7"}))
