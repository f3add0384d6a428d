"""What users of Lightning are told, and how weights come out without a Trainer of ours."""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from ckpt_core import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointOptions,
    ConfigError,
    EverySteps,
    IncompatibleCheckpointError,
    KeepBest,
)
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO, load_from_checkpoint, setup_fabric

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


class Sized(pl.LightningModule):
    def __init__(self, width: int, note: Any = None, *, sgd: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["sgd", "extra"])
        self.net = torch.nn.Linear(2, width)
        self.sgd = sgd
        if extra:
            self.more = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        return self.net(batch).pow(2).mean()

    validation_step = test_step = training_step

    def forward(self, batch):
        return self.net(batch)

    def configure_optimizers(self):
        kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
        return kind(self.parameters(), lr=0.01)


class Logs(Sized):
    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch).pow(2).mean())


def data() -> Any:
    return DataLoader(torch.randn(4, 2), batch_size=1)


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    options = {"max_steps": 2, "callbacks": list(callbacks), **options}
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Sized]:
    root = tmp_path_factory.mktemp("run")
    module = Sized(3, note={"deep": (1, torch.ones(20_000))})
    trainer_of(ShardedCheckpoint(root, save=EverySteps(1))).fit(module, data())
    return root, module


def test_a_module_is_made_from_a_checkpoint_or_a_root_without_a_trainer(trained):
    root, module = trained
    for path in (root, str(root / "step-000000002")):
        loaded = load_from_checkpoint(Sized, path)
        assert loaded.hparams.width == 3
        assert loaded.hparams.note["deep"][0] == 1
        assert torch.equal(loaded.hparams.note["deep"][1], torch.ones(20_000))
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
    earlier = Sized.load_from_checkpoint(root / "step-000000001", map_location="cpu", note="other")
    assert earlier.hparams.note == "other"
    assert not torch.equal(earlier.net.weight, module.net.weight)


def test_a_module_with_other_layers_is_made_from_what_fits(trained):
    root, module = trained
    with pytest.raises(RuntimeError, match=r"more\.weight"):
        load_from_checkpoint(Sized, root, extra=True)
    loaded = load_from_checkpoint(Sized, root, extra=True, strict=False)
    assert torch.equal(loaded.net.weight, module.net.weight)


def test_lightnings_own_files_are_made_into_modules_as_ever(tmp_path):
    trainer = trainer_of(default_root_dir=tmp_path)
    trainer.fit(Sized(3), data())
    path = trainer.checkpoint_callback.best_model_path
    assert load_from_checkpoint(Sized, path).hparams.width == 3
    with pytest.raises(FileNotFoundError):
        Sized.load_from_checkpoint(tmp_path / "nothing")


