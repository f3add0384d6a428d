"""What one rank alone is told of a preemption reaches all, at one step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt_core import CheckpointManager, OnPreemption
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.reliability, pytest.mark.distributed, pytest.mark.slow]


def train_until_stopped(folder: str, source: str) -> tuple[int, bool]:
    """Every rank has a source of its own; only that of one rank announces anything, at step 5."""
    own = Path(folder) / f"stop-{dist.get_rank()}"
    announces = 0 if source == "deadline" else 1  # the end of the job is rank 0's to know
    sources = {"file": own, "when": own.exists, "deadline": lambda: time.time() if own.exists() else None}
    policy = OnPreemption((), **{source: sources[source]})
    state = {"weight": torch.ones(4)}
    with CheckpointManager(f"{folder}/run", save=policy, deadline_seconds=60) as checkpoints:
        step = 0
        while not checkpoints.preempted:
            step += 1
            if step == 5 and dist.get_rank() == announces:
                own.touch()
            checkpoints.maybe_save(step, state)
        return step, checkpoints.preempted


@pytest.mark.parametrize("source", ["file", "when", "deadline"])
def test_what_one_rank_alone_sees_stops_all_at_the_same_step(tmp_path: Path, source: str) -> None:
    (first, _), (second, _) = run_ranks(train_until_stopped, 2, str(tmp_path), source)
    assert first == second >= 5
    assert [info.step for info in CheckpointManager(tmp_path / "run").checkpoints()] == [first]
    assert CheckpointManager(tmp_path / "run").verify() == []
