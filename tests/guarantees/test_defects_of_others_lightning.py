"""What stock Lightning does to people's checkpoints, and what happens to them here instead.

docs/defects.md says where each is from, and which tests of ours elsewhere belong to it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Event
from typing import Any

import lightning as pl
import pytest
from fsspec import filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, SaveError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import Job, Model, fit, loader_of
from tests.guarantees.full_disks import fit_on_a_full_disk
from tests.guarantees.stock import still_so
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.reliability, pytest.mark.filterwarnings("ignore")]


def trained_by_stock(root: Path, steps: int, *, ckpt_path: str | None = None, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    trainer.fit(Model(), loader_of("plain"), ckpt_path=ckpt_path)


def every_second_step(where: Path | str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(where, every_n_train_steps=2, **options)


class SlowStore(TorchCheckpointIO):
    """Writes of a step wait until they are let through; tells which have been asked for and which made."""

    def __init__(self, *held: int) -> None:
        super().__init__()
        self.held = {f"step={step}.": Event() for step in held}
        self.asked, self.made = {name: Event() for name in self.held}, Event()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        for name, gate in self.held.items():
            if name in str(path):
                self.asked[name].set()
                assert gate.wait(30)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.made.set()

    def release(self) -> None:
        for gate in self.held.values():
            gate.set()


class Looking(Callback):
    """Lists the directory before the batch after `step`, when that step's write has been asked for."""

    def __init__(self, store: SlowStore, root: Path, step: int) -> None:
        self.store, self.root, self.step = store, root, step
        self.seen: list[str] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 2:
            assert self.store.made.wait(30)  # the write before is durable
        if trainer.global_step == self.step and self.seen is None:
            assert self.store.asked[f"step={self.step}."].wait(30)
            self.seen = sorted(path.name for path in self.root.iterdir())
            self.store.release()


# --- AsyncCheckpointIO --------------------------------------------------------------------------------------


def test_stock_async_io_has_no_checkpoint_at_all_while_the_next_is_written(tmp_path):
    """The loss of peers.md §0: a crash now costs everything, although step 2 was complete."""
    store, root = SlowStore(4), tmp_path / "run"
    looking = Looking(store, root, 4)
    saving = every_second_step(root, save_top_k=1)
    trained_by_stock(tmp_path, 6, callbacks=[looking, saving], plugins=[AsyncCheckpointIO(store)])
    still_so(looking.seen == [], "save_top_k=1 deletes before the queued write is made")


def test_stock_async_io_leaves_files_that_retention_had_removed(tmp_path):
    store, root = SlowStore(2), tmp_path / "run"
    callbacks = [every_second_step(root, save_top_k=1), ReleasedAtTheEnd(store)]
    trained_by_stock(tmp_path, 6, callbacks=callbacks, plugins=[AsyncCheckpointIO(store)])
    still_so(len(list(root.iterdir())) == 3, "files are deleted before they are written, and so they stay")


class ReleasedAtTheEnd(Callback):
    """Lets every write through when training has ended, one way or the other."""

    def __init__(self, store: SlowStore) -> None:
        self.store = store

    def on_train_end(self, *_: Any) -> None:
        self.store.release()

    def on_exception(self, *_: Any) -> None:
        self.store.release()


def test_stock_async_io_crashes_with_a_link_to_the_last_checkpoint(tmp_path):
    store = SlowStore(2)
    callbacks = [ReleasedAtTheEnd(store), every_second_step(tmp_path / "run", save_last="link")]
    try:
        trained_by_stock(tmp_path, 4, callbacks=callbacks, plugins=[AsyncCheckpointIO(store)])
        crashed = False
    except FileNotFoundError:
        crashed = True
    still_so(crashed, "save_last='link' looks for a file that is not there yet")


def test_a_link_to_the_last_checkpoint_works_with_saves_in_the_background(tmp_path):
    linked = every_second_step(tmp_path / "theirs", save_last="link", save_top_k=1)
    fit(Job(root=str(tmp_path), max_steps=4, options={}, trainer={"callbacks": [linked]}))
    assert (tmp_path / "theirs" / "last.ckpt").is_symlink()
    resumed = fit(Job(root=str(tmp_path), max_steps=5, ckpt_path=linked.last_model_path))
    assert min(resumed.losses) == 4


