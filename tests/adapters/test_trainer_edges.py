"""The Hugging Face Trainer where it meets people: metrics, directories, second runs, small files."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import accelerate_ckpt
from accelerate_ckpt.trainer._loading import newest_to_resume
from accelerate_ckpt.trainer._session import KeepAsTrainer, is_new_best
from ckpt_core import (
    CheckpointInfo,
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    EverySteps,
    IncompatibleCheckpointError,
    KeepBest,
    KeepLatest,
    SaveError,
)
from ckpt_core.cli import main
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import TrainerJob, run, trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

METRIC = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


def steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[11:]) for path in root.glob("checkpoint-*/COMMITTED"))


class Measured:
    """Evaluates to what is given for each step, in place of the real loss."""

    def __init__(self, losses: dict[int, float]) -> None:
        self._losses = losses

    def attach(self, made: Trainer) -> None:
        stock = made.evaluation_loop

        def loop(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            output.metrics["eval_loss"] = self._losses[made.state.global_step]
            return output

        made.evaluation_loop = loop  # type: ignore[method-assign]


def trained(job: TrainerJob, losses: dict[int, float] | None = None) -> Any:
    made = trainer(job)
    if losses is not None:
        Measured(losses).attach(made)
    made.train(resume_from_checkpoint=job.resume)
    accelerate_ckpt.disable_trainer(made)
    forget_accelerators()
    return made


@pytest.fixture(scope="module")
def _of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        forget_accelerators()
        trained(TrainerJob(root=str(root), steps=2, save_steps=1))
    return root


@pytest.fixture
def two_steps(_of_two_steps: Path, tmp_path: Path) -> TrainerJob:
    """A training that has saved both of its steps."""
    shutil.copytree(_of_two_steps, tmp_path / "run")
    return TrainerJob(root=str(tmp_path / "run"), steps=2, save_steps=1)


def test_a_metric_belongs_to_the_step_at_which_it_was_measured(tmp_path: Path) -> None:
    """Evaluated at 2 and 4, saved at every step: what is saved between has no metric, and is not the best."""
    job = TrainerJob(root=str(tmp_path), steps=4, save_steps=1, arguments={**METRIC, "save_total_limit": 1})
    made = trained(job, {2: 0.1, 4: 0.9})
    assert steps(tmp_path) == [2, 4]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    metrics = {info.step: info.metrics for info in CheckpointManager(tmp_path).checkpoints()}
    assert metrics[2]["eval_loss"] == 0.1
    assert metrics[4]["eval_loss"] == 0.9


def test_of_equally_good_checkpoints_the_one_that_the_trainer_names_stays(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=6, save_steps=2, arguments={**METRIC, "save_total_limit": 2})
    made = trained(job, {2: 0.5, 4: 0.5, 6: 0.5})
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert steps(tmp_path) == [2, 6], "as many as the stock Trainer keeps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, {}),
        ({"save_strategy": "no"}, {"keep": KeepBest("eval_loss")}),
        ({"save_strategy": "best"}, {"keep": KeepLatest(1), "back_pressure": "skip"}),
    ],
    ids=["load best", "keep best", "skip"],
)
def test_a_new_best_is_saved_whatever_the_policy_says(
    tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    job = TrainerJob(
        root=str(tmp_path),
        steps=6,
        save_steps=2,
        arguments={**METRIC, **arguments},
        options={"save": EverySteps(5), **options},
    )
    made = trained(job, {2: 0.5, 4: 0.2, 6: 0.7})
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert made.state.best_global_step == 4
    assert 4 in steps(tmp_path)
    told = json.loads((tmp_path / f"checkpoint-{steps(tmp_path)[-1]}" / "trainer_state.json").read_text())
    assert (told["best_global_step"], told["best_model_checkpoint"]) == (4, str(tmp_path / "checkpoint-4"))


def test_a_best_that_no_save_follows_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainerJob(root=str(tmp_path), steps=2, save_steps=3, arguments={**METRIC, "save_total_limit": 2})
    trained(job, {2: 0.5})
    assert "evaluates where it does not save" in caplog.text


@pytest.mark.slow
def test_a_fresh_run_never_resumes_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = TrainerJob(root=str(tmp_path), steps=8, save_steps=2, arguments={"save_total_limit": 2})
    trained(old)
    assert steps(tmp_path) == [6, 8]
    trained(old.but(steps=2))
    assert (tmp_path / "checkpoint-8" / "COMMITTED").exists(), "whoever forgot to resume still can"
    assert not (tmp_path / "checkpoint-6").exists()
    assert "starting afresh" in caplog.text
    trained(old.but(steps=4, resume=True))
    assert steps(tmp_path) == [2, 4], "as the stock Trainer has it"
    resumed = trained(old.but(steps=6, resume=True))
    assert (resumed.state.global_step, steps(tmp_path)) == (6, [4, 6])


@pytest.mark.slow
def test_going_back_by_path_abandons_what_lies_ahead(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=8, save_steps=2)
    trained(job)
    back = trained(job.but(steps=5, save_steps=5, resume=str(tmp_path / "checkpoint-2")))
    assert back.state.global_step == 5
    assert steps(tmp_path) == [2, 4, 5, 6, 8], "abandoned, but not deleted: nobody set a limit"
    resumed = trainer(job.but(steps=5))
    seen: list[int] = []
    resumed.add_callback(Beginning(seen))
    resumed.train(resume_from_checkpoint=True)
    assert seen == [5]


@pytest.mark.parametrize("root", ["local", "memory://trainers/back"])
def test_a_step_that_training_reaches_again_supersedes_the_abandoned_one(
    tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a bucket, which replaces nothing, beside it; and the best model is that of this training."""
    url = str(tmp_path / "run") if root == "local" else root
    best = {**METRIC, "load_best_model_at_end": True, "save_strategy": "steps"}
    job = TrainerJob(root=str(tmp_path / "out"), steps=6, save_steps=2, arguments=best, options={"root": url})
    trained(job, {2: 0.5, 4: 0.1, 6: 0.4})
    caplog.clear()
    back = trained(job.but(resume=f"{url}/checkpoint-2"), {4: 0.3, 6: 0.2})
    told = "checkpoint-4 is of a training before, and is replaced" in caplog.text
    assert told == (root == "local"), "nothing is lost without a word"
    with CheckpointManager(url) as checkpoints:
        line = checkpoints.checkpoints()
        assert [info.step for info in line] == [2, 4, 6]
        assert len(checkpoints.checkpoints(abandoned=True)) == (3 if root == "local" else 5)
        assert newest_to_resume(checkpoints) == f"{url}/{line[-1].name}" == back.state.best_model_checkpoint


