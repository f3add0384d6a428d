"""The Lightning adapter on several ranks: every strategy, every pair of strategies, signals and errors."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ckpt_core import CheckpointManager, EverySteps, EveryTokens, KeepBest, OnPreemption
from tests.adapters.lightning_jobs import Job, Outcome, averaged, committed, fit, fit_all
from tests.kit.ranks import RanksFailedError, run_ranks
from tests.scripts import run_python

pytestmark = pytest.mark.distributed

STRATEGIES = ("ddp", "fsdp", "fsdp2")
PLACES = (("single", 1), *((strategy, 2) for strategy in STRATEGIES))
UNSAVED = {"save": None, "save_last": False}
BY_TOKENS = {
    "save": EveryTokens(25),
    "tokens": "tests.adapters.lightning_jobs:tokens_of",
    "save_last": False,
}


def on_ranks(world: int, *jobs: Job, **options) -> list[list[Outcome]]:
    """The outcomes by rank, then by job."""
    return run_ranks(fit_all, world, *jobs, process_group=False, timeout_seconds=240, **options)


def assert_exact(full: Outcome, resumed: Outcome, *, first: int) -> None:
    assert sorted(resumed.losses) == list(range(first, len(full.losses)))
    assert resumed.losses == {batch: full.losses[batch] for batch in resumed.losses}
    assert resumed.weights == full.weights


def resumed_in_between(root: Path, strategy: str) -> list[Job]:
    cut = {"root": str(root / "cut"), "strategy": strategy, "options": {"save": EverySteps(4)}}
    return [
        Job(root=str(root / "full"), strategy=strategy, max_steps=11, options=UNSAVED),
        Job(max_steps=8, **cut),
        Job(max_steps=11, ckpt_path="last", plugin=True, **cut),
    ]


def assert_resumed_exactly(per_rank: list[list[Outcome]]) -> None:
    assert per_rank[0][0].losses != per_rank[1][0].losses
    for full, _, resumed in per_rank:
        assert_exact(full, resumed, first=8)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> tuple[Path, list[list[Outcome]]]:
    """Several trainings in one pair of processes, for starting them is what takes long."""
    root = tmp_path_factory.mktemp("ddp")
    stopped = {"root": str(root / "stopped"), "strategy": "ddp", "max_steps": 11}
    preemption = {"save": OnPreemption()}
    # Ranks that log without sync_dist have values of their own, so that each has another best.
    best = {"keep": KeepBest("own_val"), "save_last": False}
    evaluated = {"root": str(root / "best"), "strategy": "ddp", "validate": True}
    halfway = {"val_check_interval": 3}
    # A directory that every node has for itself: the first rank's is that of the training that was stopped.
    (root / "node-0").symlink_to(root / "stopped" / "run")
    own = {"dirpath": str(root / "node-{rank}"), "deadline_seconds": 20}
    per_rank = on_ranks(
        2,
        *resumed_in_between(root, "ddp"),
        Job(options=preemption, model={"signal_at": (1, 3)}, **stopped),
        Job(options=preemption, ckpt_path="last", **stopped),
        Job(root=str(root / "tokens"), strategy="ddp", max_steps=5, options=BY_TOKENS),
        *(Job(max_steps=steps, options=best, trainer=halfway, **evaluated) for steps in (10, 7)),
        Job(root=str(root), strategy="ddp", ckpt_path="last", options=own, expect="ConfigError"),
    )
    return root, per_rank


def test_two_ranks_of_ddp_resume_exactly_in_the_second_epoch(ddp):
    assert_resumed_exactly([outcomes[:3] for outcomes in ddp[1]])


def test_a_signal_to_one_rank_saves_and_stops_them_all(ddp):
    root, per_rank = ddp

    assert committed(root / "stopped" / "run")[0] == "step-000000004"
    for full, _, _, stopped, resumed, *_ in per_rank:
        assert stopped.preempted
        assert stopped.step == 4
        assert_exact(full, resumed, first=4)


def test_ranks_whose_metrics_differ_save_the_best_of_the_first_together(ddp):
    root, per_rank = ddp
    committed = CheckpointManager(root / "best" / "run").checkpoints(abandoned=True)

    # The second fit begins afresh. On rank 1 the metric grows, so that its best is another.
    assert [(info.step, info.metrics["own_val"], info.abandoned) for info in committed] == [
        (6, -6.0, False),
        (9, -9.0, True),
    ]
    assert {outcomes[-2].best for outcomes in per_rank} == {str(root / "best" / "run" / "step-000000006")}


def test_tokens_of_all_ranks_are_counted_and_counted_on_by_other_ranks(ddp):
    """Two ranks see 4 and 8 tokens in a step, so 60 in five; a single one then sees 4 in each."""
    root, _ = ddp
    fit(Job(root=str(root / "tokens"), max_steps=9, ckpt_path="last", options=BY_TOKENS))

    infos = CheckpointManager(root / "tokens" / "run").checkpoints()
    assert [info.step for info in infos] == [3, 5, 9]


def test_a_checkpoint_that_only_some_ranks_find_is_refused_before_anybody_waits(ddp):
    root, per_rank = ddp

    first, second = (outcomes[-1].error for outcomes in per_rank)
    assert f"rank 0 of 2 is to begin with {root / 'stopped' / 'run'}" in first
    assert "rank 1 of 2 is to begin with no checkpoint" in second
    assert not (root / "node-1").exists()


@pytest.mark.slow
def test_an_error_on_one_rank_is_the_one_that_is_seen(tmp_path):
    job = Job(root=str(tmp_path), strategy="ddp", max_steps=9, model={"raise_at": (1, 4)})

    with pytest.raises(RanksFailedError) as failed:
        on_ranks(2, job)

    assert "rank 1 broke at step 4" in failed.value.reports[1]
    assert committed(tmp_path / "run") == ["step-000000003"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_sharded_ranks_resume_exactly(tmp_path, strategy):
    assert_resumed_exactly(on_ranks(2, *resumed_in_between(tmp_path, strategy)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """A checkpoint of step 4 from every strategy, with the weights it holds."""
    found: dict[str, tuple[Path, str]] = {}
    for world, strategies in ((1, ("single",)), (2, STRATEGIES)):
        root = tmp_path_factory.mktemp(f"from-{world}")
        jobs = [
            Job(root=str(root / strategy), strategy=strategy, max_steps=4, options={"save": EverySteps(4)})
            for strategy in strategies
        ]
        outcomes = on_ranks(world, *jobs)[0]
        found |= {
            strategy: (root / strategy / "run", outcome.weights)
            for strategy, outcome in zip(strategies, outcomes, strict=True)
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
def test_every_strategy_and_world_size_reads_every_other(tmp_path, checkpoints, place):
    """Weights arrive bit for bit, and all that load the same checkpoint train on alike."""
    strategy, world = place
    loads = [
        Job(
            root=str(tmp_path / source / str(steps)),
            strategy=strategy,
            ckpt_path=str(path),
            max_steps=steps,
            options=UNSAVED,
        )
        for (source, (path, _)), steps in product(checkpoints.items(), (4, 7))
    ]
    outcomes = on_ranks(world, *loads)[0]

    weights = [outcome.weights for outcome in outcomes[::2]]
    assert weights == [weights for _, weights in checkpoints.values()]
    assert all(outcome.step == 7 for outcome in outcomes[1::2])
    # What two ranks saved is the same training whatever the strategy was.
    sharded = {outcome.weights for outcome in outcomes[3::2]}
    assert len(sharded) == 1


@pytest.mark.slow
def test_the_launchers_own_processes_leave_plain_files_alone(tmp_path):
    (tmp_path / "train.py").write_text(FORKED)
    done = run_python("train.py", "run", cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    assert committed(tmp_path / "run") == ["step-000000002", "step-000000004"]
    assert "weights came home: True" in done.stdout


FORKED = """
import sys
import lightning as pl
import torch
from torch.utils.data import DataLoader
from ckpt_core import EverySteps
from lightning_ckpt import ShardedCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=4, logger=False, limit_val_batches=0,
        enable_progress_bar=False, enable_checkpointing=False,
        plugins=[ShardedCheckpointIO(sys.argv[1], save=EverySteps(2))],
    )
    trainer.fit(model)
    print("weights came home:", not torch.equal(before, model.layer.weight))
"""


@pytest.mark.slow
def test_averaged_weights_resume_exactly_under_tensor_parallelism(tmp_path):
    """Lightning's own resume raises."""
    full, cut, resumed = run_ranks(
        averaged,
        2,
        str(tmp_path),
        [(6, False), (4, True), (6, True)],
        process_group=False,
        timeout_seconds=240,
    )[0]
    assert resumed == full
    assert resumed != cut
