"""The data of a resumed Trainer: the same as if it had never stopped, also on other ranks and batches."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import accelerate_ckpt
from accelerate_ckpt.trainer._data import (
    Continuation,
    DataProgress,
    Position,
    Steps,
)
from ckpt_core import CheckpointManager, CorruptCheckpointError
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_data_jobs import (
    DataJob,
    collate,
    data_in_turn,
    data_trainer,
    run_data,
    sample,
)
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

WINDOWS = {"gradient_accumulation_steps": 2}
SETTINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    # The last batch of an epoch, whose evaluation is still to come; windows that do not divide the epoch.
    "map": ({"samples": 26, "arguments": {**WINDOWS, "eval_strategy": "epoch"}}, [4, 6]),
    # Orders from the global generators; workers that live on, of training and evaluation alike.
    "grouped": (
        {
            "arguments": {
                "train_sampling_strategy": "group_by_length",
                "dataloader_num_workers": 1,
                "dataloader_persistent_workers": True,
                "eval_strategy": "steps",
                "eval_steps": 4,
                "eval_on_start": True,
            }
        },
        [8, 12],
    ),
    "stream": ({"data": "stream", "samples": 20, "arguments": {**WINDOWS, "max_steps": 9}}, [2, 4]),
}


def run(job: DataJob) -> dict[str, Any]:
    result = run_data(job)
    forget_accelerators()
    return result


def resumed(job: DataJob, step: int, **changes: Any) -> dict[str, Any]:
    """A run that goes on from a checkpoint of another, in a directory of its own."""
    return run(job.but(root=f"{job.root}-{step}", resume=f"{job.root}/checkpoint-{step}", **changes))


def assert_same_from_there(run: dict[str, Any], whole: dict[str, Any]) -> None:
    assert run["seen"] == whole["seen"][-len(run["seen"]) :]
    for what in ("weights", "random", "step", "epoch", "total", "rate"):
        assert run[what] == whole[what], what
    assert {step: whole["losses"][step] for step in run["losses"]} == run["losses"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resume_within_any_epoch_and_at_its_last_batch_is_exact(tmp_path: Path, setting: str) -> None:
    options, steps = SETTINGS[setting]
    job = DataJob(root=f"{tmp_path}/run", save_at=steps, **options)
    whole = run(job)
    without = run(job.but(root=f"{tmp_path}/stock", enabled=False))
    assert {name: whole[name] for name in without} == without, "without a resume nothing changes"
    for step in steps:
        assert_same_from_there(resumed(job, step), whole)


@pytest.mark.parametrize(
    "loading",
    [
        {},
        {"dataloader_num_workers": 1},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ],
    ids=["no workers", "a worker", "one that lives on"],
)
def test_samples_that_draw_random_numbers_draw_the_same_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loading: dict[str, Any]
) -> None:
    job = DataJob(root=f"{tmp_path}/run", data="augmented", save_at=[2, 8], arguments={**WINDOWS, **loading})
    whole = run(job)
    for step in job.save_at:
        assert_same_from_there(resumed(job, step), whole)
    assert "draw random numbers" not in caplog.text


def samples_by_epoch(batches: list[list[int]], size: int) -> list[Counter[int]]:
    order = [index for batch in batches for index in batch]
    return [Counter(order[start : start + size]) for start in range(0, len(order), size)]


def assert_every_sample_once(batches: list[list[int]], size: int) -> None:
    for epoch in samples_by_epoch(batches, size):
        assert set(epoch.values()) == {1}
    assert {len(epoch) for epoch in samples_by_epoch(batches, size)[:-1]} == {size}


@pytest.mark.parametrize(
    ("data", "arguments", "changes"),
    [
        ("map", {}, {"batch": 3, "arguments": WINDOWS}),
        (
            "map",
            {"train_sampling_strategy": "group_by_length"},
            {"batch": 5, "arguments": {"train_sampling_strategy": "group_by_length"}},
        ),
        ("sized", {}, {"batch": 6, "arguments": WINDOWS}),
    ],
    ids=["shuffled", "grouped", "stream"],
)
def test_other_batches_see_every_sample_of_the_epoch_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    data: str,
    arguments: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    """And a resume from there is exact again, and ends where the resumed training was to end."""
    job = DataJob(root=f"{tmp_path}/run", data=data, samples=26, save_at=[9], arguments=arguments)
    whole = run(job.but(arguments={**arguments, "num_train_epochs": 2}))
    assert "9 was saved" not in caplog.text
    other = job.but(**changes)
    elastic = run(other.but(root=f"{tmp_path}/other", resume=f"{job.root}/checkpoint-9", save_at=[10]))
    assert "step 9 was saved by 1 rank with 4 samples in a step" in caplog.text
    assert f"it goes on in epoch 1. Training ends at step {elastic['total']}" in caplog.text
    assert ("after 8 of 26 samples" if data == "map" else "behind the first 8 of 26 samples") in caplog.text
    assert_every_sample_once(whole["seen"][:9] + elastic["seen"], 26)
    assert elastic["step"] == elastic["total"]
    assert elastic["epoch"] == 3
    assert elastic["rate"] == [0.0, 0.0], "the schedule ends with the training"
    again = other.but(root=f"{tmp_path}/again", resume=f"{tmp_path}/other/checkpoint-10")
    assert_same_from_there(run(again), elastic)


def test_a_stream_that_other_workers_share_begins_its_epoch_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = DataJob(root=f"{tmp_path}/run", data="sized", samples=24, save_at=[8])
    run(job)
    other = resumed(job, 8, arguments={"dataloader_num_workers": 2})
    assert "The epoch begins again" in caplog.text
    assert (other["step"], other["total"], len(other["seen"])) == (20, 20, 12), "two whole epochs"
    assert_every_sample_once(other["seen"], 24)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 30}, "the order of SeedableRandomSampler cannot be made again"),
        (
            {"arguments": {"train_sampling_strategy": "group_by_length"}},
            "The epoch begins again, so that what each rank had seen of it, 2 batches of 4, is seen twice",
        ),
    ],
    ids=["grown", "another sampler"],
)
def test_data_that_has_changed_within_the_epoch_is_told_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], told: str
) -> None:
    job = DataJob(root=f"{tmp_path}/run", save_at=[2, 6], arguments={"max_steps": 6})
    run(job)
    assert "samples seen" not in caplog.text
    arguments = {"max_steps": 4, **changes.get("arguments", {})}
    resumed(job, 2, **{**changes, "arguments": arguments})
    assert told in caplog.text
    caplog.clear()
    later = resumed(job, 6, **{**changes, "arguments": {**arguments, "max_steps": 7}})
    assert "samples seen" not in caplog.text, "between epochs it may change"
    assert (later["step"], len(later["seen"]), later["epoch"] > 1) == (7, 1, True), "of the next epoch"


def test_a_loader_that_cannot_be_followed_is_told_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = data_trainer(DataJob(root=str(tmp_path), arguments={"max_steps": 1}))
    batch = collate([sample(index) for index in range(4)])
    made.get_train_dataloader = lambda: [batch, batch]
    made.train()
    assert "the position in a list cannot be saved" in caplog.text
    accelerate_ckpt.disable_trainer(made)


@pytest.mark.slow
@pytest.mark.distributed
def test_other_ranks_see_every_sample_of_the_epoch_once(tmp_path: Path) -> None:
    """1 -> 2 -> 1, and exactly on the same 2; of a stream that one rank dispatches, too."""
    jobs = {
        "map": DataJob(root=f"{tmp_path}/map", samples=26, save_at=[9]),
        "stream": DataJob(root=f"{tmp_path}/stream", samples=26, data="sized", save_at=[9]),
    }
    before = {name: run(job.but(arguments={"num_train_epochs": 2})) for name, job in jobs.items()}
    on_two = {
        name: job.but(root=f"{job.root}-2", resume=f"{job.root}/checkpoint-9", save_at=[10])
        for name, job in jobs.items()
    }
    again = {
        name: job.but(root=f"{job.root}-3", resume=f"{job.root}/checkpoint-10")
        for name, job in on_two.items()
    }
    ranks = run_ranks(data_in_turn, 2, [*on_two.values(), *again.values()])
    for results in ranks:
        for there, resumed_there in zip(results[:2], results[2:], strict=True):
            assert_same_from_there(resumed_there, there)
    for index, (name, job) in enumerate(jobs.items()):
        seen = [
            list(itertools.chain.from_iterable(batches))
            for batches in zip(*(each[index]["seen"] for each in ranks), strict=True)
        ]
        epoch = before[name]["seen"][7:9] + seen[:3]
        filled = Counter(itertools.chain.from_iterable(epoch))
        assert set(filled) == set(range(26))
        assert sum(filled.values()) - 26 == {"map": 6, "stream": 0}[name], "what fills up the last batch"
        back = run(job.but(root=f"{job.root}-4", batch=3, resume=f"{job.root}-2/checkpoint-10"))
        assert_every_sample_once(before[name]["seen"][:9] + seen[:1] + back["seen"], 26)


def test_data_that_is_not_to_be_skipped_is_not(tmp_path: Path) -> None:
    job = DataJob(root=f"{tmp_path}/run", save_at=[8], arguments={"ignore_data_skip": True})
    whole = run(job)
    assert [len(resumed(job, 8)["seen"]), whole["step"]] == [10, 18], "as the stock Trainer"
    changed = resumed(job, 8, batch=8)
    assert_every_sample_once(changed["seen"], 24)
    assert (changed["step"], changed["total"]) == (13, 13), "as many samples as were to come"


def test_going_back_within_a_process_is_exact(tmp_path: Path) -> None:
    job = DataJob(root=f"{tmp_path}/run", save_at=[8])
    made = data_trainer(job)
    made.train()
    weights = {name: value.tolist() for name, value in made.model.state_dict().items()}
    seen = list(made.model.seen)
    again = run_data(job.but(resume=f"{job.root}/checkpoint-8", save_at=[]), made)
    assert again["seen"] == seen[8:]
    assert again["weights"] == weights


def test_checkpoints_at_a_url_are_resumed_on_a_machine_that_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the best model among them; the place comes from the script, or from outside."""
    best = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "steps",
        "greater_is_better": False,
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 4,
    }

    def train(job: DataJob) -> tuple[Any, dict[str, Any]]:
        made = data_trainer(job)
        made.compute_metrics = lambda _: {"steps": made.state.global_step}  # the first one is the best
        return made, run_data(job, made)

    url = "memory://trainers/apart"
    job = DataJob(root=f"{tmp_path}/one", arguments={**best, "num_train_epochs": 1}, options={"root": url})
    _, first = train(job)
    forget_accelerators()
    assert [info.step for info in CheckpointManager(url).checkpoints()] == [4, 6]
    assert [path for path in (tmp_path / "one").iterdir() if path.name.startswith("checkpoint")] == []
    monkeypatch.setenv("CKPT_SUITE_ROOT", url)
    later = job.but(root=f"{tmp_path}/two", options={}, resume=True, arguments=best)
    second, made = train(later)
    forget_accelerators()
    assert len(made["seen"]) == 12
    assert second.state.best_model_checkpoint == f"{url}/checkpoint-4"
    assert made["weights"] == first["weights"], "of step 4"
    monkeypatch.setenv("CKPT_SUITE_ROOT", f"{url}-else")
    run(job.but(root=f"{tmp_path}/three", options={"root": None}, arguments={"max_steps": 1}))
    (tmp_path / "three" / "checkpoint-7").mkdir()
    run(job.but(root=f"{tmp_path}/three", options={}, resume=True, arguments={"max_steps": 1}))
    assert "checkpoint-7" in caplog.text, "which is where a run before might have gone on"


