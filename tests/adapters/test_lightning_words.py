"""What users of Lightning are told, and how weights come out without a Trainer of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from ckpt_core import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    EverySteps,
    IncompatibleCheckpointError,
    KeepBest,
)
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO, load_from_checkpoint

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

    validation_step = training_step

    def configure_optimizers(self):
        kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
        return kind(self.parameters(), lr=0.01)


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


@pytest.mark.parametrize("where", ["step-000000002", "."])
def test_a_trainer_without_the_callback_says_what_reads_the_checkpoint(trained, where):
    path, root = trained[0] / where, trained[0]
    with pytest.raises(ConfigError, match=rf"add lightning_ckpt\.ShardedCheckpoint\('{root}'\)"):
        trainer_of().validate(Sized(3), data(), ckpt_path=path, verbose=False)


@pytest.mark.slow
def test_it_says_so_in_a_process_that_never_imported_us(trained):
    script = f"""
import sys, torch, lightning as pl
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = pl.Trainer(accelerator="cpu", logger=False)
assert "lightning_ckpt._hooks" not in sys.modules
assert "torch.distributed.checkpoint" not in sys.modules or "ckpt_core.manager" not in sys.modules
try:
    trainer.test(BoringModel(), ckpt_path={str(trained[0])!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    )
    assert "ConfigError" in done.stdout
    assert "ShardedCheckpoint(" in done.stdout


def test_fabric_is_told_that_the_plugin_does_nothing_for_it(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[ShardedCheckpointIO(tmp_path / "run")])
    with pytest.raises(ConfigError, match="With Fabric, leave it out and call"):
        fabric.save(tmp_path / "x", {"model": torch.nn.Linear(2, 2)})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("plugins", ["none", "ours"])
def test_fabric_is_told_what_reads_our_directories(trained, tmp_path, plugins):
    theirs = {"plugins": [ShardedCheckpointIO(tmp_path / "run")]} if plugins == "ours" else {}
    fabric, (root, _) = Fabric(accelerator="cpu", devices=1, **theirs), trained
    newest = root / "step-000000002"
    for load in (fabric.load, lambda path: fabric.load_raw(path, torch.nn.Linear(2, 2))):
        with pytest.raises(ConfigError, match=rf"CheckpointManager\('{root}'\).*name='step-000000002'"):
            load(newest)
        with pytest.raises(ConfigError, match=rf"CheckpointManager\('{root}'\).*optimizer\)\)$"):
            load(root)
        with pytest.raises(FileNotFoundError):
            load(root / "nothing")
    plain = tmp_path / "weights.pt"
    torch.save({"a": 1}, plain)
    assert Fabric(accelerator="cpu", devices=1).load(plain) == {"a": 1}


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
        ({"monitor": "val_loss", "save_top_k": 2}, r"monitor= is no option here; write keep=KeepBest"),
        ({"every_n_train_steps": 5}, r"write save=EverySteps\(500\)"),
        ({"filename": "{epoch}"}, "step-000000500"),
        ({"save_weights_only": True}, "load_from_checkpoint"),
        ({"kep": None}, "did you mean keep="),
        ({"save_last": "link"}, "save_last"),
    ],
)
@pytest.mark.parametrize("kind", [ShardedCheckpoint, ShardedCheckpointIO])
def test_the_words_of_a_model_checkpoint_are_answered_with_ours(tmp_path, kind, wrong, right):
    with pytest.raises(ConfigError, match=right):
        kind(tmp_path, **wrong)


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
        (newest, "best", 'keep=KeepBest\\("val_loss"\\)'),
        (ranks, "best", "has the metric 'val_loss'"),
    ):
        with pytest.raises(CheckpointNotFoundError, match=told):
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


def test_best_is_that_of_a_model_checkpoint_where_ours_ranks_nothing(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=1)
    trainer = trainer_of(ShardedCheckpoint(tmp_path / "run"), theirs)
    trainer.fit(Sized(3), data())
    for path in ("best", None):
        trainer.validate(dataloaders=data(), ckpt_path=path, verbose=False)
        assert Path(trainer.ckpt_path).parent == tmp_path / "theirs"


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
