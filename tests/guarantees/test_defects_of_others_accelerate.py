"""What stock Accelerate and the stock Trainer do to people's checkpoints, and what happens here instead.

docs/defects.md says where each is from, and which tests of ours elsewhere belong to it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import accelerate_ckpt
from tests.adapters.accelerate_jobs import Job, accelerator, enable, forget_accelerators, prepare
from tests.guarantees.stock import still_so

pytestmark = [pytest.mark.reliability, pytest.mark.filterwarnings("ignore")]

LIMIT = 2


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    forget_accelerators()
    yield
    forget_accelerators()


@pytest.fixture
def stock(tmp_path: Path) -> Job:
    return Job(
        strategy="single", world=1, root=str(tmp_path), automatic=True, total_limit=LIMIT, enabled=False
    )


class Counted:
    """A registered object: how many steps the whole run has made, over all processes."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def a_process(job: Job, saves: int, *, resume: bool) -> int:
    """One process of a run, which saves after every step: the step that it began with."""
    forget_accelerators()
    made = accelerator(job)
    enable(job, made)
    prepare(job, made)
    counted = Counted()
    made.register_for_checkpointing(counted)
    if resume:
        made.load_state()
    began = counted.steps
    for _ in range(saves):
        counted.steps += 1
        made.save_state()
    made.end_training()
    return began


def checkpoints_of(job: Job) -> Path:
    return Path(job.root) / "checkpoints"


# --- retention and resume under automatic names -------------------------------------------------------------


def test_stock_goes_back_to_stale_checkpoints_after_a_restart(stock: Job) -> None:
    assert a_process(stock, 3, resume=False) == 0
    assert a_process(stock, 2, resume=True) == 3
    still_so(a_process(stock, 0, resume=True) < 5, "a restarted run numbers from 0 and deletes its newest")


def test_every_restart_resumes_the_newest_checkpoint(stock: Job) -> None:
    ours = stock.but(enabled=True)
    assert a_process(ours, 3, resume=False) == 0
    assert a_process(ours, 2, resume=True) == 3
    assert a_process(ours, 1, resume=True) == 5
    assert a_process(ours, 0, resume=True) == 6


def test_stock_rotation_falls_over_any_other_directory(stock: Job) -> None:
    (checkpoints_of(stock) / "best").mkdir(parents=True)
    try:
        a_process(stock, LIMIT + 1, resume=False)
        fell = False
    except IndexError:
        fell = True
    still_so(fell, "rotation takes every directory for a checkpoint with a number")


def test_stock_takes_an_empty_directory_for_the_newest_checkpoint(stock: Job) -> None:
    a_process(stock, 1, resume=False)
    (checkpoints_of(stock) / "checkpoint_7").mkdir()
    try:
        began = a_process(stock, 0, resume=True)
    except (OSError, ValueError, RuntimeError):
        began = None
    still_so(began != 1, "load_state() takes the highest number, whatever is in it")


def test_an_empty_directory_is_no_checkpoint(stock: Job) -> None:
    ours = stock.but(enabled=True)
    a_process(ours, 1, resume=False)
    (checkpoints_of(ours) / "checkpoint_7").mkdir()
    assert a_process(ours, 0, resume=True) == 1


class OnFullDisk(Counted):
    """Whose second save finds the disk full."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        if self.asked == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().state_dict()


def two_saves_on_a_full_disk(job: Job) -> list[str]:
    """The names under which something that could be loaded is left."""
    made = accelerator(job)
    enable(job, made)
    prepare(job, made)
    made.register_for_checkpointing(OnFullDisk())
    made.save_state()
    with pytest.raises(OSError, match="No space left"):
        made.save_state()
    made.end_training()
    return [path.parent.name for path in checkpoints_of(job).glob("*/model.safetensors")]


def test_stock_deletes_the_only_checkpoint_before_it_writes_the_next(stock: Job) -> None:
    """The loss of peers.md §0."""
    left = two_saves_on_a_full_disk(stock.but(total_limit=1))
    still_so("checkpoint_0" not in left, "total_limit=1 deletes first and writes afterwards")


def test_the_only_checkpoint_stays_until_the_next_is_committed(stock: Job) -> None:
    ours = stock.but(total_limit=1, enabled=True)
    made = accelerator(ours)
    enable(ours, made)
    prepare(ours, made)
    made.register_for_checkpointing(OnFullDisk())
    made.save_state()
    with pytest.raises(Exception, match="No space left"):
        made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    made.end_training()
    assert [path.parent.name for path in checkpoints_of(ours).glob("*/COMMITTED")] == ["checkpoint_0"]


# --- the Trainer --------------------------------------------------------------------------------------------


def test_stock_trainer_resumes_from_a_checkpoint_that_says_it_is_incomplete(tmp_path: Path) -> None:
    """The loss of peers.md §0; ours is in tests/adapters/test_trainer.py."""
    from transformers.trainer_utils import get_last_checkpoint

    for step in (3, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-6" / "checkpoint-is-incomplete.txt").touch()
    chosen = get_last_checkpoint(str(tmp_path))
    still_so(chosen == str(tmp_path / "checkpoint-6"), "a half-written checkpoint is resumed from")


# --- exactness ----------------------------------------------------------------------------------------------


def losses(job: Job, *, first: int = 0, save_at: int | None = None, load: str | None = None) -> list[float]:
    """The rest of an epoch from its step `first` on, resumed as the documentation says."""
    forget_accelerators()
    made = accelerator(job)
    torch.manual_seed(3)
    net, optimizer, _, batches = prepare(job, made)
    if load is not None:
        made.load_state(load)
    found: list[float] = []
    for batch in made.skip_first_batches(batches, first) if first else batches:
        loss = net(batch).pow(2).mean()
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if first + len(found) == save_at:
            made.save_state(f"{job.root}/saved")
    return found


def test_stock_resumes_another_training_than_the_one_it_saved(stock: Job) -> None:
    """In the middle of an epoch, with dropout; ours is in tests/adapters/test_accelerate_strategies.py."""
    exact = {}
    for dropout in (0.0, 0.1):
        job = stock.but(automatic=False, seedable=True, dropout=dropout)
        whole = losses(job, save_at=3)
        exact[dropout] = losses(job, first=3, load=f"{job.root}/saved") == whole[3:]
    assert exact[0.0], "the data must be the same, or this shows nothing"
    still_so(not exact[0.1], "random numbers are drawn before the first batch of a resumed epoch")