def position(**values: Any) -> Position:
    return Position(
        **{
            "step": 1,
            "epoch": 0,
            "batches": 0,
            "length": None,
            "per_batch": 1,
            "accumulation": 1,
            "ranks": 1,
            "samples": 1,
            **values,
        }
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_resumed_epoch_counts_whole_windows_of_what_was_seen_and_then_its_rest(seed: int) -> None:
    chance = random.Random(seed)
    now = position(per_batch=chance.randint(1, 9), accumulation=chance.randint(1, 4))
    found = position(batches=chance.randint(1, 9), per_batch=chance.randint(1, 9))
    seen, to_come = found.batches * found.per_batch, chance.randint(1, 50)
    chosen = Continuation.of(found, now, done=seen, to_come=to_come)
    stock = Steps(epochs=3, per_epoch=7, batches=7, total=20).with_rest(chosen, now.accumulation)
    assert stock.batches == chosen.skip + to_come
    if (now.per_batch, now.accumulation) == (found.per_batch, found.accumulation):
        assert chosen.skip == found.batches
    else:
        assert chosen.skip % now.accumulation == 0
        assert 0 <= seen - chosen.skip * now.per_batch < now.per_batch * now.accumulation


def test_an_epoch_whose_rest_cannot_be_told_begins_again() -> None:
    found = position(batches=5, per_batch=6)
    for now in (found, replace(found, per_batch=4)):
        assert Continuation.of(found, now, done=0, to_come=7) == Continuation(epoch=0, to_come=7)


def test_too_few_samples_for_a_step_are_not_seen_again() -> None:
    found = position(batches=3, length=3)
    chosen = Continuation.of(found, replace(found, per_batch=8), done=3, to_come=0)
    assert chosen == Continuation(epoch=1)


def test_steps_are_those_of_the_stock_trainer_where_nothing_has_changed() -> None:
    for length, accumulation, done in itertools.product((1, 5, 6, 13), (1, 2, 5), (1, 2, 3, 7, 11)):
        per_epoch = -(-length // accumulation)
        epoch, step = divmod(done, per_epoch)
        batches = step * accumulation
        found = position(step=done, epoch=epoch, batches=batches, length=length, accumulation=accumulation)
        chosen = Continuation.of(found, found, done=batches, to_come=length - batches)
        for total in (done + 1, done + 2 * per_epoch, 100):
            stock = Steps(epochs=-(-total // per_epoch), per_epoch=per_epoch, batches=length, total=total)
            assert stock.with_rest(chosen, accumulation) == stock
            for fixed in (True, False):
                assert stock.after(found, chosen, stock, accumulation, fixed=fixed) == stock


def test_a_training_that_has_ended_makes_no_further_step() -> None:
    found = position(step=8, epoch=1, batches=2, length=6)
    chosen = Continuation.of(found, found, done=2, to_come=4)
    stock = Steps(epochs=2, per_epoch=6, batches=6, total=8)
    epochs = stock.after(found, chosen, stock, 1, fixed=True).epochs
    assert epochs == chosen.epoch + 1, "the end of its epoch is still to come"
    between = Continuation(epoch=2)
    assert stock.after(found, between, stock, 1, fixed=True).epochs == 2, "no epoch is run"


def test_progress_that_is_none_is_damage() -> None:
    for content in (b"{}", b"[", b'{"position": {}}', b'"x"'):
        with pytest.raises(CorruptCheckpointError, match="trainer_progress_0"):
            DataProgress.read(content, "trainer_progress_0.json")


def test_disabling_puts_back_what_follows_the_data(tmp_path: Path) -> None:
    made = data_trainer(DataJob(root=str(tmp_path)))
    accelerate_ckpt.disable_trainer(made)
    assert not {"_run_epoch", "get_batch_samples", "get_eval_dataloader"} & vars(made).keys()
