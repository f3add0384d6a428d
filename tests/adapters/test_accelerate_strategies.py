"""Accelerate on real ranks: exact resumes, and every strategy's checkpoint under every other."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from accelerate_ckpt._checkpoints import ENDED
from tests.adapters.accelerate_jobs import (
    Job,
    committed,
    damage_fold_and_preemption,
    in_turn,
    load_only,
    save_then_load,
    train_with_hooks,
)
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

_STRATEGIES = ("ddp", "fsdp1", "fsdp2", "tp")
_AT = (3, 6, 9)


def with_resumes(job: Job, at: tuple[int, ...]) -> list[Job]:
    """An uninterrupted run that saves, and one from each checkpoint."""
    return [job.but(save_at=at), *(job.but(load=f"{job.root}/checkpoint_{step}") for step in at)]


def assert_resumes_exactly(per_rank: list[list[dict[str, Any]]], at: tuple[int, ...]) -> None:
    for first, *others in per_rank:
        for step, other in zip(at, others, strict=True):
            assert other["trace"] == first["trace"][step:], f"from step {step}"
            assert other["state"] == first["state"]


def test_a_resume_in_the_middle_of_an_epoch_is_exact_on_two_ranks(tmp_path: Path) -> None:
    at = (3, 9)
    assert_resumes_exactly(run_ranks(in_turn, 2, with_resumes(Job(root=str(tmp_path)), at)), at)


RESUMED = {
    "fsdp1": (Job(strategy="fsdp1"), (3,)),
    "fsdp2": (Job(strategy="fsdp2"), (6,)),
    "tp": (Job(strategy="tp"), (9,)),
    "iterable": (Job(data="iterable"), (3, 6, 9)),
}
"""How it trains, and from which steps it is resumed; the step matters to what feeds the data alone."""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """Of every case the results by rank; all in one pair of processes."""
    root = tmp_path_factory.mktemp("resumed")
    jobs = [with_resumes(job.but(root=str(root / name)), at) for name, (job, at) in RESUMED.items()]
    per_rank = [
        iter(results)
        for results in run_ranks(in_turn, 2, [job for case in jobs for job in case], timeout_seconds=220)
    ]
    return {
        name: [list(islice(results, len(case))) for results in per_rank]
        for name, case in zip(RESUMED, jobs, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_resume_is_exact_under_every_strategy_and_whatever_feeds_the_data(
    resumed: dict[str, list[list[dict[str, Any]]]], case: str
) -> None:
    assert_resumes_exactly(resumed[case], RESUMED[case][1])


def test_two_ranks_save_sharded_and_load_under_another_strategy(tmp_path: Path) -> None:
    job = Job(root=str(tmp_path), strategy="fsdp2", steps=3, save_at=(3,))
    loads = job.but(strategy="ddp", load=f"{tmp_path}/checkpoint_3")
    (saved, loaded), _ = run_ranks(save_then_load, 2, job, loads)
    assert committed(tmp_path) == ["checkpoint_3"]
    assert len(list((tmp_path / "checkpoint_3" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    assert loaded["state"] == saved["state"]
    assert loaded["done"] == 3


@pytest.mark.slow
def test_what_hooks_take_over_on_the_main_process_is_taken_over_on_every_rank(tmp_path: Path) -> None:
    for result in run_ranks(train_with_hooks, 2, Job(root=str(tmp_path))):
        assert result["loaded"] == result["saved"]
    inside = {path.name for path in (tmp_path / "checkpoint_0").iterdir()}
    assert {"adapter.bin", "optimizer_0"} <= inside
    assert not inside & {"pytorch_model_fsdp_0", "model.safetensors"}


@pytest.mark.slow
def test_accelerate_merges_our_shards_into_one_file(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    ((saved,), *_) = run_ranks(in_turn, 2, [Job(root=str(tmp_path), strategy="fsdp2", steps=3, save_at=(3,))])
    merge_fsdp_weights(f"{tmp_path}/checkpoint_3/pytorch_model_fsdp_0", f"{tmp_path}/merged")
    merged = load_file(f"{tmp_path}/merged/model.safetensors")
    assert {name: value.flatten().tolist() for name, value in merged.items()} == {
        name: value for name, value in saved["state"].items() if name in merged
    }
    assert "4.bias" in merged


@pytest.mark.slow
def test_strategies_load_what_others_saved_also_on_fewer_and_more_ranks(tmp_path: Path) -> None:
    saves = [
        Job(root=f"{tmp_path}/{strategy}", strategy=strategy, steps=3, save_at=(3,), dropout=0.0)
        for strategy in _STRATEGIES
    ]
    saved = {job.strategy: result for job, result in zip(saves, run_ranks(in_turn, 2, saves)[0], strict=True)}
    alone = Job(root=f"{tmp_path}/single", strategy="single", world=1, steps=3, save_at=(3,))
    saved["single"] = run_ranks(in_turn, 1, [alone])[0][0]
    others = {
        "ddp": ("fsdp1", "tp"),
        "fsdp1": ("fsdp2", "single"),
        "fsdp2": ("tp", "ddp"),
        "tp": ("fsdp1", "ddp"),
    }
    on_two = [(source, target) for target, some in others.items() for source in (target, *some)]
    on_three = [("fsdp2", "ddp"), ("single", "ddp"), ("fsdp1", "fsdp2"), ("tp", "fsdp2")]
    for world, pairs in ((1, [(source, "single") for source in saved]), (2, on_two), (3, on_three)):
        loads = [
            Job(root=str(tmp_path), strategy=target, world=world, load=f"{tmp_path}/{source}/checkpoint_3")
            for source, target in pairs
        ]
        results = run_ranks(in_turn, world, loads, load_only, timeout_seconds=200)
        for rank, of_rank in enumerate(results):
            for pair, loaded in zip(pairs, of_rank, strict=True):
                where = f"{pair[0]} -> {pair[1]} on {world}, rank {rank}"
                assert loaded["state"] == saved[pair[0]]["state"], where
                assert loaded["done"] == 3, where
                assert loaded["step"] == saved[pair[0]]["step"], where


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_stock_accelerate_loads_what_ranks_saved(tmp_path: Path, strategy: str) -> None:
    job = Job(root=str(tmp_path), strategy=strategy, steps=3, save_at=(3,), stock_files=True)
    stock = job.but(enabled=False, load=f"{tmp_path}/checkpoint_3")
    (saved, loaded), _ = run_ranks(save_then_load, 2, job, stock)
    # Stock loads no optimizer state into an FSDP1 optimizer that has made no step, whoever saved it.
    names = [name for name in saved["state"] if strategy != "fsdp1" or name in loaded["state"]]
    assert loaded["state"] == {name: saved["state"][name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_ranks_load_what_stock_accelerate_saved(tmp_path: Path, strategy: str) -> None:
    stock = Job(
        root=str(tmp_path),
        strategy=strategy,
        steps=3,
        enabled=False,
        stock_save_to=f"{tmp_path}/checkpoint_0",
    )
    ours = stock.but(enabled=True, load=f"{tmp_path}/checkpoint_0")
    (saved, loaded), _ = run_ranks(save_then_load, 2, stock, ours)
    assert loaded["state"] == saved["state"]


@pytest.mark.slow
def test_what_one_rank_meets_every_rank_acts_on(tmp_path: Path) -> None:
    results = run_ranks(damage_fold_and_preemption, 2, str(tmp_path))
    assert results == [{"step": 1, "fold": [1], "code": ENDED}] * 2
    assert committed(tmp_path) == [f"checkpoint_{number}" for number in range(4)]
