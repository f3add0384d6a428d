"""Accelerate on real ranks: exact resumes, and every strategy's checkpoint under every other."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_ckpt._patch import ENDED
from ckpt_core.testing import run_ranks
from tests.adapters.accelerate_jobs import (
    Job,
    committed,
    damage_fold_and_preemption,
    in_turn,
    load_only,
    train_with_hooks,
)

pytestmark = pytest.mark.distributed

_STRATEGIES = ("ddp", "fsdp1", "fsdp2", "tp")
_AT = (3, 6, 9)


def assert_resumes_exactly(job: Job, at: tuple[int, ...]) -> None:
    whole = job.but(save_at=at)
    resumed = [job.but(load=f"{job.root}/checkpoint_{step}") for step in at]
    for first, *others in run_ranks(in_turn, job.world, [whole, *resumed]):
        for step, other in zip(at, others, strict=True):
            assert other["trace"] == first["trace"][step:], f"from step {step}"
            assert other["state"] == first["state"]


def test_a_resume_in_the_middle_of_an_epoch_is_exact_on_two_ranks(tmp_path: Path) -> None:
    assert_resumes_exactly(Job(root=str(tmp_path)), at=(3, 9))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "tp"])
def test_a_resume_is_exact_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    assert_resumes_exactly(Job(root=str(tmp_path), strategy=strategy), at=_AT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(data="stateful"),
        Job(data="stateful", seedable=True),
        Job(data="iterable"),
        Job(data="dispatch"),
        Job(seedable=True, set_epoch=True),
    ],
    ids=lambda job: f"{job.data}-{'seedable' if job.seedable else 'default'}",
)
def test_a_resume_is_exact_whatever_feeds_the_data(tmp_path: Path, job: Job) -> None:
    assert_resumes_exactly(job.but(root=str(tmp_path)), at=_AT)


def test_two_ranks_save_sharded_and_load_under_another_strategy(tmp_path: Path) -> None:
    job = Job(root=str(tmp_path), strategy="fsdp2", steps=3, save_at=(3,))
    ((saved,), *_) = run_ranks(in_turn, 2, [job])
    assert committed(tmp_path) == ["checkpoint_3"]
    assert len(list((tmp_path / "checkpoint_3" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    ((loaded,), *_) = run_ranks(
        in_turn, 2, [job.but(strategy="ddp", load=f"{tmp_path}/checkpoint_3")], load_only
    )
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
def test_every_strategy_loads_what_every_other_saved_also_on_fewer_and_more_ranks(tmp_path: Path) -> None:
    saves = [
        Job(root=f"{tmp_path}/{strategy}", strategy=strategy, steps=3, save_at=(3,), dropout=0.0)
        for strategy in _STRATEGIES
    ]
    saved = {job.strategy: result for job, result in zip(saves, run_ranks(in_turn, 2, saves)[0], strict=True)}
    alone = Job(root=f"{tmp_path}/single", strategy="single", world=1, steps=3, save_at=(3,))
    saved["single"] = run_ranks(in_turn, 1, [alone])[0][0]
    for world, targets in ((1, ("single",)), (2, _STRATEGIES), (3, ("ddp", "fsdp2"))):
        pairs = [(source, target) for source in saved for target in targets]
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
    ((saved,), *_) = run_ranks(in_turn, 2, [job])
    ((loaded,), *_) = run_ranks(in_turn, 2, [stock], load_only)
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
    ((saved,), *_) = run_ranks(in_turn, 2, [stock])
    ours = stock.but(enabled=True, load=f"{tmp_path}/checkpoint_0")
    ((loaded,), *_) = run_ranks(in_turn, 2, [ours], load_only)
    assert loaded["state"] == saved["state"]


@pytest.mark.slow
def test_what_one_rank_meets_every_rank_acts_on(tmp_path: Path) -> None:
    results = run_ranks(damage_fold_and_preemption, 2, str(tmp_path))
    assert results == [{"step": 1, "fold": [1], "code": ENDED}] * 2
    assert committed(tmp_path) == [f"checkpoint_{number}" for number in range(4)]