def test_a_step_is_saved_again_in_a_bucket_when_it_turns_out_to_be_the_best(tmp_path: Path) -> None:
    """Saved as its last step of an epoch, and evaluated at the epoch's end; then trained on from."""
    arguments = {**METRIC, "eval_strategy": "epoch"}
    url = "memory://trainers/twice"
    options = {"root": url, "save": EverySteps(6), "keep": KeepBest("eval_loss") | KeepLatest(2)}
    job = TrainerJob(root=str(tmp_path), steps=12, arguments=arguments, options=options)
    made = trained(job, {6: 0.5, 12: 0.1})
    with CheckpointManager(url) as checkpoints:
        infos = checkpoints.checkpoints(abandoned=True)
        assert {info.step for info in infos} == {6, 12}
        assert newest_to_resume(checkpoints) == made.state.best_model_checkpoint
    assert infos[-1].metrics["eval_loss"] == 0.1


class Beginning(TrainerCallback):  # type: ignore[misc,unused-ignore]
    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen.append(state.global_step)


@pytest.mark.slow
def test_a_step_marked_as_bad_is_passed_over(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=6, save_steps=2)
    whole = run(job)
    forget_accelerators()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.mark(6, "the loss exploded")
    seen: list[int] = []
    made = trainer(job)
    made.add_callback(Beginning(seen))
    made.train(resume_from_checkpoint=True)
    assert seen == [4]
    assert [value.flatten().tolist() for value in made.model.state_dict().values()] == list(
        whole["weights"].values()
    )