def test_damage_is_found_when_a_module_is_made(trained, tmp_path):
    import shutil

    copy = tmp_path / "step-000000002"
    shutil.copytree(trained[0] / "step-000000002", copy)
    data_file = copy / "__0_0.distcp"
    content = bytearray(data_file.read_bytes())
    content[len(content) // 2] ^= 1
    data_file.write_bytes(content)
    for file in copy.glob("__0_*.distcp"):
        file.write_bytes(bytes(byte ^ 255 for byte in file.read_bytes()))
    with pytest.raises(CheckpointError):
        load_from_checkpoint(Sized, copy)


def test_fabric_is_told_that_the_plugin_does_nothing_for_it(tmp_path):
    with pytest.raises(ConfigError, match=r"lightning_ckpt\.setup_fabric\(fabric, root\)"):
        Fabric(accelerator="cpu", devices=1, plugins=[ShardedCheckpointIO(tmp_path / "run")])


@pytest.fixture
def handler() -> Iterator[None]:
    """Stock Lightning leaves its own behind if a plugin's teardown raises, as `AsyncCheckpointIO`'s."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_a_plugin_that_no_trainer_holds_says_what_it_is_for(tmp_path):
    plugin = ShardedCheckpointIO(tmp_path / "run")
    trainer = trainer_of(plugins=[AsyncCheckpointIO(plugin)], max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match="not inside another plugin") as caught:
        trainer.fit(Sized(3), data())
    assert "Fabric" not in str(caught.value)


class OwnFormat(TorchCheckpointIO):
    """As a user writes it, for a store or a format of his own."""


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"plugins": OwnFormat()},
        lambda: {"plugins": [AsyncCheckpointIO()]},
        lambda: {"plugins": [AsyncCheckpointIO(AsyncCheckpointIO(OwnFormat()))]},
        lambda: {"plugins": [AsyncCheckpointIO(ShardedCheckpointIO("run"))]},
        lambda: {"strategy": SingleDeviceStrategy("cpu", checkpoint_io=OwnFormat())},
    ],
)
def test_a_writer_of_others_is_refused_and_not_passed_over(tmp_path, given):
    callbacks = [
        ModelCheckpoint(tmp_path / "theirs"),
        ShardedCheckpoint(tmp_path / "ours", save=EverySteps(1)),
    ]
    trainer = trainer_of(*callbacks, default_root_dir=tmp_path, **given())
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(ConfigError, match=r"(AsyncCheckpointIO|OwnFormat).*Leave it out of plugins="):
            run(Sized(3), data())
    assert not list(tmp_path.iterdir())


def test_lightnings_own_writer_may_be_named(tmp_path):
    ours = ShardedCheckpoint(tmp_path / "run")
    trainer_of(ours, plugins=[TorchCheckpointIO()], default_root_dir=tmp_path).fit(Sized(3), data())
    assert Path(ours.last_model_path).name == "step-000000002"


def test_a_plugin_in_its_strategy_saves(tmp_path):
    strategy = SingleDeviceStrategy("cpu", checkpoint_io=ShardedCheckpointIO(tmp_path / "run"))
    trainer_of(strategy=strategy, default_root_dir=tmp_path, enable_checkpointing=False).fit(Sized(3), data())
    assert (tmp_path / "run" / "step-000000002" / "COMMITTED").exists()


@pytest.mark.parametrize("kind", [OwnFormat, AsyncCheckpointIO])
def test_fabric_refuses_a_writer_of_others(tmp_path, kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__}.*Leave it out of plugins="):
        setup_fabric(Fabric(accelerator="cpu", devices=1, plugins=[kind()]), tmp_path)


@pytest.mark.parametrize("way", ["plugin", "callback"])
def test_a_checkpoint_without_a_fit_is_written_as_lightning_does(tmp_path, way):
    given = (
        {"plugins": [ShardedCheckpointIO(tmp_path)]}
        if way == "plugin"
        else {"callbacks": [ShardedCheckpoint(tmp_path)]}
    )
    module, trainer = Sized(3), trainer_of(default_root_dir=tmp_path, **given)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "untrained.ckpt")
    assert torch.equal(Sized.load_from_checkpoint(tmp_path / "untrained.ckpt").net.weight, module.net.weight)
    other = Sized(3)
    trainer.fit(other, data(), ckpt_path=tmp_path / "untrained.ckpt")
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    trainer.validate(other, data(), ckpt_path=tmp_path / "again.ckpt", verbose=False)
    assert torch.equal(other.net.weight, module.net.weight)


@pytest.mark.parametrize("root", [3, b"runs", 0.5, ["runs"], True])
@pytest.mark.parametrize("kind", [ShardedCheckpoint, ShardedCheckpointIO])
def test_what_can_be_no_directory_is_refused_by_name(kind, root):
    with pytest.raises(ConfigError, match="dirpath must be a path or URL, not"):
        kind(root)


def test_what_can_be_no_checkpoint_is_refused_by_name(trained):
    for wrong in (5, b"last", 0.5, ["last"]):
        with pytest.raises(ConfigError, match="ckpt_path must be a path or URL, not"):
            trainer_of(ShardedCheckpoint(trained[0])).fit(Sized(3), data(), ckpt_path=wrong)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (
            {"monitor": "acc", "mode": "min", "save_top_k": 2},
            r'monitor=, mode=, save_top_k= are no .*; write keep=KeepBest\("acc", n=2, mode="min"\)$',
        ),
        ({"mode": "max"}, r'write keep=KeepBest\("val_loss", mode="max"\)$'),
        ({"save_top_k": 3}, r"write keep=KeepLatest\(3\)$"),
        ({"save_top_k": -1}, "without keep= all stay"),
        ({"monitor": "x", "save_top_k": -1}, r'write keep=KeepAll\(\) \| KeepBest\("x"\)$'),
        ({"every_n_train_steps": 5}, r"write save=EverySteps\(5\)$"),
        (
            {"every_n_epochs": 2, "train_time_interval": timedelta(minutes=5)},
            r"write save=EveryEpochs\(2\) \| EverySeconds\(300.0\)$",
        ),
        ({"filename": "{epoch}"}, "step-000000500"),
        ({"save_weights_only": True}, "load_from_checkpoint"),
        ({"max_to_keep": 3}, r"write keep=KeepLatest\(3\)"),
        ({"save_steps": 500}, r"write save=EverySteps\(500\)"),
        ({"kep": None}, "did you mean 'keep'"),
        ({"save_last": "link"}, "save_last"),
    ],
)
@pytest.mark.parametrize("kind", [ShardedCheckpoint, ShardedCheckpointIO])
def test_the_words_of_a_model_checkpoint_are_answered_with_ours(tmp_path, kind, wrong, right):
    with pytest.raises(ConfigError, match=right):
        kind(tmp_path, **wrong)


@pytest.mark.parametrize("kind", [ShardedCheckpoint, ShardedCheckpointIO])
def test_every_option_is_shown_with_its_default_and_its_description(kind):
    shown = inspect.signature(kind).parameters
    fields = {each.name: each.default for each in dataclasses.fields(CheckpointOptions)}
    assert fields.keys() < shown.keys()
    assert not {"self", "words", "monitor"} & shown.keys()
    for name, default in fields.items():
        assert default in {shown[name].default, dataclasses.MISSING}
    described = inspect.getdoc(kind)
    assert [name for name in shown if f"    {name}: " not in described] == []


def test_what_is_read_of_a_model_checkpoint_has_a_value_or_the_reason(tmp_path, trained):
    ranks = ShardedCheckpoint(tmp_path / "ranks", save=EverySteps(1), keep=KeepBest("val_loss", n=9))
    plain = ShardedCheckpoint(tmp_path / "plain", save=EverySteps(1))
    plugin = ShardedCheckpointIO(tmp_path / "plugin", save=EverySteps(1), keep=KeepBest("val_loss"))
    load_from_checkpoint(Sized, trained[0])  # from here on Lightning's own method reads ours
    trainers = [
        trainer_of(ranks, max_steps=4),
        trainer_of(plain, max_steps=4),
        trainer_of(plugins=[plugin], max_steps=4, enable_checkpointing=False),
        trainer_of(plugins=[plugin], max_steps=4, default_root_dir=tmp_path),
    ]
    for trainer in trainers:
        before = trainer.checkpoint_callback
        assert before is None or before.best_model_path == before.last_model_path == ""
        with pytest.raises(CheckpointNotFoundError, match="best_model_path"):
            Sized.load_from_checkpoint("")
        trainer.fit(Logs(3), data(), data())
        callback = trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        best = Logs.load_from_checkpoint(callback.best_model_path, width=3)
        assert best.net.weight.shape == (3, 2)
        assert load_from_checkpoint(Sized, callback.last_model_path).net.weight.shape == (3, 2)
        assert callback.save_weights_only is False
        assert Path(callback.best_model_path).parent == Path(callback.dirpath)
        with pytest.raises(AttributeError, match="step-000000500"):
            callback.filename  # noqa: B018
    for trainer in (trainers[0], *trainers[2:]):
        callback = trainer.checkpoint_callback
        assert (callback.monitor, callback.mode, callback.save_top_k) == ("val_loss", "min", -1)
        assert float(callback.best_model_score) == min(map(float, callback.best_k_models.values()))
        assert callback.best_model_path in callback.best_k_models
        assert isinstance(callback.current_score, torch.Tensor)
    assert (plain.monitor, plain.best_model_score, plain.best_k_models) == (None, None, {})
    with pytest.raises(AttributeError, match=r"settings\.options\.save"):
        plain.every_n_epochs  # noqa: B018
    assert not hasattr(plain, "nonsense")


def test_no_hook_of_a_model_checkpoint_is_left_in_ours():
    theirs = {name for name in vars(ModelCheckpoint) if name in vars(pl.Callback) and name[:2] != "__"}
    kept = {name for name in theirs if getattr(ShardedCheckpoint, name) is getattr(ModelCheckpoint, name)}
    assert theirs
    assert kept == set()


@pytest.mark.parametrize("root", ["", "  ", "s3//bucket/run", "s3:/bucket/run", "gs//bucket", "memory:/x"])
def test_a_directory_that_was_meant_otherwise_is_refused(root):
    with pytest.raises(ConfigError, match="dirpath="):
        ShardedCheckpoint(root)


@pytest.mark.parametrize("root", ["runs", "s3/run", "a//b", "/tmp//x", "memory://run", "~/runs", "c:x"])
def test_a_directory_that_can_be_meant_is_taken(root):
    assert ShardedCheckpoint(root).settings.root


def test_another_model_is_refused_in_lightnings_words(trained):
    root, _ = trained
    for module in (Sized(4), Sized(3, extra=True)):
        with pytest.raises(IncompatibleCheckpointError, match="strict_loading = False") as caught:
            trainer_of(ShardedCheckpoint(root)).fit(module, data(), ckpt_path="last")
        assert "items=" not in str(caught.value)
        assert "rename=" not in str(caught.value)


def test_another_optimizer_is_refused_in_lightnings_words(trained):
    root, _ = trained
    for path in ("last", str(root / "step-000000001")):
        with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer") as caught:
            trainer_of(ShardedCheckpoint(root)).fit(Sized(3, sgd=True), data(), ckpt_path=path)
        assert "SGD" in str(caught.value)
        assert "items=" not in str(caught.value)
    trainer_of(ShardedCheckpoint(root)).validate(Sized(3, sgd=True), data(), ckpt_path="last", verbose=False)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_untrained_weights_are_never_evaluated_instead_of_those_asked_for(tmp_path, verb):
    root = tmp_path / "run"
    ranks, newest = ShardedCheckpoint(root, keep=KeepBest("val_loss")), ShardedCheckpoint(root)
    for callback, path, told in (
        (newest, "last", "no weights to"),
        (newest, str(root), "no weights to"),
        (newest, "best", "best"),
        (ranks, "best", "best"),
    ):
        with pytest.raises((CheckpointNotFoundError, ValueError), match=told):
            getattr(trainer_of(callback), verb)(Sized(3), data(), ckpt_path=path)
    assert not root.exists()


def test_an_evaluation_after_a_fit_takes_the_newest_where_nothing_ranks_them(tmp_path):
    trainer = trainer_of(ShardedCheckpoint(tmp_path))
    module = Sized(3)
    trainer.fit(module, data())
    trained = module.net.weight.detach().clone()
    torch.nn.init.zeros_(module.net.weight)
    trainer.validate(dataloaders=data(), verbose=False)

    assert torch.equal(module.net.weight, trained)


def test_best_is_that_of_the_first_checkpoint_callback_as_without_us(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=1)
    ours = ShardedCheckpoint(tmp_path / "run")
    trainer = trainer_of(theirs, ours)
    trainer.fit(Sized(3), data())
    for path in ("best", None):
        trainer.validate(dataloaders=data(), ckpt_path=path, verbose=False)
        assert Path(trainer.ckpt_path).parent == tmp_path / "theirs"
    assert ours.best_model_path == ours.last_model_path == str(tmp_path / "run" / "step-000000002")


class Unsavable(pl.Callback):
    def state_dict(self):
        return {"function": lambda: None}


def test_a_callback_whose_state_cannot_be_stored_is_named(tmp_path):
    trainer = trainer_of(Unsavable(), ShardedCheckpoint(tmp_path, save=EverySteps(1)))
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Sized(3), data())

    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "Unsavable" in told
    assert "allow_pickle" in told
