"""The Hugging Face Trainer: what users of `enable_trainer` may rely on."""

from __future__ import annotations

import errno
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_utils import HubStrategy

import accelerate_ckpt
from ckpt_core import (
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    EveryEpochs,
    EverySteps,
    EveryTokens,
    IncompatibleCheckpointError,
    SaveError,
)
from ckpt_core.cli import main
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import TrainerJob, in_turn, run, trainer
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def committed(root: Path) -> list[str]:
    return sorted((path.parent.name for path in root.glob("*/COMMITTED")), key=lambda name: int(name[11:]))


def after(step: int, losses: dict[int, float]) -> dict[int, float]:
    return {at: loss for at, loss in losses.items() if at > step}


def test_a_resume_is_exact_and_training_is_as_without_us(tmp_path: Path) -> None:
    ours = TrainerJob(root=f"{tmp_path}/ours", options={"stock_files": True})
    stock = TrainerJob(root=f"{tmp_path}/stock", enabled=False)
    whole, without = run(ours), run(stock)
    assert whole["losses"] == without["losses"]
    assert whole["weights"] == without["weights"]
    for step in (3, 9):
        resumed = run(ours.but(root=f"{tmp_path}/from-{step}", resume=f"{tmp_path}/ours/checkpoint-{step}"))
        assert after(step, resumed["losses"]) == after(step, whole["losses"])
        assert resumed["weights"] == whole["weights"]
    read_by_stock = run(stock.but(root=f"{tmp_path}/read", resume=f"{tmp_path}/ours/checkpoint-9"))
    assert read_by_stock["weights"] == whole["weights"]


def test_a_diff_of_full_fine_tuning_names_the_weights_that_lie_in_one_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(TrainerJob(root=str(tmp_path)))
    a, b = (str(tmp_path / f"checkpoint-{step}") for step in (3, 6))
    weights = load_file(f"{a}/model.safetensors"), load_file(f"{b}/model.safetensors")
    changed = {name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])}
    assert changed
    capsys.readouterr()
    assert main(["diff", a, b, "--only", "model.*", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["tensors"]} == {f"model.{name}" for name in changed}
    assert all(each["changed"] and each["max_abs"] > 0 for each in found["tensors"])


def test_resume_true_takes_the_newest_that_verifies_and_never_a_half_written_one(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=9)
    whole = run(job)
    assert committed(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    shutil.rmtree(tmp_path / "checkpoint-9")
    # What the stock Trainer leaves when it is killed while it saves for a preemption.
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "checkpoint-is-incomplete.txt").write_text("in progress")
    damaged = tmp_path / "checkpoint-6" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    resumed = run(job.but(resume=True))
    assert resumed["weights"] == whole["weights"]
    assert committed(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert (tmp_path / "checkpoint-8").exists(), "it may be anybody's"
    accelerate_ckpt.enable_trainer(made := trainer(job.but(enabled=False)))
    assert not accelerate_ckpt.trainer_checkpoints(made).manager.verify(6), "saved anew in its place"
    accelerate_ckpt.disable_trainer(made)


def test_resume_true_takes_a_whole_checkpoint_of_the_stock_trainer(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=6)
    whole = run(job.but(enabled=False))
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = run(job.but(resume=True))
    assert resumed["weights"] == whole["weights"]
    assert committed(tmp_path) == ["checkpoint-6"]


def test_nothing_to_resume_from_and_a_torn_checkpoint_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainerJob(root=str(tmp_path), steps=3)
    assert run(job.but(resume=True))["step"] == 3
    assert "training begins at step 0" in caplog.text
    forget_accelerators()
    run(job.but(root=f"{tmp_path}/other"))
    torn = tmp_path / "other" / "checkpoint-3"
    (torn / "COMMITTED").unlink()
    with pytest.raises(CorruptCheckpointError, match="never committed"):
        run(job.but(resume=str(torn)))


def test_save_total_limit_removes_only_after_the_commit_and_spares_the_best(tmp_path: Path) -> None:
    job = TrainerJob(
        root=str(tmp_path),
        steps=9,
        arguments={
            "save_total_limit": 1,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
            # Later checkpoints are worse.
            "learning_rate": 5.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 100.0,
        },
    )
    result = run(job)
    best = Path(result["best"])
    assert best.parent == tmp_path
    assert set(committed(tmp_path)) == {best.name, "checkpoint-9"}
    told = json.loads((tmp_path / "checkpoint-9" / "trainer_state.json").read_text())
    assert told["best_model_checkpoint"] == str(best)


def test_a_full_disk_loses_nothing_and_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TrainerJob(root=str(tmp_path), steps=6, arguments={"save_total_limit": 1})
    made = trainer(job)
    storage = accelerate_ckpt.trainer_checkpoints(made).manager.storage.own
    create = storage.create

    def full(key: str) -> object:
        if "checkpoint-6" in key:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(key)

    monkeypatch.setattr(storage, "create", full)
    with pytest.raises(SaveError, match="No space left"):
        made.train()
    assert committed(tmp_path) == ["checkpoint-3"]
    forget_accelerators()
    run(job.but(resume=True))
    assert committed(tmp_path) == ["checkpoint-6"]


def test_the_save_policy_takes_the_place_of_the_save_strategy(tmp_path: Path) -> None:
    run(TrainerJob(root=str(tmp_path), steps=9, save_steps=100, options={"save": EverySteps(4)}))
    assert committed(tmp_path) == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]


def test_epochs_are_saved_after_their_evaluation_and_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    """Six steps of 32 tokens in an epoch."""
    arguments = {"include_num_input_tokens_seen": "all", "eval_strategy": "epoch", "save_strategy": "no"}
    job = TrainerJob(root=str(tmp_path), resume=True, arguments=arguments)
    for steps, save in ((8, EveryTokens(100) | EverySteps(8)), (13, EveryTokens(100) | EveryEpochs(2))):
        run(job.but(steps=steps, options={"save": save}))
    infos = CheckpointManager(tmp_path).checkpoints()
    assert [info.step for info in infos] == [4, 7, 8, 10, 12, 13]
    assert [info.step for info in infos if "eval_loss" in info.metrics] == [12]

    uncounted = trainer(job.but(root=str(tmp_path / "other"), options={"save": EveryTokens(9)}))
    uncounted.model.main_input_name = "pixels"
    with pytest.raises(ConfigError, match="has counted no tokens up to step 1"):
        uncounted.train()
    with pytest.raises(ConfigError, match="include_num_input_tokens_seen"):
        trainer(TrainerJob(root=str(tmp_path), options={"save": EveryTokens(9)}))


def test_without_stock_files_only_shards_are_written(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=6, options={"stock_files": False})
    whole = run(job)
    inside = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"config.json", "trainer_state.json", "scheduler.pt", "model_0", "optimizer_0"} <= inside
    assert not inside & {"model.safetensors", "optimizer.pt"}
    resumed = run(job.but(resume=str(tmp_path / "checkpoint-3")))
    assert resumed["weights"] == whole["weights"]


