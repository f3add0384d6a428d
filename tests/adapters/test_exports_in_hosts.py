"""`export=` in every host: one definition, and the last checkpoint is exported when the host ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import accelerate_ckpt
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, Export
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import read_exports
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO, setup_fabric
from tests.adapters.accelerate_jobs import Job, accelerator, prepared, step
from tests.adapters.test_contents_in_hosts import ROWS, Tuned
from tests.adapters.trainer_jobs import TrainerJob, run, trainer
from tests.support.services.hub import running_hub

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]


@pytest.fixture(autouse=True)
def _by_a_writer_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckpt_core.manager._EXPORTER", "tests.guarantees.export_writers:write")
    (tmp_path / "say").mkdir()


def exported(place: Path) -> list[int]:
    return [int(name[5:]) for name in read_exports(LocalStorage(place))[0]]


def export(tmp_path: Path, **words: Any) -> dict[str, Any]:
    return {"to": "hf", "place": str(tmp_path / "place"), "dtype": "bf16", **words}


@pytest.mark.parametrize(
    "host",
    [
        CheckpointManager,
        CheckpointOptions,
        ShardedCheckpoint,
        ShardedCheckpointIO,
        setup_fabric,
        accelerate_ckpt.enable,
        accelerate_ckpt.enable_trainer,
    ],
)
def test_every_host_shows_the_option(host: Callable[..., Any]) -> None:
    assert inspect.signature(host).parameters["export"].default is None
    if isinstance(host, type):
        assert "export: weights in a format of others" in (host.__doc__ or "") or host is CheckpointManager


def test_python_yaml_and_the_environment_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{to: hf, place: /w, when: {every: 10}, dtype: bf16, keep: 3, like: /base}"
    given = Export(to="hf", place="/w", when={"every": 10}, dtype="bf16", keep=3, like="/base")
    (tmp_path / "options.yaml").write_text(f"checkpoint:\n  export: {text}\n")
    assert CheckpointOptions.from_file(tmp_path / "options.yaml") == CheckpointOptions(export=given)
    monkeypatch.setenv("CKPT_SUITE_EXPORT", text)
    made = accelerate_ckpt.enable(accelerator(Job(strategy="single", world=1, root=str(tmp_path))))
    assert accelerate_ckpt.checkpoints(made)._settings.options.export == given


def test_lightning_exports_its_own_saves_and_none_that_are_by_path(tmp_path: Path) -> None:
    callback = ShardedCheckpoint(
        str(tmp_path / "run"),
        save={"every_steps": 3},
        keep={"best": {"metric": "loss", "mode": "min"}},
        export=[export(tmp_path), export(tmp_path, place=str(tmp_path / "best"), when="best")],
    )
    made = pl.Trainer(
        max_steps=7,
        max_epochs=10,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(Tuned(), DataLoader(ROWS, batch_size=4))
    made.save_checkpoint(tmp_path / "by-path" / "one")
    assert exported(tmp_path / "place") == [7]


def test_fabric_exports_what_it_saves(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Linear(2, 2))
    checkpoints = setup_fabric(fabric, tmp_path / "run", export=export(tmp_path))
    fabric.save(tmp_path / "run" / "one", {"model": model, "step": 1})
    checkpoints.close()
    assert exported(tmp_path / "place") == [1]


def test_accelerate_exports_what_has_automatic_names_and_refuses_other_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SUITE_EXPORT", f"{{to: hf, place: {tmp_path / 'place'}}}")
    made, net, *rest = prepared(Job(strategy="single", world=1, root=str(tmp_path / "run")))
    step(made, net, *rest)
    made.save_state()
    made.save_state(str(tmp_path / "elsewhere" / "mine"))
    made.end_training()
    assert len(exported(tmp_path / "place")) == 1
    other = accelerate_ckpt.enable(
        accelerator(Job(strategy="single", world=1, root=str(tmp_path))), export=export(tmp_path)
    )
    with pytest.raises(ConfigError, match="export= is for the checkpoints of one root"):
        other.save_state(str(tmp_path / "elsewhere" / "mine"))


def test_a_trainer_exports_its_best_by_its_own_metric(tmp_path: Path) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    run(
        TrainerJob(
            root=str(tmp_path / "run"),
            steps=6,
            arguments=arguments,
            options={"export": export(tmp_path, when="best")},
        )
    )
    assert exported(tmp_path / "place")


def test_what_a_trainer_exports_to_the_hub_is_what_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.manager._EXPORTER", "ckpt_core.convert:export")
    with running_hub() as hub:
        options = {"endpoint": hub.url, "token": False}
        on_hub = {"place": "hf://user/repo/w", "when": {"every": 1}, "keep": 1, "storage_options": options}
        job = TrainerJob(root=str(tmp_path / "run"), steps=6, options={"export": export(tmp_path, **on_hub)})
        made = trainer(job)
        made.train()
        accelerate_ckpt.disable_trainer(made)
    names = ("config.json", "generation_config.json", "model.safetensors")
    assert sorted(hub.files) == ["w/exports.json", *(f"w/step-000000006/{name}" for name in names)]
    for name in names:
        (tmp_path / name).write_bytes(hub.files[f"w/step-000000006/{name}"])
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    for name, value in made.model.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16), state[name])


def test_an_export_needs_a_root_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export.* need dirpath="):
        ShardedCheckpoint(export=export(tmp_path))