def test_a_failed_save_is_told_once_and_the_trainer_can_fit_again(tmp_path):
    """AsyncCheckpointIO raises its first error again in every teardown."""
    full = OSError(errno.ENOSPC, "No space left on device")
    storage = FaultyStorage(
        LocalStorage(tmp_path / "run"), [Fault(method="create", key="*step-000000002*", error=full, nth=0)]
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ShardedCheckpoint(storage, save=EverySteps(2), keep=KeepLatest(2))],
        use_distributed_sampler=False,
    )
    module = Model()
    with pytest.raises(SaveError, match=r"step 2 was not saved.*No space left"):
        trainer.fit(module, loader_of("sampler"))
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader_of("sampler"))
    assert CheckpointManager(tmp_path / "run").latest().step == 6


@pytest.mark.slow
@pytest.mark.distributed
def test_a_full_disk_is_told_on_every_rank_of_a_sharded_training(tmp_path):
    """Under ModelParallel Lightning never drains AsyncCheckpointIO: the fit returns as if well."""
    for error in run_ranks(fit_on_a_full_disk, 2, str(tmp_path), process_group=False, timeout_seconds=200):
        assert "step 2 was not saved" in error
        assert "rank 1" in error
        assert "No space left on device" in error
    assert not list((tmp_path / "run").glob("*/COMMITTED"))


# --- retention and cadence ----------------------------------------------------------------------------------


def test_stock_cannot_keep_the_newest_few_without_a_metric(tmp_path):
    with pytest.raises(MisconfigurationException) as refused:
        ModelCheckpoint(tmp_path, monitor=None, save_top_k=3)
    still_so("save_top_k=3" in str(refused.value), "save_top_k needs a metric")


def test_stock_refuses_two_reasons_to_save_at_once(tmp_path):
    with pytest.raises(MisconfigurationException) as refused:
        ModelCheckpoint(tmp_path, every_n_train_steps=10, every_n_epochs=1)
    still_so("mutually exclusive" in str(refused.value), "cadences exclude one another")


def test_stock_forgets_what_an_earlier_process_saved(tmp_path):
    for steps in (2, 4):
        trained_by_stock(tmp_path, steps, callbacks=[every_second_step(tmp_path / "run", save_top_k=1)])
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    still_so(len(left) == 2, "checkpoints of an earlier process are never counted again")


def test_retention_counts_what_earlier_processes_saved(tmp_path):
    for steps in (2, 4, 6):
        options = {"save": EverySteps(2), "keep": KeepLatest(2)}
        fit(Job(root=str(tmp_path), max_steps=steps, ckpt_path="last", options=options))
    assert [info.step for info in CheckpointManager(tmp_path / "run").checkpoints()] == [4, 6]


def test_stock_writes_the_last_checkpoint_twice(tmp_path):
    trained_by_stock(tmp_path, 4, callbacks=[every_second_step(tmp_path / "run", save_last=True)])
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if not path.is_symlink())
    still_so("last.ckpt" in names and len(names) == 2, "save_last=True is a second whole copy")


def test_the_last_checkpoint_is_found_without_a_second_copy(tmp_path):
    job = {"root": str(tmp_path), "options": {"save": EverySteps(2), "keep": KeepLatest(1)}}
    first = fit(Job(max_steps=4, **job))
    assert [path.name for path in (tmp_path / "run").glob("*/COMMITTED")] == ["COMMITTED"]
    assert first.last == f"{tmp_path}/run/step-000000004"
    assert min(fit(Job(max_steps=5, ckpt_path="last", **job)).losses) == 4


# --- remote roots -------------------------------------------------------------------------------------------


def test_stock_deletes_the_remote_checkpoint_of_another_run(tmp_path):
    """The loss of peers.md §0: the run resumed from is gone at the first save of the next (#21813)."""
    store = filesystem("memory")
    first = every_second_step("memory://stock/run1", save_top_k=1)
    trained_by_stock(tmp_path / "1", 2, callbacks=[first])
    assert store.find("/stock/run1")
    second = every_second_step("memory://stock/run2", save_top_k=1)
    trained_by_stock(tmp_path / "2", 4, ckpt_path=first.best_model_path, callbacks=[second])
    still_so(not store.find("/stock/run1"), "resuming elsewhere deletes what was resumed from")
