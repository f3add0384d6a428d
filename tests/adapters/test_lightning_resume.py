"""A resumed training is the uninterrupted one, on one device: same losses, same weights, bit for bit."""

from __future__ import annotations

import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.utils.data import DataLoader

from ckpt_core import AtSteps, CheckpointManager, EverySeconds, EverySteps, TrainState
from ckpt_core.staging import _copies
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO
from tests.adapters.lightning_jobs import Job, Model, Outcome, committed, digest, fit, make_trainer

# Lightning warns of small data sets and few workers, and torchdata of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

EPOCH = 12  # batches; a stream has half of it
UNSAVED = {"save": None, "save_last": False}


def cut_and_resume(root: Path, at: int, steps: int, **job) -> tuple[Outcome, Outcome]:
    """An uninterrupted run, and one that went to step `at`, stopped, and was resumed in a new Trainer."""
    options = {"save": AtSteps([at]), "save_last": False}
    full = fit(Job(root=str(root / "full"), max_steps=steps, options=UNSAVED, **job))
    fit(Job(root=str(root / "cut"), max_steps=at + 1, options=options, **job))
    assert committed(root / "cut" / "run") == [f"step-{at:09d}"]
    resumed = fit(Job(root=str(root / "cut"), max_steps=steps, ckpt_path="last", options=options, **job))
    return full, resumed


def assert_same(full: Outcome, resumed: Outcome, *, first: int) -> None:
    assert sorted(resumed.losses) == list(range(first, len(full.losses)))
    assert resumed.losses == {batch: full.losses[batch] for batch in resumed.losses}
    assert resumed.weights == full.weights


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, EPOCH, EPOCH + 5], ids=["mid-epoch", "end of epoch", "mid second epoch"])
@pytest.mark.parametrize("loader", ["sampler", "stream"])
def test_a_resume_goes_on_at_the_very_next_batch(tmp_path, loader, at):
    full, resumed = cut_and_resume(tmp_path, at, 2 * EPOCH + 2, loader=loader)

    assert_same(full, resumed, first=at)


@pytest.mark.slow
def test_overlapped_staging_saves_the_same(tmp_path):
    job = {"validate": True, "trainer": {"val_check_interval": 2}}
    full = fit(Job(root=str(tmp_path / "full"), max_steps=9, options=UNSAVED, **job))
    cut = {"root": str(tmp_path / "cut"), "options": {"save": EverySteps(1), "staging": "overlapped"}, **job}
    fit(Job(max_steps=5, **cut))
    resumed = fit(Job(max_steps=9, ckpt_path="last", **cut))

    assert_same(full, resumed, first=5)


@pytest.mark.slow
def test_weights_that_averaging_exchanges_do_not_reach_an_overlapped_save(tmp_path, monkeypatch):
    """The copies are held back until somebody waits for them: an exchange that did not would be saved."""
    begin, start = threading.Event(), _copies.start_thread
    monkeypatch.setattr(_copies, "start_thread", lambda work: start(lambda: begin.wait(5) and work()))

    class Averaging(WeightAveraging):
        """Its average is far from the weights."""

        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            for each in self._average_model.parameters():
                each.data.fill_(9)

        def should_update(self, step_idx=None, epoch_idx=None):
            return False

    def tensors_of_every_save(root, **options):
        settings = {"save": EverySteps(1), **options}
        job = Job(root=str(root), max_steps=EPOCH, validate=True, options=settings)
        fit(replace(job, trainer={"val_check_interval": 2, "callbacks": [Averaging()]}))
        return {name: (root / "run" / name / "__0_0.distcp").read_bytes() for name in committed(root / "run")}

    blocking = tensors_of_every_save(tmp_path / "blocking")
    overlapped = tensors_of_every_save(tmp_path / "overlapped", staging="overlapped")
    assert len(blocking) == EPOCH
    assert overlapped.keys() == blocking.keys()
    assert [name for name in blocking if overlapped[name] != blocking[name]] == []