def test_weights_alone_are_refused_and_named_and_never_begun_afresh_in_silence(
    two_steps: TrainerJob,
) -> None:
    root = Path(two_steps.root)
    whole = load_file(root / "checkpoint-1" / "model.safetensors")
    assert main(["demote", f"{root}@1", "--dtype", "bf16"]) == 0
    shutil.rmtree(root / "checkpoint-2")
    weights = root / "checkpoint-1.weights"
    there = load_file(weights / "model.safetensors")
    assert there.keys() == whole.keys()
    assert all(torch.equal(there[name], each.bfloat16()) for name, each in whole.items())
    for resume in (True, str(weights)):
        made = trainer(two_steps)
        before = [each.clone() for each in made.model.parameters()]
        with pytest.raises(IncompatibleCheckpointError, match=r"weights alone|has no"):
            made.train(resume_from_checkpoint=resume)
        assert all(map(torch.equal, before, made.model.parameters()))
        accelerate_ckpt.disable_trainer(made)
        forget_accelerators()
    tuned = two_steps.but(root=f"{root}-tuned", resume=True, options={"init_from": str(weights)})
    assert trained(tuned).state.global_step == 2


@pytest.mark.slow
def test_whichever_was_written_last_is_the_newest_stock_or_ours(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=4, save_steps=2, options={"stock_files": True})
    trained(job)
    trained(job.but(steps=8, enabled=False, resume=str(tmp_path / "checkpoint-4")))
    with CheckpointManager(tmp_path) as manager:
        assert newest_to_resume(manager) == str(tmp_path / "checkpoint-8"), "stock went on"
        for step in (6, 8):
            os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (0, 0))
        assert newest_to_resume(manager) == str(tmp_path / "checkpoint-4"), "ours went on"


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt", "rng_state.pth"])
def test_no_small_file_is_read_that_was_not_committed(
    two_steps: TrainerJob, name: str, by_path: bool
) -> None:
    path = Path(two_steps.root, "checkpoint-2", name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    made = trainer(two_steps)
    weights = [value.clone() for value in made.model.state_dict().values()]
    seen: list[int] = []
    made.add_callback(Beginning(seen))
    if by_path:
        with pytest.raises(CorruptCheckpointError, match=name):
            made.train(resume_from_checkpoint=str(path.parent))
        assert all(
            bool((a == b).all()) for a, b in zip(weights, made.model.state_dict().values(), strict=True)
        )
        return
    made.train(resume_from_checkpoint=True)
    assert seen == [1]


def test_damage_that_a_resume_finds_is_marked(two_steps: TrainerJob) -> None:
    root = Path(two_steps.root)
    (root / "checkpoint-2" / "scheduler.pt").unlink()
    with CheckpointManager(root) as manager:
        assert newest_to_resume(manager) == str(root / "checkpoint-1")
        marks = {info.step: info.damaged for info in manager.checkpoints()}
    assert marks[1] is None
    assert "scheduler.pt" in str(marks[2])


def test_where_every_checkpoint_is_damaged_nothing_starts_afresh(two_steps: TrainerJob) -> None:
    Path(two_steps.root, "checkpoint-1", "COMMITTED").write_bytes(b"{}")
    Path(two_steps.root, "checkpoint-2", "config.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-1.*checkpoint-2"):
        trainer(two_steps).train(resume_from_checkpoint=True)


def test_a_second_trainer_and_a_second_training_go_on_in_the_same_process(tmp_path: Path) -> None:
    """As a notebook cell that is run again: the first Trainer still lives."""
    job = TrainerJob(root=str(tmp_path), steps=2, save_steps=1)
    first = trainer(job)
    first.train()
    forget_accelerators()
    second = trainer(job.but(steps=3))
    second.train(resume_from_checkpoint=True)
    assert steps(tmp_path) == [1, 2, 3]
    first.train()
    assert first.state.global_step == 2
    assert [info.step for info in accelerate_ckpt.trainer_checkpoints(first).manager.checkpoints()] == [1, 2]
    accelerate_ckpt.disable_trainer(first)
    with pytest.raises(ConfigError, match="enable_trainer"):
        accelerate_ckpt.trainer_checkpoints(first)


@pytest.mark.slow
def test_a_retry_with_a_smaller_batch_begins_a_line_of_its_own(tmp_path: Path) -> None:
    arguments = {"auto_find_batch_size": True, "save_total_limit": 2}
    job = TrainerJob(root=str(tmp_path), steps=5, save_steps=2, arguments=arguments)
    made = trainer(job)
    made.add_callback(OutOfMemoryOnce(at=5))
    made.train()
    infos = CheckpointManager(tmp_path).checkpoints(abandoned=True)
    assert [info.step for info in infos] == [4, 5], "of the second try, within the limit"
    assert len({info.lineage.id for info in infos}) == 1
    assert made.args.save_total_limit == 2
    forget_accelerators()
    again = trainer(job.but(steps=8, resume=True))
    again.add_callback(OutOfMemoryOnce(at=8))
    again.train(resume_from_checkpoint=True)
    infos = CheckpointManager(tmp_path).checkpoints()
    assert [info.step for info in infos] == [6, 8]
    assert infos[-1].lineage.ancestry, "it goes on from what it was resumed from"


class OutOfMemoryOnce(TrainerCallback):  # type: ignore[misc,unused-ignore]
    def __init__(self, at: int) -> None:
        self._at = at
        self._done = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at - 1 and not self._done:
            self._done = True
            raise RuntimeError("CUDA out of memory.")


def test_signals_are_heard_only_while_a_training_can_act_on_them(tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    made = trainer(TrainerJob(root=str(tmp_path), steps=2, options={"save": {"on_preemption": True}}))
    heard: list[bool] = []

    class Look(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            heard.append(signal.getsignal(signal.SIGTERM) is not before)

    assert signal.getsignal(signal.SIGTERM) is before
    made.add_callback(Look())
    made.train()
    assert heard == [True, True]
    assert signal.getsignal(signal.SIGTERM) is before

    class Fail(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("a bug of the user's")

    made.add_callback(Fail())
    with pytest.raises(KeyError):
        made.train()
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_arguments_are_refused_with_what_to_do(tmp_path: Path) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), enabled=False))
    enable: Any = accelerate_ckpt.enable_trainer
    with pytest.raises(ConfigError, match=r"accelerate_ckpt.enable\(\)"):
        enable(Accelerator(cpu=True))
    with pytest.raises(ConfigError, match="is a class"):
        enable(Trainer)
    with pytest.raises(ConfigError, match="root must be"):
        enable(made, root=7)
    with pytest.raises(ConfigError, match=r"did you mean .keep."):
        enable(made, kep=KeepLatest(1))
    enable(made)
    with pytest.raises(ConfigError, match="hyperparameter"):
        made.train(trial={"lr": 1.0})
    with pytest.raises(ConfigError, match="Trainer is needed"):
        accelerate_ckpt.disable_trainer(None)  # type: ignore[arg-type]


def test_a_directory_of_checkpoints_is_no_checkpoint(two_steps: TrainerJob) -> None:
    with pytest.raises(ConfigError, match="checkpoint-2"):
        trainer(two_steps).train(resume_from_checkpoint=two_steps.root)


@pytest.mark.slow
def test_one_script_serves_the_first_run_and_those_after_a_kill_in_the_first_save(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=2, save_steps=1, resume=True)
    for left in (".incomplete-00112233-checkpoint-1", "checkpoint-1.incomplete-00112233"):
        (tmp_path / left / "model_0").mkdir(parents=True)
    assert run(job)["step"] == 2
    forget_accelerators()
    assert run(job.but(steps=3))["step"] == 3
    shutil.rmtree(tmp_path)
    forget_accelerators()
    assert run(job)["step"] == 2


def test_what_a_users_own_save_model_writes_is_in_the_checkpoint(tmp_path: Path) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), steps=1, save_steps=1, enabled=False))
    stock = type(made)

    class WithHead(stock):  # type: ignore[misc,valid-type]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            Path(str(output_dir), "head.txt").write_text("trained")

    made.__class__ = WithHead
    for stock_files in (True, False):
        accelerate_ckpt.enable_trainer(made, stock_files=stock_files)
        made.train()
        accelerate_ckpt.disable_trainer(made)
        assert (tmp_path / "checkpoint-1" / "head.txt").read_text() == "trained"


