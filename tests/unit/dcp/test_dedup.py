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

from ckpt_core.dcp import Part, decide
from ckpt_core.dcp._decide import ENTRY_BYTES
from ckpt_core.errors import ConfigError
from tests.unit.dcp.plans import Item, decided, names, shard, value, whole, written

LARGE = 1 << 20
Ranks = list[list[Item]]


def loads(ranks: Iterable[Sequence[Item]]) -> list[int]:
    return [sum(item.size_bytes for item in items) for items in ranks]


@st.composite
def worlds(draw: st.DrawFn) -> Ranks:
    """Ranks with replicated, sharded and partly replicated entries in any order, some of which they lack."""
    ranks = draw(st.integers(1, 6))
    items: Ranks = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 12))):
        groups = draw(st.integers(1, ranks))
        bounds = [
            0,
            *sorted(draw(st.lists(st.integers(0, 99_999), min_size=groups - 1, max_size=groups - 1))),
        ]
        bounds.append(100_000)
        dtype = draw(st.sampled_from(["uint8", "float32", "complex128"]))
        lacking = draw(st.sets(st.integers(0, ranks - 1)))
        for rank in sorted({*range(ranks)} - lacking):
            start, end = bounds[rank % groups : rank % groups + 2]
            if groups == 1 and number % 5 == 4:
                items[rank].append(value(f"v{number}"))
            elif start < end:  # an empty shard has a place of its own in DTensor's eyes: the end
                items[rank].append(shard(f"t{number}", start, end - start, of=100_000, dtype=dtype))
    held = {(item.name, item.start) for own in items for item in own}
    starts = {name: sorted(start for of, start in held if of == name and start) for name, _ in held}
    whole = {name for name, found in starts.items() if covers(found, items, name)}
    return [draw(st.permutations([item for item in own if item.name in whole])) for own in items]


def covers(starts: Sequence[tuple[int, ...]], items: Ranks, name: str) -> bool:
    """Whether ranks hold all of a tensor, or it is a plain value."""
    lengths = {item.start: item.sizes[0] for own in items for item in own if item.name == name and item.sizes}
    return not starts or sum(lengths[start] for start in starts) == 100_000


@given(worlds(), st.sets(st.integers(0, 11)))
def test_every_chunk_is_written_exactly_once_by_one_that_holds_it(ranks, numbers):
    uneven = {f"{kind}{number}" for kind in "tv" for number in numbers}
    kept = written(ranks, uneven)
    found = Counter((item.name, item.start) for items in kept for item in items)
    assert set(found) == {(item.name, item.start) for items in ranks for item in items}
    assert set(found.values()) <= {1}
    for before, after in zip(ranks, kept, strict=True):
        own = iter(before)
        assert all(any(item is other for other in own) for item in after)  # its own items, in order


@given(worlds(), st.sets(st.integers(0, 11)))
def test_what_may_be_uneven_is_written_by_the_lowest_rank_that_has_it(ranks, numbers):
    uneven = {f"t{number}" for number in numbers}
    for rank, items in enumerate(written(ranks, uneven)):
        lower = {(item.name, item.start) for other in ranks[:rank] for item in other}
        assert not [item for item in items if item.name in uneven and (item.name, item.start) in lower]


@given(worlds())
def test_no_rank_could_pass_its_last_shared_chunk_to_one_with_less_to_write(ranks):
    kept = written(ranks)
    total = loads(kept)
    for rank, items in enumerate(kept):
        shared = [(item, holders(ranks, item)) for item in items if len(holders(ranks, item)) > 1]
        if not shared:
            continue
        # Largest first: the smallest one came last, when all the rest of this rank was there already.
        least = min(item.size_bytes for item, _ in shared)
        last = [of_item for item, of_item in shared if item.size_bytes == least]
        assert any(total[rank] - least <= min(total[other] for other in of_item) for of_item in last)


@given(st.integers(1, 3), st.lists(st.integers(0, LARGE), max_size=7))
def test_replicas_are_within_a_third_of_the_best_balance_that_there_is(ranks, sizes):
    everybody = [whole(f"w{number}", size) for number, size in enumerate(sizes)]
    largest = max(loads(written([everybody] * ranks)))
    best = min(max(shared_out(ranks, sizes, writers)) for writers in product(range(ranks), repeat=len(sizes)))
    assert largest <= best * (4 / 3 - 1 / (3 * ranks))  # Graham 1969, of largest first


def shared_out(ranks: int, sizes: Sequence[int], writers: Sequence[int]) -> list[int]:
    total = [0] * ranks
    for size, rank in zip(sizes, writers, strict=True):
        total[rank] += size + ENTRY_BYTES
    return total


@given(st.integers(1, 64), st.lists(st.integers(0, LARGE), max_size=200))
def test_replicas_leave_no_rank_further_above_the_mean_than_its_smallest_chunk(ranks, sizes):
    everybody = [whole(f"w{number}", size) for number, size in enumerate(sizes)]
    kept = written([everybody] * ranks)
    for items, total in zip(kept, loads(kept), strict=True):
        smallest = min((item.size_bytes for item in items), default=0)
        assert total * ranks <= sum(loads(kept)) + smallest * (ranks - 1)