def test_a_plain_loader_resumes_exactly_between_epochs(tmp_path):
    full, resumed = cut_and_resume(tmp_path, EPOCH, 2 * EPOCH, loader="plain")

    assert_same(full, resumed, first=EPOCH)


@pytest.mark.slow
def test_workers_of_the_loader_are_where_they_were(tmp_path):
    full, resumed = cut_and_resume(tmp_path, EPOCH + 3, EPOCH + 8, workers=1)

    assert_same(full, resumed, first=EPOCH + 3)


@pytest.mark.slow
def test_estimating_the_steps_in_configure_optimizers_does_not_lose_the_position(tmp_path):
    full, resumed = cut_and_resume(tmp_path, EPOCH + 3, EPOCH + 8, model={"estimate": True})

    assert_same(full, resumed, first=EPOCH + 3)


def test_a_resume_after_validation_goes_on_exactly(tmp_path):
    trainer = {"val_check_interval": 4, "limit_val_batches": 1}
    full, resumed = cut_and_resume(tmp_path, 5, EPOCH + 8, validate=True, trainer=trainer)

    assert_same(full, resumed, first=5)


@pytest.mark.slow
def test_a_save_due_inside_an_accumulation_window_waits_for_the_optimizer_step(tmp_path):
    job = {"trainer": {"accumulate_grad_batches": 3}}
    full = fit(Job(root=str(tmp_path / "full"), max_steps=6, options=UNSAVED, **job))
    cut = Job(root=str(tmp_path / "cut"), max_steps=3, options={"save": EverySeconds(1e-6)}, **job)
    fit(cut)
    resumed = fit(Job(root=cut.root, max_steps=6, ckpt_path="last", options={"save": EverySteps(100)}, **job))

    assert committed(tmp_path / "cut" / "run")[:3] == ["step-000000001", "step-000000002", "step-000000003"]
    assert_same(full, resumed, first=9)


def test_stopping_and_starting_again_loses_no_step_and_repeats_none(tmp_path):
    full = fit(Job(root=str(tmp_path / "full"), max_steps=9))
    first = fit(Job(root=str(tmp_path / "cut"), max_steps=5))
    second = fit(Job(root=str(tmp_path / "cut"), max_steps=9, ckpt_path="last"))

    assert {**first.losses, **second.losses} == full.losses
    assert second.weights == full.weights


def test_last_starts_fresh_where_nothing_was_committed(tmp_path):
    outcome = fit(Job(root=str(tmp_path), max_steps=2, ckpt_path="last"))

    assert sorted(outcome.losses) == [0, 1]