class Diverging(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Spoils a weight at the end of the second step."""

    def __init__(self, name: str, value: float) -> None:
        self._name, self._value = name, value

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["model"].get_parameter(self._name).data.view(-1)[-1] = self._value


@pytest.mark.parametrize(
    ("stock_files", "name", "value"),
    [
        (None, "model.embed_tokens.weight", math.nan),
        (None, "model.norm.weight", math.inf),
        (True, "lm_head.weight", -math.inf),
        (False, "model.layers.0.mlp.up_proj.weight", math.nan),
    ],
)
def test_weights_that_are_not_finite_are_refused_wherever_they_would_lie(
    tmp_path: Path, stock_files: bool | None, name: str, value: float
) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), steps=2, save_steps=1, enabled=False))
    made.add_callback(Diverging(name, value))
    accelerate_ckpt.enable_trainer(made, stock_files=stock_files, reject_non_finite=True, on_error="raise")
    with pytest.raises(SaveError, match=rf"NaN or infinity in .*{name}"):
        made.train()
    accelerate_ckpt.disable_trainer(made)
    assert steps(tmp_path) == [1]


def test_a_checkpoint_named_by_another_spelling_of_its_path_is_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainerJob(root=f"{tmp_path}/x/../run", steps=2, save_steps=1)
    trained(job)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    caplog.set_level(logging.WARNING)
    trained(job.but(steps=3, resume=f"{tmp_path}/link/checkpoint-2"))
    assert "starting afresh" not in caplog.text
    assert len(CheckpointManager(tmp_path / "run").checkpoints()) == 3


class Writing(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """As PEFT's `SavePeftModelCallback` and many like it: before the checkpoint is committed."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(exist_ok=True)
        (folder / "mine.json").write_text(str(state.global_step))


def test_what_users_write_into_a_checkpoint_costs_neither_it_nor_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("written before")
    (tmp_path / "logs").mkdir()
    made = trainer(TrainerJob(root=str(tmp_path), steps=3, save_steps=1))
    made.add_callback(Writing())
    made.train()
    assert steps(tmp_path) == [1, 2, 3]
    assert [(tmp_path / f"checkpoint-{step}" / "mine.json").read_text() for step in (1, 2, 3)] == [
        "1",
        "2",
        "3",
    ]
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "written before"
    forget_accelerators()
    trained(TrainerJob(root=str(tmp_path), steps=4, save_steps=1, resume=True))
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_stock_checkpoints_of_the_same_name_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    """Who switches to us in an old output directory, and begins again or goes back."""
    stock = TrainerJob(root=str(tmp_path), steps=2, save_steps=1, enabled=False)
    trained(stock)
    trained(stock.but(enabled=True, resume=str(tmp_path / "checkpoint-1")))
    assert steps(tmp_path) == [2]
    aside = [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.is_dir()]
    assert [path for path in aside if (path / "model.safetensors").exists()], "the stock one of step 2"
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


def info(step: int, **metrics: float) -> CheckpointInfo:
    return CheckpointInfo(step=step, name=f"checkpoint-{step}", created=float(step), metrics=metrics)


def test_what_the_limit_keeps_is_kept_again_when_the_others_are_gone() -> None:
    history = [info(1, eval_loss=0.3), info(2, eval_loss=math.nan), info(3, eval_loss=0.3), info(4), info(5)]
    for limit, kept in ((1, {1, 5}), (2, {1, 5}), (3, {1, 4, 5}), (9, {1, 2, 3, 4, 5})):
        policy = KeepAsTrainer(limit=limit, metric="eval_loss")
        assert policy.keep(history, 0.0) == kept
        assert policy.keep([each for each in history if each.step in kept], 0.0) == kept
    assert KeepAsTrainer(limit=2).keep([], 0.0) == frozenset()
    assert KeepAsTrainer(limit=1, metric="eval_f1", mode="max").keep(history, 0.0) == {5}


def test_a_new_best_is_better_than_what_was_measured_before_and_never_nan() -> None:
    history = [
        {"step": 1, "eval_loss": 0.5},
        {"step": 2, "loss": 0.1, "eval_note": "text"},
        {"step": 3, "eval_loss": 0.5},
        {"step": 4, "eval_loss": math.nan},
        {"step": 5, "eval_loss": 0.4},
    ]
    for policy, best in ((KeepBest("eval_loss"), {1, 5}), (KeepBest("eval_loss", n=2), {1, 3, 5})):
        found = {step for step in range(1, 6) if is_new_best([policy], history[:step], step)}
        assert found == best
    assert not is_new_best([KeepBest("eval_note")], history, 2)
