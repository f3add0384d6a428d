"""Every shape of state comes back bit for bit in a fresh process, or the save says no, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from ckpt_core.testing import run_ranks
from tests.guarantees import loading_jobs
from tests.guarantees.loading_jobs import Seen
from tests.guarantees.state_shapes import PICKLED, REFUSED, REFUSED_SHARDED, SHAPES

COLUMNS = {"plain": 1, "ddp": 2, "fsdp2": 2}
FEWEST = {"plain": 150, "ddp": 150, "fsdp2": 150}
"""How many shapes torch itself must be able to train in a column: else it would say nothing."""

_found: dict[str, tuple[list[dict[str, Seen]], list[dict[str, Seen]]]] = {}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("plain"),
        pytest.param("ddp", marks=[pytest.mark.distributed, pytest.mark.slow]),
        pytest.param("fsdp2", marks=[pytest.mark.distributed, pytest.mark.slow]),
    ],
)
def column(request, tmp_path_factory) -> str:
    """All shapes were saved by one process, or two ranks, and loaded by others."""
    name: str = request.param
    ranks, root = COLUMNS[name], str(tmp_path_factory.mktemp(name))
    saved = run_ranks(loading_jobs.save_all, ranks, name, root, timeout_seconds=500, process_group=ranks > 1)
    there = [shape for shape, seen in saved[0].items() if seen.state]
    loaded = run_ranks(
        loading_jobs.load_all, ranks, name, root, there, timeout_seconds=500, process_group=ranks > 1
    )
    _found[name] = saved, loaded
    return name


@pytest.mark.parametrize("shape", SHAPES)
def test_it_loads_bit_for_bit_in_a_fresh_process_or_the_save_says_no(column, shape):
    saved, loaded = _found[column]
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
        found = loaded[rank][shape]
        assert not found.error, f"rank {rank}: {found.error}"
        assert differing(found.state, seen.state) == {}
        assert differing(found.later, seen.later) == {}
        assert found.fresh != seen.state, "the fresh process had all of it before the load"


@pytest.mark.parametrize("shape", PICKLED)
def test_what_needs_pickle_is_said_at_the_save(column, shape):
    saved, _ = _found[column]
    said = "\n".join(each[shape].said for each in saved)
    assert re.search(rf"'[\w.]*({PICKLED[shape]})'.*allow_pickle=True", said), said


def test_nothing_else_is_said(column):
    saved, _ = _found[column]
    noisy = {
        shape: seen.said
        for each in saved
        for shape, seen in each.items()
        if seen.said and shape not in PICKLED
    }
    assert noisy == {}


def test_enough_shapes_are_tried(column):
    saved, _ = _found[column]
    tried = [shape for shape, seen in saved[0].items() if not seen.outside]
    assert len(tried) >= FEWEST[column], {s: seen.outside for s, seen in saved[0].items() if seen.outside}


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}