def test_last_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, caplog):
    fit(Job(root=str(tmp_path), max_steps=6))
    data = next((tmp_path / "run" / "step-000000006").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    with caplog.at_level(logging.ERROR):
        resumed = fit(Job(root=str(tmp_path), max_steps=7, ckpt_path="last"))

    assert min(resumed.losses) == 3
    assert "step-000000006 is committed but damaged" in caplog.text
    infos = CheckpointManager(tmp_path / "run").checkpoints()
    assert [info.step for info in infos] == [3, 6, 7]
    assert all(info.damaged is None for info in infos)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
def test_last_best_a_checkpoint_and_a_root_can_all_be_resumed(tmp_path, plugin):
    options = {"save": {"every_steps": 3}, "keep": {"all": True, "best": {"metric": "loss", "mode": "max"}}}
    job = {"root": str(tmp_path), "plugin": plugin, "options": options}
    fit(Job(max_steps=7, **job))
    run = tmp_path / "run"
    losses = {info.step: info.metrics["loss"] for info in CheckpointManager(run).checkpoints()}
    best = max(losses, key=losses.__getitem__)

    found = {
        path: first_step(Job(max_steps=8, **job), path)
        for path in ("last", "best", str(run / "step-000000003"), str(run))
    }

    assert list(losses) == [3, 6, 7]
    assert list(found.values()) == [7, best, 3, 7]


def first_step(job: Job, ckpt_path: str) -> int:
    copy = Path(job.root).parent / f"{Path(job.root).name}-{abs(hash(ckpt_path))}"
    shutil.copytree(job.root, copy)
    path = ckpt_path.replace(job.root, str(copy))
    resumed = fit(Job(root=str(copy), plugin=job.plugin, options=job.options, max_steps=9, ckpt_path=path))
    return min(resumed.losses)


def test_evaluation_loads_the_weights_alone(tmp_path):
    fitted = fit(Job(root=str(tmp_path), max_steps=6))
    trainer, _ = make_trainer(Job(root=str(tmp_path)))
    module = Model()

    trainer.validate(module, torch.utils.data.DataLoader(torch.zeros(4, 8)), ckpt_path="last", verbose=False)

    assert digest(trainer) == fitted.weights


def test_an_ordinary_lightning_file_loads_as_ever(tmp_path):
    stock = pl.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    module = Model()
    stock.fit(module, torch.utils.data.DataLoader(torch.zeros(48, 8), batch_size=4))
    stock.save_checkpoint(tmp_path / "stock.ckpt")

    path = str(tmp_path / "stock.ckpt")
    outcome = fit(Job(root=str(tmp_path), max_steps=6, loader="plain", ckpt_path=path))

    assert sorted(outcome.losses) == [4, 5]


def test_a_checkpoint_of_the_core_alone_gives_weights_and_optimizer(tmp_path):
    torch.manual_seed(3)
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module.net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "core") as manager:
        manager.save(5, TrainState(model=module, optimizer=optimizer))

    trainer, _ = make_trainer(Job(root=str(tmp_path), max_steps=0))
    other = Model()
    trainer.fit(other, torch.utils.data.DataLoader(torch.zeros(4, 8)), ckpt_path=str(tmp_path / "core"))

    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    saved, loaded = optimizer.state_dict()["state"], trainer.optimizers[0].state_dict()["state"]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[index]["exp_avg"], saved[index]["exp_avg"]) for index in saved)


class ByHand(pl.LightningModule):
    """Trains by its own arithmetic, or not at all."""

    def __init__(self, optimizers: Any, path: Path, *, automatic: bool) -> None:
        super().__init__()
        self.optimizers_given, self.path = optimizers, path
        self.automatic_optimization = automatic
        self.net = torch.nn.Linear(2, 1)
        self.seen = list[float]()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen.append(float(batch[0, 0]))
        loss = self.net(batch).pow(2).mean()
        if not self.automatic_optimization:
            self.net.zero_grad()
            self.manual_backward(loss)
            with torch.no_grad():
                for weight in self.net.parameters():
                    weight.sub_(0.01 * weight.grad)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return self.optimizers_given


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize(("automatic", "optimizers"), [(True, None), (False, None), (False, [])])
def test_a_training_without_an_optimizer_is_saved_and_resumed(tmp_path, automatic, optimizers, plugin):
    path = tmp_path / "run" / "first.ckpt"

    def trained(**options: Any) -> ByHand:
        torch.manual_seed(3)
        module = ByHand(optimizers, path, automatic=automatic)
        given = {"dirpath": tmp_path / "run", "save": EverySteps(2)}
        ours = (
            {"plugins": [ShardedCheckpointIO(**given)], "enable_checkpointing": False}
            if plugin
            else {"callbacks": [ShardedCheckpoint(**given)]}
        )
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            max_epochs=3, **ours,
        )  # fmt: skip
        data = torch.arange(8.0).reshape(4, 2)
        trainer.fit(module, DataLoader(data, batch_size=1, shuffle=True), **options)
        return module

    whole = trained()
    resumed = trained(ckpt_path=path)
    assert resumed.seen == whole.seen[4:]
    assert torch.equal(resumed.net.weight, whole.net.weight)
