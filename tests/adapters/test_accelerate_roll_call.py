"""Accelerate on two ranks of which not all come to a save: what stock allows works, and nothing is mixed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.accelerate_jobs import Job, committed, in_turn, one_comes, who_saves
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

JOB = Job(strategy="ddp", world=2, steps=8, dropout=0.0, seedable=True)


def several(jobs: list[tuple[Job, dict[int, str]]]) -> list[dict[str, Any]]:
    made = []
    for job, who in jobs:
        made += in_turn([job], functools.partial(who_saves, who=who))
    return made


def ranks_of(root: Path, step: int) -> int:
    return int(json.loads((root / f"checkpoint_{step}" / "manifest.json").read_text())["world_size"])


def test_a_main_process_that_saves_alone_saves_what_all_ranks_go_on_from(tmp_path: Path) -> None:
    """Also after a load by all ranks, and before another one in the same process."""
    main = {3: "main", 5: "main", 8: "main", 0: "load"}
    first, again = JOB.but(root=str(tmp_path / "run")), JOB.but(root=str(tmp_path / "run"))
    again = again.but(load=f"{tmp_path}/run/checkpoint_3", root=str(tmp_path / "again"))
    of_ranks = run_ranks(
        several, 2, [(first, main), (again.but(steps=9), {5: "main", 9: "main"})], timeout_seconds=240
    )
    for whole, resumed in of_ranks:
        assert resumed["states"][5] == whole["states"][5], "also the data of the epoch"
    assert whole["state"] == whole["states"][8], "loaded again by all"
    assert committed(tmp_path / "run") == ["checkpoint_3", "checkpoint_5", "checkpoint_8"]
    assert committed(tmp_path / "again") == ["checkpoint_5", "checkpoint_9"]
    (told,) = of_ranks[0][0]["told"]
    assert "rank 1 did not come to save_state()" in told
    assert "call save_state() on every process" in told.lower()


def test_a_rank_that_comes_late_is_left_out_once_and_takes_part_again(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path / "run"))
    who = {3: "late", 5: "all", 8: "all"}
    load = job.but(load=f"{job.root}/checkpoint_3", root=f"{tmp_path}/again", steps=5)
    of_ranks = run_ranks(several, 2, [(job, who), (load, {5: "all"})], timeout_seconds=240)
    assert [ranks_of(tmp_path / "run", step) for step in who] == [1, 2, 2]
    for whole, resumed in of_ranks:
        assert resumed["states"][5] == whole["states"][5]
    assert "came later" in of_ranks[1][0]["told"][0]


def test_a_slow_rank_of_a_sharded_model_is_named_and_waited_for(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path / "run"), strategy="fsdp2")
    load = job.but(load=f"{job.root}/checkpoint_3", root=f"{tmp_path}/again", steps=5)
    of_ranks = run_ranks(several, 2, [(job, {3: "late", 5: "all"}), (load, {5: "all"})], timeout_seconds=240)
    assert [ranks_of(tmp_path / "run", step) for step in (3, 5)] == [2, 2]
    for whole, resumed in of_ranks:
        assert resumed["states"][5] == whole["states"][5]
    assert "rank 1 did not come" in of_ranks[0][0]["told"][0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_that_comes_late_to_a_later_save_is_named_while_the_save_waits(tmp_path, strategy) -> None:
    """Saves that all ranks come to in time, before and after it, say nothing."""
    job = JOB.but(root=str(tmp_path / "run"), strategy=strategy)
    who = {2: "all", 3: "late", 5: "all", 6: "all"}
    main, other = run_ranks(several, 2, [(job, who)], timeout_seconds=240)
    assert [ranks_of(tmp_path / "run", step) for step in who] == [2, 2, 2, 2]
    (told,) = main[0]["told"]
    assert "rank 1 did not come to save_state()" in told
    assert "this save waits" in told
    assert "call save_state() on every process" in told.lower()
    assert other[0]["told"] == []


def waiting(jobs: list[tuple[Job, int]]) -> list[dict[str, Any]]:
    return [each for job, rank in jobs for each in in_turn([job], functools.partial(one_comes, rank=rank))]


def test_a_rank_waits_for_others_no_longer_than_the_deadline_and_names_them(tmp_path: Path) -> None:
    """The main process under FSDP, and another rank under DDP and FSDP; all may save together afterwards."""
    cases = [("fsdp2", 0), ("ddp", 1), ("fsdp1", 1)]
    jobs = [
        (JOB.but(strategy=strategy, root=str(tmp_path / strategy), steps=1), rank) for strategy, rank in cases
    ]
    of_ranks = run_ranks(waiting, 2, jobs, timeout_seconds=240)
    for number, (strategy, rank) in enumerate(cases):
        told = of_ranks[rank][number]["error"]
        assert told.startswith(f"rank {1 - rank} did not come to save_state() within 3 s: nothing was saved")
        assert "call save_state() on every process" in told.lower()
        assert committed(tmp_path / strategy) == ["together"]
