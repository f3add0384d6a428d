"""What a checkpoint holds never runs in Lightning, whoever reads it, unless pickles are allowed."""

from __future__ import annotations

import pickle
import shutil
from contextlib import suppress
from functools import partial

import lightning as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ckpt
from ckpt_core import CheckpointError, EverySteps, KeepBest, UnsafeCheckpointError
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.pickle_jobs import PLANTED, loads_on_ranks
from tests.kit.ranks import run_ranks
from tests.support.canary import Canary, Recorder, plantings, traces_in


class Small(BoringModel):
    """With a metric to rank checkpoints by, and hyperparameters."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("measure", float(-self.trainer.global_step))
        return loss


def trainer_of(root, max_steps=4, **options):
    checkpoint = ShardedCheckpoint(root, save=EverySteps(2), keep=KeepBest("measure", n=2), **options)
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        num_sanity_val_steps=0,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("canaries") / "run"
    trainer_of(root).fit(Small())
    return root


@pytest.fixture
def recorder(monkeypatch):
    """Fails the test if an unpickler without a guard was reached by a canary."""
    found = Recorder()
    with found.watching(monkeypatch):
        yield found
    assert found.seen == []


def told(act):
    """Do it; whatever is wrong with the checkpoint is told by an error of ours."""
    with suppress(CheckpointError):
        act()


def walk(root, path, *, words=()):
    """Every way in which Lightning comes to a checkpoint; a word stands for one of the root's."""
    for chosen in (*words, str(path)):
        told(lambda chosen=chosen: trainer_of(root, 5).fit(Small(), ckpt_path=chosen))
    trainer = trainer_of(root)
    for run in (trainer.validate, partial(trainer.test, verbose=False), trainer.predict):
        told(lambda run=run: run(Small(), ckpt_path=str(path)))
    for load in (Small.load_from_checkpoint, partial(lightning_ckpt.load_from_checkpoint, Small)):
        # Of its own files Lightning tells with torch's error.
        with suppress(CheckpointError, pickle.UnpicklingError):
            load(str(path))


@pytest.mark.slow
@pytest.mark.usefixtures("recorder")
def test_no_canary_in_any_file_of_ours_runs_in_lightning(saved, tmp_path):
    newest = "step-000000004"
    for name, plant in plantings(saved / newest, tmp_path / "traces"):
        # What the core finds out by itself is in tests/guarantees/test_canaries.py.
        if not name.endswith(("forged", "strangers")) or "padded" in name:
            continue
        root = tmp_path / name
        shutil.copytree(saved, root)
        plant(root / newest)
        walk(root, root / newest, words=("last", "best"))
    assert traces_in(tmp_path / "traces") == []


@pytest.mark.slow
@pytest.mark.usefixtures("recorder")
def test_no_canary_in_a_file_of_lightnings_own_runs(saved, tmp_path):
    honest = Small()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(honest)
    trainer.save_checkpoint(tmp_path / "honest.ckpt")
    content = torch.load(tmp_path / "honest.ckpt", weights_only=True)
    for key in ("planted", "state_dict", "hyper_parameters", "callbacks"):
        planted = {**content, key: Canary(tmp_path / "traces", key)}
        torch.save(planted, tmp_path / f"{key}.ckpt")
        walk(tmp_path / "run", tmp_path / f"{key}.ckpt")
        with pytest.raises(UnsafeCheckpointError, match=r"(?s)\.ckpt.*allow_pickle=True"):
            trainer_of(tmp_path / "run").fit(Small(), ckpt_path=str(tmp_path / f"{key}.ckpt"))
    assert traces_in(tmp_path / "traces") == []
    walk(tmp_path / "run", tmp_path / "honest.ckpt")


def test_a_file_of_lightnings_own_is_unpickled_only_by_those_who_say_so(tmp_path):
    torch.save({"planted": Canary(tmp_path / "traces", "x")}, tmp_path / "x.ckpt")
    for options, given in (({"allow_pickle": True}, {}), ({}, {"weights_only": False})):
        with suppress(KeyError):  # there is nothing but the canary
            trainer_of(tmp_path / "run", **options).fit(Small(), ckpt_path=str(tmp_path / "x.ckpt"), **given)
        assert traces_in(tmp_path / "traces") == ["x"]
        shutil.rmtree(tmp_path / "traces")


@pytest.mark.slow
@pytest.mark.parametrize("named", ["os.system", "tests.support.canary.raw", 7])
def test_hyperparameters_that_name_a_function_to_call_are_refused(tmp_path, named):
    class Planting(Small):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["hyper_parameters"] = {"width": 3, "_instantiator": named}

    trainer_of(tmp_path / "run", 2).fit(Planting())

    with pytest.raises(UnsafeCheckpointError, match="imported and called"):
        Small.load_from_checkpoint(tmp_path / "run" / "step-000000002")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_nothing_in_a_stock_checkpoint_of_a_sharded_strategy_runs(tmp_path, strategy):
    per_rank = run_ranks(loads_on_ranks, 2, str(tmp_path), strategy, process_group=False, timeout_seconds=180)

    for outcomes in per_rank:
        # What is honest is loaded as ever.
        assert outcomes["sharded"] == outcomes["full"] == outcomes["saved"], outcomes
        for name in (*PLANTED, "full_planted"):
            error = "CorruptCheckpointError" if name == "rank_metadata" else "UnsafeCheckpointError"
            assert outcomes[name].startswith(error), (name, outcomes[name])
            assert str(tmp_path / name) in outcomes[name]
            assert name == "rank_metadata" or "allow_pickle=True" in outcomes[name]
        assert outcomes["trusted"] == outcomes["saved"]
    assert traces_in(tmp_path / "traces") == ["meta"]  # of the load that was told to trust it
