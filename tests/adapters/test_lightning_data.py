"""Lightning goes on in the data where it stopped, with any loader; on other ranks each sample comes once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.data import LoaderPosition
from ckpt_core.state import decode_items
from lightning_ckpt import _state
from tests.adapters.lightning_data_jobs import DataJob, Trained, loader, train, train_one
from tests.kit.ranks import run_ranks

# Lightning warns of small data sets and few workers, and torchdata of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

EPOCH = 6
KINDS = (
    *("plain", "own generator", "stateful", "stream"),
    *("min_size", "max_size", "max_size_cycle", "streams, max_size", "streams, max_size_cycle"),
    "streams with states, max_size",
)


def assert_exact(root: Path, kind: str, places: dict[str, int], **job: Any) -> None:
    """One training that saves at every step, and one that resumes at each of these places."""
    full = train_one(DataJob(root=str(root / "full"), loader=kind, saves=True, **job))
    stock = train_one(DataJob(root=str(root / "stock"), loader=kind, **job))
    wrong = {}
    for place, at in places.items():
        path = str(root / "full" / f"step-{at:09d}")
        resumed = train_one(DataJob(root=str(root / place), loader=kind, seed=77, ckpt_path=path, **job))
        if resumed.steps != full.steps[at:]:
            wrong[place] = resumed.steps[:2], full.steps[at : at + 2]
    assert full.steps == stock.steps, "saving changes the data"
    assert wrong == {}


def places(epoch: int) -> dict[str, int]:
    return {"mid-epoch": 2, "last batch but one": epoch - 1, "edge": epoch, "second epoch": epoch + 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_sees_the_data_of_the_uninterrupted_training(tmp_path, kind):
    assert_exact(tmp_path, kind, places(3 if kind == "min_size" else EPOCH), max_epochs=2)


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_resume_of_epochs_that_are_cut_short_is_exact(tmp_path, kind):
    assert_exact(tmp_path, kind, places(4), max_epochs=2, trainer={"limit_train_batches": 4})


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("restartable", {"limit_train_batches": 4}),
        ("stateful, restartable", {"limit_train_batches": 4}),
        ("stateful, restartable", {"limit_train_batches": 4, "val_check_interval": 2}),
        ("stateful, sized restartable", {"limit_train_batches": 0.4}),
        ("stateful, shorter than the limit", {"limit_train_batches": 4}),
        pytest.param("stateful, workers", {"limit_train_batches": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_stream_in_epochs_by_a_limit_goes_on_as_it_would_have(tmp_path, kind, trainer):
    """Where the data set goes on after the limit, and where its iterator begins again."""
    assert_exact(tmp_path, kind, {**places(4), "two epochs later": 8}, max_epochs=3, trainer=trainer)


def test_a_stream_that_persistent_workers_read_ahead_is_told_at_the_limit(tmp_path, caplog):
    job = DataJob(root=str(tmp_path), loader="stateful, persistent", max_epochs=2, saves=True)
    train_one(replace(job, trainer={"limit_train_batches": 2}))
    assert caplog.text.count("a resume from here begins its stream again") == 1
    caplog.clear()
    train_one(replace(job, root=str(tmp_path / "whole"), loader="stateful, restartable"))
    assert "begins its stream again" not in caplog.text


@pytest.mark.slow
def test_persistent_workers_resume_exactly(tmp_path):
    assert_exact(tmp_path, "persistent", places(EPOCH))


def test_a_stream_without_state_is_drawn_again_with_a_warning(tmp_path):
    train_one(DataJob(root=str(tmp_path), loader="stream", saves=True, max_steps=3))
    resumed = train_one(DataJob(root=str(tmp_path), loader="stream", ckpt_path="last", max_steps=4))
    assert resumed.samples == [12, 13, 14, 15]
    assert any("3 batches of an iterable data set are drawn again" in line for line in resumed.logged)


@pytest.mark.parametrize(
    ("kind", "why", "at"),
    [
        ("batches", "it is no torch DataLoader", 0),
        ("keeps its iterator", "it keeps an iterator of its own", 0),
        ("reads ahead", "it has drawn 2 batches of this epoch for 1", 1),
    ],
)
def test_a_loader_that_hides_its_position_is_told_by_the_first_save(tmp_path, kind, why, at):
    job = DataJob(root=str(tmp_path), loader=kind, saves=at > 0, max_steps=2)
    logged = train_one(job).logged
    assert [line for line in logged if "cannot be saved" in line] == [logged[0]], "once"
    assert why in logged[0]


def test_a_stream_in_other_batches_ends_its_epoch_with_its_last_sample(tmp_path):
    train_one(DataJob(root=str(tmp_path), loader="sized stream", saves=True, max_steps=4))
    job = DataJob(root=str(tmp_path), loader="sized stream, other batches", ckpt_path="last", max_epochs=1)
    resumed = train_one(job)
    assert resumed.samples == list(range(12, 24))
    assert any(
        "4 samples are seen twice: batches are of 6 now, and were of 4" in each for each in resumed.logged
    )


def test_batches_that_lightning_drew_ahead_are_not_counted_as_seen(tmp_path):
    train_one(DataJob(root=str(tmp_path), loader="restartable", saves=True, max_steps=2))
    content = (tmp_path / "step-000000002" / "rank-00000.json").read_bytes()
    (state,) = decode_items(content, "rank-00000.json").values[_state.POSITIONS]["training"]
    (note,) = LoaderPosition(loader("restartable")).restore(state, same_ranks=False)
    assert "2 batches of 4, is seen twice" in note


@pytest.mark.distributed
def test_data_on_other_ranks(tmp_path):
    """Several trainings in one pair of ranks, for starting those is what takes long."""

    def job(name: str, loader: str, path: str | None = None, **options: Any) -> DataJob:
        return DataJob(root=str(tmp_path / name), loader=loader, ckpt_path=path, max_epochs=2, **options)

    def saved(name: str, step: int) -> str:
        return str(tmp_path / name / f"step-{step:09d}")

    alone = train_one(job("alone", "large", saves=True, max_steps=9))
    ranks = run_ranks(
        train,
        2,
        job("two", "large", saves=True),
        job("two again", "large", saved("two", 5), seed=77),
        job("two at the edge", "large", saved("two", 12), seed=77),
        job("from one", "large", saved("alone", 9), saves=True, max_steps=12),
        job("custom", "custom sampler", saves=True, max_steps=5),
        process_group=False,
        timeout_seconds=240,
    )
    two, again, edge, from_one, custom = zip(*ranks, strict=True)
    then = train_one(job("from two", "large", saved("from one", 12), max_steps=30))
    whole = train_one(job("from the edge", "large", saved("two", 12)))
    of_custom = train_one(job("of custom", "custom sampler", saved("custom", 5), max_steps=19))

    for first, second, third in zip(two, again, edge, strict=True):
        assert second.steps == first.steps[5:], "the sampler that Lightning injects goes on exactly"
        assert third.steps == first.steps[12:]
    assert_once(90, [alone, *from_one], then, epoch=8)
    assert sorted(whole.samples) == sorted(range(90)), "after the edge comes a whole epoch, and no other"
    assert len(whole.steps) == 23
    assert_once(90, custom, of_custom, epoch=13)
    assert any("after 36 of 90 samples: 2 rank(s) share the other 54" in line for line in from_one[0].logged)


def assert_once(
    samples: int, before: list[Trained] | tuple[Trained, ...], last: Trained, *, epoch: int
) -> None:
    """In the epoch that ends in the last training, after so many steps, every sample is seen once."""
    seen = Counter(sample for each in before for sample in each.samples)
    seen.update(int(each) for step in last.steps[:epoch] for each in step[0][0])
    assert seen == Counter(range(samples))
