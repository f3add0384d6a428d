"""Every shape of state comes back bit for bit in a fresh process, or the save says no, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

import pytest

from tests.guarantees import loading_jobs
from tests.guarantees.loading_jobs import Seen
from tests.guarantees.state_shapes import PICKLED, REFUSED, REFUSED_SHARDED, SHAPES
from tests.kit.ranks import run_ranks
from tests.support.thorough import THOROUGH

RANKS = {"plain": 1, "ddp": 2, "fsdp2": 2}


def shapes_of(column: str) -> list[str]:
    """All shapes in one process; over two ranks every tenth with DDP, and every tenth other with FSDP2.

    Sharding changes what becomes of optimizers, so all of them are tried with it, and what becomes of a
    refusal; other models, buffers, items and schedulers it leaves alone. `THOROUGH=1` tries all with each.
    """
    if column == "plain" or THOROUGH:
        return list(SHAPES)
    some = set(list(SHAPES)[column == "ddp" :: 10])
    always = REFUSED.keys() | REFUSED_SHARDED.keys() | PICKLED.keys()
    return [
        name
        for name in SHAPES
        if name in always or name in some or (column == "fsdp2" and name.startswith("optimizer"))
    ]


TRIED = {column: shapes_of(column) for column in RANKS}
COLUMNS = [
    pytest.param("plain", marks=pytest.mark.slow),
    pytest.param("ddp", marks=pytest.mark.distributed),
    pytest.param("fsdp2", marks=pytest.mark.distributed),
]
CELLS = [
    pytest.param(*column.values, name, marks=column.marks, id=f"{column.values[0]}-{name}")
    for column in COLUMNS
    for name in TRIED[str(column.values[0])]
]

Found = tuple[list[dict[str, Seen]], list[dict[str, Seen]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[[str], Found]:
    """What each rank saw of the shapes of a column when it saved them, and when another loaded them."""

    @cache
    def of(column: str) -> Found:
        ranks, root = RANKS[column], str(tmp_path_factory.mktemp(column))
        options = {"timeout_seconds": 200, "process_group": ranks > 1}
        saved = run_ranks(loading_jobs.save_all, ranks, column, root, TRIED[column], **options)
        there = [shape for shape, seen in saved[0].items() if seen.state]
        return saved, run_ranks(loading_jobs.load_all, ranks, column, root, there, **options)

    return of


@pytest.mark.parametrize(("column", "shape"), CELLS)
def test_it_loads_bit_for_bit_in_a_fresh_process_or_the_save_says_no(found, column, shape):
    saved, loaded = found(column)
    refused = REFUSED | (REFUSED_SHARDED if column == "fsdp2" else {})
    for rank, seen in enumerate(each[shape] for each in saved):
        assert not seen.error, f"rank {rank}: {seen.error}"
        if seen.outside:
            pytest.skip(f"torch itself: {seen.outside}")
        assert bool(seen.refused) == (shape in refused), f"rank {rank}: {seen.refused or 'not refused'}"
        if shape in refused:
            assert re.search(refused[shape], seen.refused), seen.refused
            assert {each[shape].refused for each in saved} == {seen.refused}, (
                "ranks were told different things"
            )
            continue
        there = loaded[rank][shape]
        assert not there.error, f"rank {rank}: {there.error}"
        assert differing(there.state, seen.state) == {}
        assert differing(there.later, seen.later) == {}
        assert there.fresh != seen.state, "the fresh process had all of it before the load"


@pytest.mark.parametrize("shape", PICKLED)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_needs_pickle_is_said_at_the_save(found, column, shape):
    saved, _ = found(column)
    said = "\n".join(each[shape].said for each in saved)
    assert re.search(rf"'[\w.]*({PICKLED[shape]})'.*allow_pickle=True", said), said


@pytest.mark.parametrize("column", COLUMNS)
def test_nothing_else_is_said(found, column):
    saved, _ = found(column)
    noisy = {
        shape: seen.said
        for each in saved
        for shape, seen in each.items()
        if seen.said and shape not in PICKLED
    }
    assert noisy == {}


@pytest.mark.parametrize("column", COLUMNS)
def test_torch_itself_can_train_nearly_all_shapes(found, column):
    """Else it would say nothing."""
    saved, _ = found(column)
    outside = {shape: seen.outside for shape, seen in saved[0].items() if seen.outside}
    assert len(outside) <= len(saved[0]) / 4, outside


def test_every_shape_is_tried_by_one_process_and_every_kind_and_optimizer_by_two_ranks():
    assert set(TRIED["plain"]) == set(SHAPES)
    assert len(SHAPES) > 200
    kinds = {re.split("[,. ]", name)[0] for name in SHAPES}
    several = {kind for kind in kinds if sum(name.startswith(kind) for name in SHAPES) >= 8}
    for column in ("ddp", "fsdp2"):
        assert several <= {re.split("[,. ]", name)[0] for name in TRIED[column]}
    assert {name for name in SHAPES if name.startswith("optimizer")} <= set(TRIED["fsdp2"])


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}
