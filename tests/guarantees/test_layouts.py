"""Every layout is resumed bit for bit, on the same ranks and on others: the table of docs/compatibility."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.layout_jobs import (
    FOUR,
    ONE,
    TWO,
    Layout,
    Seen,
    differing,
    manager,
    on_ranks,
    one_process,
    save_one_process,
)
from tests.guarantees.native_layout_jobs import (
    LAYOUTS,
    full_weights,
    resumed_alike,
    save_base,
    train,
    weights,
)
from tests.kit.ranks import run_ranks
from tests.support.thorough import THOROUGH

CASES: dict[str, tuple[int, dict[str, Layout]]] = {"ONE": (1, ONE), "TWO": (2, TWO), "FOUR": (4, FOUR)}
SAMPLE = {
    "pipeline, GPipe",
    "pipeline, two stages per rank",
    "pipeline, tied ends of one name",
    "pipeline, tied ends of two names",
    "pipeline of FSDP2 stages",
    "experts of each rank's own, by name",
    "experts sharded over their mesh, the rest by FSDP2",
    "DDP, odd parameters and buffers",
    "FSDP2, odd parameters and buffers",
    "FSDP2, CPU offload, resumed from meta",
    "FSDP1, use_orig_params=False, tied",
    "DDP of a compiled model",
    "FSDP1 of a compiled model",
}
"""Of those on two ranks. Each of the others is near one of these, or under another test."""
NOT_FROM_ONE = {"pipeline, tied ends of two names": "head.weight"}
"""What a load of one process's checkpoint is refused for, before anything is loaded.

The optimizer of one process has the state of a tied parameter under its first name only.
"""


def tried(group: str) -> list[str]:
    """All on `THOROUGH=1`."""
    return [
        name for name in CASES[group][1] if THOROUGH or group == "ONE" or (name in SAMPLE and group == "TWO")
    ]


PARAMETERS = [
    pytest.param(group, name, marks=[pytest.mark.distributed] if ranks > 1 else [])
    for group, (ranks, _) in CASES.items()
    for name in tried(group)
]
Found = tuple[Path, list[dict[str, Seen]], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """What each rank saw of all layouts of a group, and what one process had saved."""

    @cache
    def of(group: str) -> Found:
        root, ranks = tmp_path_factory.mktemp(group), CASES[group][0]
        whole = save_one_process(root)
        if ranks == 1:
            return root, [on_ranks(str(root), group, tried(group))], whole
        return root, run_ranks(on_ranks, ranks, str(root), group, tried(group), timeout_seconds=300), whole

    return of


@pytest.mark.parametrize(("group", "name"), PARAMETERS)
def test_it_resumes_bit_for_bit_on_the_same_ranks_and_trains_on_as_if_it_had_not_stopped(found, group, name):
    for seen in found(group)[1]:
        assert seen[name].saved
        assert seen[name].wrong.keys() <= {"loaded from one process"}, seen[name].wrong


@pytest.mark.parametrize(("group", "name"), PARAMETERS)
def test_one_process_loads_it_bit_for_bit(found, group, name):
    root, ranks, _ = found(group)
    training = one_process(CASES[group][1][name].kind, 3)
    with manager(root / name) as checkpoints:
        checkpoints.load(training.state)
    saved = {entry: value for seen in ranks for entry, value in seen[name].saved.items()}
    contents = training.contents()
    # An end of a pipeline that has its own name for a tied parameter has its own optimizer state, too.
    beside = {entry for entry in saved if entry.startswith("head.weight.")} if name in NOT_FROM_ONE else set()
    assert not differing(contents, {entry: saved[entry] for entry in saved.keys() - beside})


@pytest.mark.parametrize(("group", "name"), PARAMETERS)
def test_it_loads_what_one_process_saved_bit_for_bit_or_refuses_it(found, group, name):
    _, ranks, whole = found(group)
    if name in NOT_FROM_ONE:
        assert all(NOT_FROM_ONE[name] in seen[name].wrong["loaded from one process"] for seen in ranks)
        return
    assert not any(seen[name].wrong for seen in ranks)
    loaded = {entry: value for seen in ranks for entry, value in seen[name].from_one.items()}
    assert not differing(loaded, whole[CASES[group][1][name].kind])


@pytest.mark.skipif(not THOROUGH, reason="THOROUGH=1")
@pytest.mark.distributed
def test_models_that_transformers_shards_itself_resume_on_the_same_ranks_and_on_one(tmp_path):
    for layout in LAYOUTS:
        save_base(tmp_path, layout)
    for unlike in run_ranks(resumed_alike, 2, str(tmp_path), timeout_seconds=300):
        assert unlike == {layout: [] for layout in LAYOUTS}
    for layout in LAYOUTS:
        folder = tmp_path / layout
        checkpoint = folder / "run" / "checkpoint-3"
        saved = full_weights(weights(checkpoint))
        resumed = train(weights(folder / "base"), folder / "one", checkpoint, 3)
        assert not differing(resumed, saved), layout
        train(weights(folder / "base"), folder / "one, on", checkpoint, 4)
