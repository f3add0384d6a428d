"""Saves by epochs and tokens under Lightning: counted once each, across resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_core import CheckpointManager, ConfigError, EveryEpochs, EverySteps, EveryTokens
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import Job, fit

pytestmark = pytest.mark.filterwarnings("ignore")
IN_WINDOWS = {"accumulate_grad_batches": 2}  # 12 batches and 6 steps in an epoch


def saved(root: Path, save: object, *, max_steps: int, **job: object) -> list[int]:
    options = {"save": save, "save_last": False, **job.pop("options", {})}  # type: ignore[dict-item]
    fit(Job(root=str(root), max_steps=max_steps, options=options, loader="plain", **job))  # type: ignore[arg-type]
    return [info.step for info in CheckpointManager(root / "run").checkpoints()]


def test_every_other_epoch_is_saved_at_its_end_whatever_was_resumed_in_between(tmp_path):
    save = EveryEpochs(2) | EverySteps(5)

    assert saved(tmp_path, save, max_steps=17, trainer=IN_WINDOWS) == [5, 10, 12, 15]
    # Once from the middle of the third epoch, once from the end of the fourth, once from another's file.
    assert saved(tmp_path, save, max_steps=24, trainer=IN_WINDOWS, ckpt_path="last")[4:] == [20, 24]
    assert saved(tmp_path, save, max_steps=25, trainer=IN_WINDOWS, ckpt_path="last")[6:] == [25]


def test_the_ends_of_epochs_can_be_left_out(tmp_path):
    save = EverySteps(1) & ~EveryEpochs(1)
    assert saved(tmp_path, save, max_steps=8, trainer=IN_WINDOWS) == [1, 2, 3, 4, 5, 7, 8]


def test_an_epochs_checkpoint_has_the_metrics_of_its_validation(tmp_path):
    job = {"trainer": {**IN_WINDOWS, "enable_checkpointing": True}, "validate": True}
    assert saved(tmp_path, EveryEpochs(1), max_steps=7, **job) == [6]
    assert "val_loss" in CheckpointManager(tmp_path / "run").checkpoints()[0].metrics


def test_tokens_are_counted_across_a_resume_from_any_checkpoint(tmp_path):
    """Six in a step; the other's checkpoint, in a root of its own, has them, too."""
    other = ModelCheckpoint(tmp_path / "other", every_n_train_steps=8, save_top_k=-1, filename="at-8")
    job = {"trainer": {**IN_WINDOWS, "callbacks": [other]}, "options": {"tokens": 3}}
    assert saved(tmp_path, EveryTokens(10), max_steps=9, **job) == [2, 4, 5, 7, 9]

    # Now eight: 48 at the other's, 64 at step 10.
    theirs = str(tmp_path / "other" / "at-8.ckpt")
    job = {"trainer": IN_WINDOWS, "options": {"tokens": len}, "ckpt_path": theirs}
    assert saved(tmp_path / "again", EveryTokens(20), max_steps=11, **job) == [10]


def test_tokens_are_counted_for_a_policy_that_comes_later(tmp_path):
    """Six in a step: 24 at the last save of the first policy, which needs none."""
    job = {"trainer": IN_WINDOWS, "options": {"tokens": lambda batch: 3}}
    assert saved(tmp_path, EverySteps(4), max_steps=4, **job) == [4]
    job = {"trainer": IN_WINDOWS, "options": {"tokens": 3}, "ckpt_path": "last"}
    assert saved(tmp_path, EveryTokens(10), max_steps=7, **job) == [4, 5, 7]


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, "numel", ["x"]])
def test_a_count_of_tokens_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="tokens"):
        ShardedCheckpoint("runs/x", save=EveryTokens(5), tokens=wrong)


@pytest.mark.parametrize("tokens", [1.5, None, -1])
def test_a_function_that_counts_no_whole_tokens_is_refused_at_the_first_batch(tmp_path, tokens):
    with pytest.raises(ConfigError, match="the function given as tokens=: the number of a batch must be"):
        saved(tmp_path, EveryTokens(5), max_steps=2, options={"tokens": lambda batch: tokens})


def test_tokens_that_nobody_counts_are_refused_before_training():
    with pytest.raises(ConfigError, match="EveryTokens needs tokens="):
        ShardedCheckpoint("runs/x", save={"every_steps": 5, "every_tokens": 100})