def holders(ranks: Sequence[Sequence[Item]], item: Item) -> list[int]:
    own = item.name, item.start
    return [rank for rank, items in enumerate(ranks) if own in [(each.name, each.start) for each in items]]


def test_the_bytes_of_the_chunk_count_and_not_those_of_the_whole_tensor():
    # Rank 0 holds a small piece of a huge tensor; by that tensor's size it would have enough to do.
    pieces = shard("huge", 0, 10, of=1 << 40), shard("huge", 10, (1 << 40) - 10, of=1 << 40)
    shared = [whole("a", 1000), whole("b", 1000)]
    kept = written([[pieces[0], *shared], [pieces[1]], shared])
    assert names(kept) == [["huge", "b"], ["huge"], ["a"]]


def test_wide_dtypes_weigh_more_than_narrow_ones():
    narrow, wide = whole("narrow", 100_000), whole("wide", 60_000, dtype="float64")
    third = whole("third", 90_000, dtype="float32")
    assert names(written([[narrow, third, wide]] * 2)) == [["wide"], ["narrow", "third"]]


def test_what_a_rank_must_write_anyhow_counts_before_it_is_given_more():
    own = shard("sharded", 0, 50_000, of=100_000), shard("sharded", 50_000, 50_000, of=100_000)
    uneven = whole("stats", 40_000)
    shared = [whole(f"w{number}", 10_000) for number in range(4)]
    kept = written([[own[0], uneven, *shared], [own[1], uneven, *shared]], {"stats"})
    assert names(kept) == [["sharded", "stats"], ["sharded", "w0", "w1", "w2", "w3"]]


def test_a_large_tensor_at_the_end_does_not_land_on_top_of_an_even_load():
    items = [*(whole(f"w{number}", 100_000) for number in range(4)), whole("head", 400_000)]
    assert sorted(loads(written([items] * 2))) == [
        400_000 + ENTRY_BYTES,
        400_000 + 4 * ENTRY_BYTES,
    ]


def test_hybrid_shards_are_shared_out_within_their_group_of_replicas():
    def of_rank(rank: int) -> list[Item]:
        start = (rank % 2) * 500_000
        sharded = [shard(f"t{number}", start, 500_000, of=1_000_000) for number in range(4)]
        return [*sharded, whole("step", 4)]

    kept = written([of_rank(rank) for rank in range(4)])
    assert [len([n for n in each if n != "step"]) for each in names(kept)] == [2, 2, 2, 2]
    assert sum(each.count("step") for each in names(kept)) == 1


def test_byte_entries_are_shared_out_too():
    kept = written([[value(f"v{number}") for number in range(6)]] * 3)
    assert [len(each) for each in names(kept)] == [2, 2, 2]


def test_ranks_that_lack_a_part_are_left_without_and_keep_their_place():
    kept = written([[], [whole("w", 10)], [], [whole("w", 10)]])
    assert names(kept) == [[], ["w"], [], []]


def test_empty_shards_of_several_ranks_are_written_once_beside_the_full_ones():
    # DTensor gives every empty shard the same place, the end.
    ranks = [(0, 2), (2, 1), (3, 0), (3, 0)]
    kept = written([[shard("bias", start, length, of=3)] for start, length in ranks])
    assert names(kept) == [["bias"], ["bias"], ["bias"], []]


def test_without_replicas_every_rank_writes_all_it_has():
    plans = [[shard("w", rank * 5, 5, of=15)] for rank in range(3)]
    assert [task.share for task in decided(plans).tasks] == [None] * 3
    assert decide([]).tasks == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (whole("w", 9), r"uint8 \(9,\) as w, rank 0 uint8 \(8,\)"),
        (whole("w", 8, dtype="int8"), r"int8 \(8,\) as w, rank 0 uint8 \(8,\)"),
        (shard("w", 0, 5, of=8), r"uint8 \(8,\), of which it holds \(5,\) as w, rank 0 uint8 \(8,\)"),
    ],
    ids=["shape", "dtype", "piece"],
)
def test_replicas_that_are_not_alike_are_refused_and_not_written_by_chance(other, told):
    with pytest.raises(ConfigError, match=f"rank 2 has {told}"):
        written([[whole("w", 8)], [whole("w", 8)], [other]])


def test_replicas_that_may_be_uneven_may_be_of_another_shape():
    assert names(written([[], [whole("w", 8)], [whole("w", 9)]], {"w"})) == [[], ["w"], []]


def test_the_life_cycle_shares_out_by_bytes():
    tree = {"small": [torch.zeros(10_000) for _ in range(4)], "large": torch.zeros(40_000)}
    part = Part()
    part.update(tree)
    tasks = decide([part.local_plan() for _ in range(2)]).tasks
    assert [list(task.places(5)) for task in tasks] == [[4], [0, 1, 2, 3]]


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
    return names(written([items] * 5, {"w7"}))