def wide(model: Any, *, tied: bool = False) -> Any:
    """A model of 13 MB, so that bytes are weights."""
    config = type(model.config)(**{
        **model.config.to_dict(), "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3,
        "head_dim": 128, "tie_word_embeddings": tied,
    })  # fmt: skip
    return type(model)(config)


def half(model: Any) -> Any:
    return wide(model).to(torch.bfloat16)


class Wrapped(torch.nn.Module):
    """What writes the files of a module within it, and has buffers and a head of its own besides."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.norm = wide(model, tied=True), torch.nn.BatchNorm1d(1)
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels)
        normed = self.norm(out.logits.float().mean((1, 2))[:, None])
        return {"loss": out.loss + self.bias + normed.pow(2).mean() * 1e-3}


@pytest.mark.parametrize("adapt", [wide, functools.partial(wide, tied=True), half, Wrapped])
def test_weights_and_optimizer_are_written_once_and_others_read_them(tmp_path: Path, adapt: Any) -> None:
    def save_inner(made: Any) -> Any:
        if isinstance(made.model, Wrapped):
            made._save = lambda folder=None, state_dict=None: made.model.inner.save_pretrained(folder)
        return made

    job = TrainerJob(root=str(tmp_path / "ours"), steps=3, save_steps=2)
    size = {}
    for each in (job, job.but(root=str(tmp_path / "stock"), enabled=False)):
        whole = save_inner(trainer(each, adapt))
        whole.train()
        files = (Path(each.root) / "checkpoint-2").rglob("*")
        size[each.root] = sum(path.stat().st_size for path in files if path.is_file())
        forget_accelerators()
    ours, stock = size.values()
    assert ours <= 1.1 * stock
    inner = getattr(whole.model, "inner", whole.model)
    read = type(inner).from_pretrained(str(tmp_path / "ours" / "checkpoint-3"), dtype=inner.dtype)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in inner.state_dict().items())
    again = save_inner(trainer(job.but(root=str(tmp_path / "again")), adapt))
    again.train(resume_from_checkpoint=f"{job.root}/checkpoint-2")
    there = whole.model.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in again.model.state_dict().items())


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    run(TrainerJob(root=str(tmp_path), steps=3))
    forget_accelerators()
    for change, told in (
        (
            lambda model: setattr(model, "lm_head", torch.nn.Linear(16, 48)),
            r"lm_head.weight: shape \(48, 16\) here, \(32, 16\) in the checkpoint",
        ),
        (lambda model: delattr(model.model, "norm"), r"the training state lacks: model.model.norm.weight"),
        (lambda model: setattr(model, "more", torch.nn.Linear(2, 2)), "more"),
    ):
        made = trainer(TrainerJob(root=str(tmp_path), steps=6))
        change(made.model)
        before = {name: value.clone() for name, value in made.model.state_dict().items()}
        with pytest.raises(IncompatibleCheckpointError, match=told):
            made.train(resume_from_checkpoint=True)
        assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
        accelerate_ckpt.disable_trainer(made)
        forget_accelerators()


def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def frozen(model: Any) -> Any:
        model.lm_head.requires_grad_(requires_grad=False)
        return model

    job = TrainerJob(root=str(tmp_path), steps=2, save_steps=2)
    made = trainer(job, adapt=frozen)
    made.train()
    accelerate_ckpt.disable_trainer(made)
    forget_accelerators()
    made = trainer(job.but(steps=3))
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises(IncompatibleCheckpointError, match=r"nothing was loaded.*other parameters"):
        made.train(resume_from_checkpoint=True)
    assert all(torch.equal(before[name], value) for name, value in made.model.state_dict().items())
    accelerate_ckpt.disable_trainer(made)


def test_what_cannot_work_is_refused_and_disable_puts_everything_back(tmp_path: Path) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), arguments={"save_total_limit": 2}))
    with pytest.raises(ConfigError, match="enabled already"):
        accelerate_ckpt.enable_trainer(made)
    accelerate_ckpt.disable_trainer(made)
    for name in ("train", "_save_checkpoint", "_load_from_checkpoint", "_load_best_model"):
        assert getattr(made, name).__func__ is getattr(type(made), name)
    assert made.args.save_total_limit == 2
    made.args.push_to_hub = True
    for strategy in ("every_save", "checkpoint", "all_checkpoints"):
        made.args.hub_strategy, made.args.hub_model_id = HubStrategy(strategy), "me/mine"
        line = re.escape('export=Export(to="hf", place="hf://me/mine", when={"every": 1})')
        with pytest.raises(ConfigError, match=f'push_to_hub=True with hub_strategy="{strategy}".*{line}'):
            accelerate_ckpt.enable_trainer(made)


def test_a_trainer_that_pushes_at_the_end_trains_and_saves_without_the_hub(tmp_path: Path) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), steps=3, enabled=False))
    made.args.push_to_hub, made.args.hub_strategy = True, HubStrategy.END
    accelerate_ckpt.enable_trainer(made)
    made.train()
    assert accelerate_ckpt.trainer_checkpoints(made).latest().step == 3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "native"])
def test_a_resume_is_exact_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    """Of what transformers has sharded at load time, too, which the stock Trainer cannot resume."""
    job = TrainerJob(root=f"{tmp_path}/ours", world=2, strategy=strategy)
    starts = [3, 9]
    if strategy == "native":
        job = job.but(steps=5, arguments={"save_strategy": "no"}, options={"save": EverySteps(3)})
        starts = [3]
    resumed = [
        job.but(root=f"{tmp_path}/from-{step}", resume=f"{tmp_path}/ours/checkpoint-{step}")
        for step in starts
    ]
    for whole, *others in run_ranks(in_turn, 2, [job, *resumed]):
        for other in others:
            assert other["weights"] == whole["weights"]
    if strategy == "native":
        weights = load_file(tmp_path / "ours" / "checkpoint-3" / "model.safetensors")
        assert all(value.numel() for value in weights.values()), "whole, not one rank's shard"
        assert not (tmp_path / "ours" / "checkpoint-3" / "optimizer.pt").exists()
