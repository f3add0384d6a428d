"""When the Lightning adapter saves and what stays, on one device."""

from __future__ import annotations

import logging
import signal
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import fsspec
import lightning as pl
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from ckpt_core import (
    CheckpointManager,
    ConfigError,
    EverySteps,
    KeepBest,
    KeepLatest,
    OnPreemption,
)
from ckpt_core.names import original_name
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO
from tests.adapters.lightning_jobs import Job, Model, committed, fit, loader_of, make_trainer

# Lightning warns of small data sets and few workers, and torchdata of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


def steps(root: Path) -> list[int]:
    return [info.step for info in CheckpointManager(root).checkpoints()]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
def test_policies_written_as_plain_values_decide_what_is_saved_and_kept(tmp_path, plugin):
    options = {"save": {"every_steps": 2}, "keep": {"latest": 2, "every": 4}}
    fit(Job(root=str(tmp_path), plugin=plugin, max_steps=11, options=options))

    assert steps(tmp_path / "run") == [4, 8, 10, 11]


def test_without_a_save_policy_only_the_last_step_is_saved(tmp_path):
    fit(Job(root=str(tmp_path), max_steps=4, options={}))

    assert steps(tmp_path / "run") == [4]


def test_the_last_step_can_be_left_out(tmp_path):
    fit(Job(root=str(tmp_path), max_steps=4, options={"save": EverySteps(3), "save_last": False}))

    assert steps(tmp_path / "run") == [3]


def test_a_save_that_is_due_before_a_validation_waits_for_its_metric(tmp_path):
    options = {"save": EverySteps(4), "keep": KeepLatest(1) | KeepBest("val_loss")}
    outcome = fit(
        Job(
            root=str(tmp_path),
            max_steps=12,
            validate=True,
            options=options,
            trainer={"val_check_interval": 4},
        )
    )

    infos = CheckpointManager(tmp_path / "run").checkpoints()
    best = min(infos, key=lambda info: info.metrics["val_loss"])
    assert len({info.metrics["val_loss"] for info in infos}) == len(infos)
    assert outcome.best == f"{tmp_path}/run/{best.name}"
    assert outcome.last == f"{tmp_path}/run/step-000000012"


def test_a_preemption_signal_saves_once_and_stops_without_validating(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    options = {"save": OnPreemption(), "keep": KeepLatest(3)}
    outcome = fit(
        Job(
            root=str(tmp_path),
            max_steps=20,
            validate=True,
            options=options,
            model={"signal_at": (0, 4)},
            trainer={"min_epochs": 2},
        )
    )

    assert outcome.preempted
    assert outcome.step == 5
    assert outcome.validations == 0
    assert committed(tmp_path / "run") == ["step-000000005"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_preempted_run_goes_on_where_it_stopped(tmp_path):
    full = fit(Job(root=str(tmp_path / "full"), max_steps=9, options={}))
    job = {"root": str(tmp_path / "cut"), "max_steps": 9, "options": {"save": OnPreemption()}}
    fit(Job(model={"signal_at": (0, 4)}, **job))
    resumed = fit(Job(ckpt_path="last", **job))

    assert resumed.weights == full.weights
    assert min(resumed.losses) == 5


def test_an_exception_surfaces_as_it_is_and_starts_no_save(tmp_path):
    outcome = fit(
        Job(root=str(tmp_path), max_steps=9, model={"raise_at": (0, 5)}, expect="ZeroDivisionError")
    )

    assert outcome.error == "ZeroDivisionError: rank 0 broke at step 5"
    assert steps(tmp_path / "run") == [3]


def test_a_trainer_can_fit_again_and_be_tested_afterwards(tmp_path):
    trainer, checkpoint = make_trainer(Job(root=str(tmp_path), max_steps=4, options={"save": EverySteps(2)}))
    module = Model()
    trainer.fit(module, loader_of("sampler"))
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader_of("sampler"), ckpt_path="last")
    trainer.validate(module, torch.utils.data.DataLoader(torch.zeros(4, 8)), ckpt_path="last", verbose=False)
    trainer.save_checkpoint(tmp_path / "export" / "final.ckpt")

    assert steps(tmp_path / "run") == [2, 4, 6]
    assert committed(tmp_path / "export") == ["final.ckpt"]
    assert checkpoint.last_model_path == f"{tmp_path}/run/step-000000006"


@pytest.mark.slow
def test_save_checkpoint_and_a_model_checkpoint_go_through_the_core(tmp_path):
    theirs = ModelCheckpoint(
        tmp_path / "theirs", monitor="loss", save_top_k=2, every_n_train_steps=2, save_last=True
    )
    fit(Job(root=str(tmp_path), max_steps=6, options={}, trainer={"callbacks": [theirs]}))

    names = committed(tmp_path / "theirs")
    assert "last.ckpt" in names
    assert sorted(names) == sorted({Path(path).name for path in theirs.best_k_models} | {"last.ckpt"})
    resumed = fit(Job(root=str(tmp_path), max_steps=7, ckpt_path=theirs.last_model_path))
    assert min(resumed.losses) == 6


def test_a_plugin_without_a_directory_serves_lightnings_own_checkpoint_callback(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=3, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_progress_bar=False,
        plugins=[ShardedCheckpointIO()],
        callbacks=[theirs],
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), loader_of("sampler"))

    assert committed(tmp_path / "theirs") == ["epoch=0-step=6.ckpt", "last.ckpt"]


