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
from accelerate_ckpt.data._layout import LoaderLayout
from accelerate_ckpt.trainer._data import (
    Continuation,
    DataProgress,
    Position,
    Steps,
    continuation,
    note,
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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_that_will_be_others_are_told_once_at_the_first_save_within_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int, persistent: bool
) -> None:
    arguments = {
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": persistent and workers > 0,
        "max_steps": 8,
    }
    for data, steps, told in [("map", [2, 3], 0), ("augmented", [6], 0), ("augmented", [2, 3, 8], 1)]:
        run(DataJob(root=f"{tmp_path}/{data}{told}", data=data, save_at=steps, arguments=arguments))
        assert caplog.text.count("draw random numbers") == told, (data, steps)
    assert ("in its workers" if workers else "ahead of the loop") in caplog.text


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
    assert "goes on in epoch 1 behind the 8 of 26 samples seen: the 18 others once each" in caplog.text
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
    assert "it begins epoch 1 again" in caplog.text
    assert (other["step"], other["total"], len(other["seen"])) == (20, 20, 12), "two whole epochs"
    assert_every_sample_once(other["seen"], 24)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 30}, "24 samples in the order of"),
        (
            {"arguments": {"train_sampling_strategy": "group_by_length"}},
            "of the 8 samples seen, up to 8 are seen twice, and of the others up to 8 never",
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


def layout(unit: int, fetches: int = 1, streams: int = 1) -> LoaderLayout:
    return LoaderLayout(unit="samples", fetches=fetches, per_fetch=unit, batch_size=unit, streams=streams)


def position(**values: Any) -> Position:
    return Position(
        **{
            "step": 1,
            "epoch": 0,
            "batches": 0,
            "length": None,
            "cuts": (),
            "layout": layout(1),
            "accumulation": 1,
            "ranks": 1,
            "samples": 1,
            **values,
        }
    )


def taken_by(chosen: Continuation, now: LoaderLayout, streams: list[list[int]], batches: int) -> list[int]:
    """What a loader gives without what is left out, after the batches that are skipped."""
    cuts = chosen.cuts or [(0, 0)] * len(streams)
    left = [
        [each for index, each in enumerate(stream) if not head <= index < tail]
        for stream, (head, tail) in zip(streams, cuts, strict=True)
    ]
    skipped, taken = (now.taken(each * now.fetches) for each in (chosen.skip, chosen.skip + batches))
    return [each for stream, a, b in zip(left, skipped, taken, strict=True) for each in stream[a:b]]


@pytest.mark.parametrize("seed", range(50))
def test_any_chain_of_resumes_gives_every_sample_of_an_epoch_once(seed: int) -> None:
    """Of ranks, batches and windows in any order; of several streams that are taken from in turn, too."""
    chance = random.Random(seed)
    count = chance.choice([1, 1, 2, 3])
    size = chance.randint(20, 200)
    streams = [[stream * 1000 + index for index in range(size)] for stream in range(count)]
    seen: list[int] = []
    found = position(layout=layout(1, streams=count))
    while len(seen) < size * count:
        now = layout(chance.randint(1, 9), chance.choice([1, 1, 2, 3]), count)
        accumulation = chance.randint(1, 4)
        whole = size if count == 1 else None
        chosen = continuation(found, now, accumulation, whole=whole)
        assert chosen.done == len(seen)
        assert chosen.skip % accumulation == 0
        batches = chance.randint(1, 5) * accumulation
        here = taken_by(chosen, now, streams, batches)
        found = position(
            batches=chosen.skip + batches, cuts=chosen.cuts, layout=now, accumulation=accumulation
        )
        if not here or any(at > size for at in found.done(None)):
            break  # the epoch ends within this step
        seen += here
        exact = continuation(found, now, accumulation, whole=whole)
        assert (exact.skip, exact.cuts) == (chosen.skip + batches, chosen.cuts), "unchanged: as it was"
    assert set(Counter(seen).values()) <= {1}


@pytest.mark.parametrize(
    "now",
    [
        replace(layout(4), unit=""),
        replace(layout(4), unit="batches"),
        layout(4, streams=2),
        replace(layout(6), unit="", per_fetch=1),
    ],
    ids=["shared by files", "batches of a user's", "other workers", "cut by transformers"],
)
def test_an_epoch_whose_rest_cannot_be_told_begins_again_and_says_so(now: LoaderLayout) -> None:
    found = position(batches=5, layout=layout(6))
    chosen = continuation(found, now, 2, whole=None)
    assert chosen == Continuation(epoch=0, again=True)
    steps = Steps(epochs=3, per_epoch=7, batches=7, total=20)
    assert "begins epoch 0 again" in note(found, found, chosen, steps, rest="")


def test_a_change_is_said_with_numbers() -> None:
    found = position(step=8, epoch=1, batches=2, layout=layout(8), ranks=2, samples=8)
    steps = Steps(epochs=3, per_epoch=7, batches=7, total=20)
    now = replace(found, layout=layout(4), ranks=1, samples=4)
    chosen = continuation(found, now.layout, 1, whole=26)
    text = note(found, now, chosen, steps, rest="goes on")
    assert "step 8 was saved by 2 ranks with 8 samples in a step" in text
    assert "resumed by 1 rank with 4 samples in a step: it goes on. Training ends at step 20" in text
    assert "it begins epoch 1." in note(found, now, Continuation(epoch=1), steps, rest="goes on")


def test_steps_are_those_of_the_stock_trainer_where_nothing_has_changed() -> None:
    for length, accumulation, done in itertools.product((1, 5, 6, 13), (1, 2, 5), (1, 2, 3, 7, 11)):
        per_epoch = -(-length // accumulation)
        epoch, step = divmod(done, per_epoch)
        batches = step * accumulation
        found = position(step=done, epoch=epoch, batches=batches, length=length, accumulation=accumulation)
        chosen = continuation(found, found.layout, accumulation, whole=length)
        for total in (done + 1, done + 2 * per_epoch, 100):
            stock = Steps(epochs=-(-total // per_epoch), per_epoch=per_epoch, batches=length, total=total)
            for fixed in (True, False):
                assert stock.after(found, chosen, stock, accumulation, fixed=fixed) == stock


def test_a_training_that_has_ended_makes_no_further_step() -> None:
    found = position(step=8, epoch=1, batches=2, length=6)
    chosen = continuation(found, found.layout, 1, whole=6)
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