class Gated(MemoryFileSystem):
    """An object store whose uploads below `.../gated` wait until told how they end."""

    protocol = "gated"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    gate: ClassVar[Future[None]] = Future()
    waiting: ClassVar[Event] = Event()

    def _open(self, path, mode="rb", **kwargs):
        if mode in {"wb", "xb"} and "step=4" in path:
            Gated.waiting.set()
            Gated.gate.result(30)
        return super()._open(path, mode, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if "step=4" in path:
            Gated.waiting.set()
            Gated.gate.result(30)
        return super().pipe_file(path, value, mode, **kwargs)


@pytest.fixture
def gated():
    fsspec.register_implementation("gated", Gated, clobber=True)
    Gated.clear_instance_cache()
    Gated.store.clear()
    Gated.pseudo_dirs[:] = [""]
    Gated.gate, Gated.waiting = Future(), Event()
    return Gated


class Users(Callback):
    """Writes a note into every checkpoint, and pins the second one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step in {3, 5}:
            manager = CheckpointManager(self.root)
            while [info.step for info in manager.checkpoints()][-1:] != [trainer.global_step - 1]:
                Event().wait(0.01)
            # Only the newest: an older one may be on its way out.
            (self.root / f"step={trainer.global_step - 1}.ckpt" / "note.txt").write_text("mine")
        if trainer.global_step == 5:
            manager.pin(4, "for the paper")


def test_what_lightning_removes_counts_no_more_and_what_is_pinned_or_the_users_stays(tmp_path, caplog):
    theirs = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)
    ours = {"save": EverySteps(2), "keep": KeepLatest(2)}
    make = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=8,
        callbacks=[ShardedCheckpoint(tmp_path / "own", **ours), theirs, Users(tmp_path)],
    )  # fmt: skip
    make.fit(Model(), loader_of("plain"))

    assert steps(tmp_path) == [4, 8]
    assert sorted(each.name for each in tmp_path.glob("*.ckpt")) == [
        "step=2.ckpt",
        "step=4.ckpt",
        "step=8.ckpt",
    ]
    assert [each.name for each in (tmp_path / "step=2.ckpt").iterdir()] == ["note.txt"]
    assert "step=4.ckpt was not removed: it is pinned (for the paper)" in caplog.text
    assert (tmp_path / "step=4.ckpt" / "note.txt").read_text() == "mine"


def test_a_stock_file_with_the_name_of_a_checkpoint_is_set_aside(tmp_path, caplog):
    def trained(max_steps: int, *callbacks: Any) -> pl.Trainer:
        theirs = ModelCheckpoint(
            tmp_path, filename="same", save_last=True, every_n_train_steps=2, enable_version_counter=False
        )
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            max_steps=max_steps, callbacks=[theirs, *callbacks],
        )  # fmt: skip
        trainer.fit(Model(), loader_of("plain"), ckpt_path="last")
        return trainer

    trained(2)
    before = {name: (tmp_path / name).read_bytes() for name in ("same.ckpt", "last.ckpt")}
    trained(4, ShardedCheckpoint())

    aside = {original_name(each.name): each for each in tmp_path.glob(".replaced-*")}
    assert {name: aside[name].read_bytes() for name in aside} == before
    assert "stood in the way" in caplog.text
    assert steps(tmp_path) == [4, 4]


class Opener(Callback):
    """Looks while the second save is on its way, then lets it end."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 5 and not Gated.gate.done():
            assert Gated.waiting.wait(30)
            self.seen = steps_at("gated://bucket/run")
            if self.error is None:
                Gated.gate.set_result(None)
            else:
                Gated.gate.set_exception(self.error)


def steps_at(url: str) -> list[int]:
    return [info.step for info in CheckpointManager(url).checkpoints()]


def test_the_old_checkpoint_stays_until_the_new_one_is_committed(tmp_path, gated):
    """The loss that AsyncCheckpointIO with save_top_k=1 allows."""
    opener = Opener()
    theirs = ModelCheckpoint("gated://bucket/run", every_n_train_steps=2, save_top_k=1)
    fit(Job(root=str(tmp_path), max_steps=8, options={}, trainer={"callbacks": [opener, theirs]}))

    assert opener.seen == [2]
    assert steps_at("gated://bucket/run") == [8]


def test_the_old_checkpoint_stays_if_the_new_one_fails(tmp_path, gated):
    opener = Opener(OSError(28, "No space left on device"))
    theirs = ModelCheckpoint("gated://bucket/run", every_n_train_steps=2, save_top_k=1)
    job = Job(
        root=str(tmp_path),
        max_steps=8,
        options={},
        trainer={"callbacks": [opener, theirs]},
        expect="SaveError",
    )
    outcome = fit(job)

    assert "No space left on device" in outcome.error
    assert opener.seen == [2]
    assert steps_at("gated://bucket/run") == [2]


def test_a_checkpoint_of_another_run_is_never_removed(tmp_path, caplog):
    """The loss that a remote `dirpath` has in stock Lightning (#21813)."""
    first = ModelCheckpoint("memory://ours/run1", every_n_train_steps=2, save_top_k=1)
    fit(Job(root=str(tmp_path / "1"), max_steps=2, options={}, trainer={"callbacks": [first]}))
    second = ModelCheckpoint("memory://ours/run2", every_n_train_steps=2, save_top_k=1)
    with caplog.at_level(logging.WARNING):
        fit(
            Job(
                root=str(tmp_path / "2"),
                max_steps=4,
                ckpt_path=first.best_model_path,
                options={},
                trainer={"callbacks": [second]},
            )
        )

    assert steps_at("memory://ours/run1") == [2]
    assert steps_at("memory://ours/run2") == [4]


class Memory(Callback):
    """State of every size, and a record of what loading showed."""

    def __init__(self) -> None:
        self.big = torch.randn(40_000)
        self.small = {"count": 3, "pair": (1, torch.tensor(2.5))}
        self.loaded: dict[str, Any] = {}

    def state_dict(self):
        return {"big": self.big, **self.small}

    def load_state_dict(self, state):
        self.loaded = state

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.order = ["callback", *sorted(checkpoint["state_dict"])[:1]]


class Editing(Model):
    """Hooks that add to a checkpoint, and keep one weight out of loading."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = {"text": "kept", "extra": torch.ones(30_000)}

    def on_load_checkpoint(self, checkpoint):
        self.note = checkpoint["note"]
        self.untouched = self.net[0].bias.detach().clone()
        checkpoint["state_dict"]["net.0.bias"] = torch.full((16,), 7.0)


def test_hooks_and_callback_state_keep_working(tmp_path):
    saving, loading = Memory(), Memory()
    module = Editing()
    trainer, _ = make_trainer(Job(root=str(tmp_path), max_steps=3, trainer={"callbacks": [saving]}))
    trainer.fit(module, loader_of("sampler"))

    other = Editing()
    fresh = other.net[0].bias.detach().clone()
    trainer, _ = make_trainer(Job(root=str(tmp_path), max_steps=0, trainer={"callbacks": [loading]}))
    trainer.fit(other, loader_of("sampler"), ckpt_path="last")

    assert other.note["text"] == "kept"
    assert torch.equal(other.note["extra"], torch.ones(30_000))
    assert torch.equal(other.untouched, fresh)  # nothing had reached the model when the hook ran
    assert torch.equal(other.net[0].bias, torch.full((16,), 7.0))
    assert torch.equal(other.net[0].weight, module.net[0].weight)
    assert torch.equal(loading.loaded["big"], saving.big)
    assert loading.loaded["pair"] == (1, torch.tensor(2.5))
    assert loading.order == ["callback", "net.0.bias"]
    assert (tmp_path / "run" / "step-000000003" / "shared.json").stat().st_size < 50_000


def test_weights_that_the_model_lacks_load_where_it_is_not_strict(tmp_path):
    fit(Job(root=str(tmp_path), max_steps=2))
    module = Model()
    module.extra = torch.nn.Linear(2, 2)
    module.strict_loading = False
    trainer, _ = make_trainer(Job(root=str(tmp_path)))

    trainer.validate(module, torch.utils.data.DataLoader(torch.zeros(4, 8)), ckpt_path="last", verbose=False)

    assert module.extra.weight.shape == (2, 2)


def test_what_cannot_work_is_refused_with_the_way_out(tmp_path):
    loader = loader_of("sampler")
    hidden = type("DeepSpeedStrategy", (SingleDeviceStrategy,), {})
    trainer, _ = make_trainer(Job(root=str(tmp_path)))
    trainer.strategy.__class__ = hidden
    with pytest.raises(ConfigError, match="DeepSpeedStrategy hides its shards"):
        trainer.fit(Model(), loader)

    two = [ShardedCheckpoint(tmp_path / "a"), ShardedCheckpointIO(tmp_path / "b")]
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=two[:1], plugins=two[1:])
    with pytest.raises(ConfigError, match="one ShardedCheckpoint or one ShardedCheckpointIO"):
        trainer.fit(Model(), loader)

    with pytest.raises(ConfigError, match=r"save, keep, upload.* need dirpath="):
        ShardedCheckpoint(save=EverySteps(2))
    with pytest.raises(ConfigError, match="every_stepz"):
        ShardedCheckpoint(tmp_path, save={"every_stepz": 2})


def test_the_other_lightning_package_has_its_own_classes_and_refuses_ours(tmp_path):
    import pytorch_lightning

    from lightning_ckpt.pytorch_lightning import ShardedCheckpoint as TheirCheckpoint
    from lightning_ckpt.pytorch_lightning import ShardedCheckpointIO as TheirIO

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def trainer(max_steps: int, **extra: Any) -> Any:
        return pytorch_lightning.Trainer(
            accelerator="cpu", max_steps=max_steps, logger=False, enable_progress_bar=False, **extra
        )

    trainer(2, callbacks=[TheirCheckpoint(tmp_path / "run")]).fit(Other(), loader_of("sampler"))
    plugin = {"plugins": [TheirIO(tmp_path / "run")], "enable_checkpointing": False}
    trainer(4, **plugin).fit(Other(), loader_of("sampler"), ckpt_path="last")

    assert steps(tmp_path / "run") == [2, 4]
    with pytest.raises(ConfigError, match=r"import it from lightning_ckpt\.pytorch_lightning"):
        trainer(1, callbacks=[ShardedCheckpoint(tmp_path / "x")]).fit(Other(), loader_of("sampler"))
