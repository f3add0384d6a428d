"""Accelerate: where a run meets damage, another run, or a script that is not as ours would be."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelerate_ckpt
from accelerate_ckpt._checkpoints import ENDED, enable_implicitly
from ckpt_core import (
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    EverySteps,
    IncompatibleCheckpointError,
    KeepBest,
    KeepLatest,
    OnPreemption,
)
from tests.adapters.accelerate_jobs import (
    Job,
    accelerator,
    committed,
    forget_accelerators,
    prepare,
    prepared,
    step,
    weights,
)
from tests.kit.memory import MemoryStorage

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

JOB = Job(strategy="single", world=1)


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Stubborn(Counter):
    """Saves well, and refuses what it has saved."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] != self.value:
            raise KeyError("of another version")


def changed(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


# Rule 1: what is loaded is verified, all of it.


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "changed": lambda path: path.write_bytes(changed(path.read_bytes())),
    "missing": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"."),
}


@pytest.fixture
def run_of_two(tmp_path: Path) -> tuple[Any, ...]:
    """Two checkpoints of everything that Accelerate has files for, hooks included."""
    made, net, optimizer, scheduler, *_ = prepared(JOB.but(root=str(tmp_path)))
    counter = Counter()
    made.register_for_checkpointing(counter)
    made.register_save_state_pre_hook(
        lambda _models, _states, output_dir: (Path(output_dir) / "of_hook.txt").write_text("saved")
    )
    made.register_load_state_pre_hook(lambda _models, _input_dir: None)
    for _ in range(2):
        step(made, net, optimizer)
        scheduler.step()
        counter.value += 1
        made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    return made, net, optimizer, scheduler, counter


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "file", ["scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl", "of_hook.txt"]
)
def test_a_damaged_small_file_is_refused_by_path_and_passed_over_without(
    run_of_two: tuple[Any, ...], tmp_path: Path, file: str, damage: str
) -> None:
    made, net, _optimizer, scheduler, counter = run_of_two
    DAMAGE[damage](tmp_path / "checkpoint_1" / file)
    counter.value = 7
    before = weights(net), scheduler.state_dict(), torch.get_rng_state().tolist()
    with pytest.raises(CorruptCheckpointError, match=file):
        made.load_state(str(tmp_path / "checkpoint_1"))
    assert (weights(net), scheduler.state_dict(), torch.get_rng_state().tolist()) == before
    assert counter.value == 7
    made.load_state()
    assert accelerate_ckpt.checkpoints(made).step == 1
    assert counter.value == 1
    made.end_training()


def test_what_is_not_in_the_manifest_is_not_loaded(run_of_two: tuple[Any, ...], tmp_path: Path) -> None:
    made, *_, counter = run_of_two
    folder = tmp_path / "checkpoint_1"
    (folder / "custom_checkpoint_1.pkl").write_bytes((folder / "custom_checkpoint_0.pkl").read_bytes())
    (folder / "scheduler_1.bin").write_bytes(b"no scheduler")
    made.load_state(str(folder))
    assert counter.value == 2
    made.end_training()


def test_small_files_on_object_storage_are_verified_too() -> None:
    storage = MemoryStorage()
    made = accelerator(JOB)
    accelerate_ckpt.enable(made, storage)
    net, optimizer, *_ = prepare(JOB, made)
    step(made, net, optimizer)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    key = "checkpoint_0/scheduler.bin"
    content = changed(storage.read_bytes(key))
    storage.delete(key)
    storage.write_bytes(key, content)
    with pytest.raises(CorruptCheckpointError, match="every committed checkpoint"):
        made.load_state()
    made.end_training()


def test_hooks_load_after_everything_was_verified(run_of_two: tuple[Any, ...], tmp_path: Path) -> None:
    made, *_ = run_of_two
    called: list[str] = []
    made.register_load_state_pre_hook(lambda _models, input_dir: called.append(input_dir))
    shard = next((tmp_path / "checkpoint_1" / "optimizer_0").glob("*.distcp"))
    shard.write_bytes(changed(shard.read_bytes()))
    with pytest.raises(CorruptCheckpointError):
        made.load_state(str(tmp_path / "checkpoint_1"))
    assert called == []
    made.load_state()
    assert [Path(each).name for each in called] == ["checkpoint_0"]
    made.end_training()


# What does not fit is found before anything changes.


@pytest.mark.parametrize("now", ["one object more", "a scheduler more", "an object that refuses"])
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, now: str) -> None:
    made, net, optimizer, scheduler, *_ = prepared(JOB.but(root=str(tmp_path)))
    first, second = Counter(1), Stubborn(1)
    made.register_for_checkpointing(first, second)
    step(made, net, optimizer)
    made.save_state()
    step(made, net, optimizer)
    scheduler.step()
    first.value = 2
    if now == "one object more":
        made.register_for_checkpointing(Counter())
    elif now == "a scheduler more":
        made.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    else:
        second.value = 2
    before = weights(net), scheduler.state_dict(), torch.get_rng_state().tolist(), made.step
    with pytest.raises(IncompatibleCheckpointError):
        made.load_state()
    assert (weights(net), scheduler.state_dict(), torch.get_rng_state().tolist(), made.step) == before
    assert first.value == 2
    made.end_training()


def test_not_strict_leaves_what_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Grown(nn.Module):
        def __init__(self, *, head: bool) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(1))
            if head:
                self.register_buffer("head", torch.zeros(3))

    made = accelerator(JOB.but(root=str(tmp_path)))
    accelerate_ckpt.enable(made, tmp_path)
    net = made.prepare(Grown(head=False))
    net.scale.fill_(5.0)
    made.save_state()
    made.end_training()
    forget_accelerators()
    made = accelerator(JOB.but(root=str(tmp_path)))
    accelerate_ckpt.enable(made, tmp_path)
    net = made.prepare(Grown(head=True))
    for where in (None, str(tmp_path / "checkpoint_0")):
        net.scale.fill_(0.0)
        with pytest.raises(IncompatibleCheckpointError, match="strict=False"):
            made.load_state(where)
        made.load_state(where, strict=False)
        assert net.scale.item() == 5.0
        assert net.head.tolist() == [0.0] * 3
        assert "head" in caplog.text
    with pytest.raises(ConfigError, match="strict"):
        made.load_state(str(tmp_path / "checkpoint_0"), strict="no")
    made.end_training()


def test_a_checkpoint_from_within_a_window_is_told_at_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path), accumulation=4))
    with made.accumulate(net):
        step(made, net, *rest)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    caplog.clear()
    made.load_state()
    assert "within an accumulation window" in caplog.text
    made.end_training()


# Rule 7: a metric belongs to the step at which it was measured.


def test_a_metric_belongs_to_the_step_at_which_it_was_logged(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), keep=KeepLatest(1) | KeepBest("loss"))
    for loss in (None, 0.1, None, None, 0.9, None):
        step(made, *rest)
        if loss is not None:
            made.log({"loss": loss, "weights": torch.ones(3), "note": "text"})
        made.save_state()
    made.end_training()
    assert committed(tmp_path) == ["checkpoint_1", "checkpoint_5"]
    metrics = {info.step: info.metrics for info in CheckpointManager(tmp_path).checkpoints()}
    assert metrics == {2: {"loss": 0.1}, 6: {}}


@pytest.mark.slow
@pytest.mark.parametrize("then", ["saves on", "loads", "begins anew"])
def test_what_was_logged_after_a_save_belongs_to_no_other(tmp_path: Path, then: str) -> None:
    job = JOB.but(root=str(tmp_path))
    made, *rest = prepared(job)
    step(made, *rest)
    made.save_state()
    made.log({"loss": 0.1})
    if then == "loads":
        made.load_state()
    elif then == "begins anew":
        made.free_memory()
        rest = list(prepare(job, made))
    if then != "loads":
        step(made, *rest)
        if then == "saves on":
            step(made, *rest)
    made.save_state()
    made.end_training()
    assert all(not info.metrics for info in CheckpointManager(tmp_path).checkpoints(abandoned=True))


@pytest.mark.parametrize("how", ["at the next", "at the end"])
def test_a_best_that_is_not_saved_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), save=EverySteps(3), keep=KeepBest("acc", mode="max"))
    for number in range(1, 9):
        step(made, *rest)
        if number in ({4} if how == "at the end" else {2, 4, 5}):
            made.log({"acc": number / 10})
        made.save_state()
    made.end_training()
    assert caplog.text.count("is the best so far") == 1
    assert ("acc=0.4" if how == "at the end" else "acc=0.2") in caplog.text


def test_a_worse_one_that_is_not_saved_is_not_worth_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), save=EverySteps(2), keep=KeepBest("loss"))
    for loss in (float("nan"), 0.1, 0.2, 0.3):
        step(made, *rest)
        made.log({"loss": loss, "lr": 1.0})
        made.save_state()
    made.end_training()
    assert "is the best so far" not in caplog.text


def test_a_metric_given_by_hand_is_what_later_ones_are_compared_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), save=EverySteps(5), keep=KeepBest("loss"))
    step(made, *rest)
    made.log({"loss": 0.1})
    accelerate_ckpt.checkpoints(made).save(metrics={"loss": 0.3})
    for later in (0.4, 0.2):
        step(made, *rest)
        made.log({"loss": later})
    made.end_training()
    assert [each for each in (0.1, 0.2, 0.3, 0.4) if f"loss={each}, logged" in caplog.text] == [0.2]


# Rule 8: newest means newest of this run.


def steps_of(made: Any) -> list[int]:
    return [info.step for info in accelerate_ckpt.checkpoints(made).manager.checkpoints()]


@pytest.mark.slow
def test_a_fresh_run_over_directories_of_an_older_one_keeps_and_resumes_its_own(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path))
    for steps, name in ((4, "old"), (3, "new")):
        made, *rest = prepared(job, keep=KeepLatest(2))
        for number in range(1, steps + 1):
            step(made, *rest)
            made.save_state(str(tmp_path / f"{name}_{number}"))
        made.end_training()
        forget_accelerators()
    assert committed(tmp_path) == ["new_2", "new_3", "old_3", "old_4"]
    made, *rest = prepared(job)
    made.load_state()
    assert accelerate_ckpt.checkpoints(made).step == 3
    assert steps_of(made) == [2, 3]
    made.load_state(str(tmp_path / "old_3"))
    step(made, *rest)
    made.save_state(str(tmp_path / "old_4"))
    made.load_state()
    assert accelerate_ckpt.checkpoints(made).step == 4
    assert steps_of(made) == [3, 4]
    made.end_training()


@pytest.mark.slow
@pytest.mark.parametrize("said", [None, "keep"])
def test_a_total_limit_counts_every_run_as_in_stock_unless_told_otherwise(
    tmp_path: Path, said: str | None
) -> None:
    job = JOB.but(root=str(tmp_path), automatic=True, total_limit=2)
    options = {} if said is None else {"abandoned": said}
    for run in range(2):
        made, *rest = prepared(job, **options)
        for save in range(2):
            step(made, *rest)
            made.save_state()
            if (run, save, said) == (1, 0, None):
                accelerate_ckpt.checkpoints(made).wait()
                assert committed(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
        made.end_training()
        forget_accelerators()
    own = ["checkpoint_2", "checkpoint_3"]
    left = [] if said is None else ["checkpoint_0", "checkpoint_1"]
    assert committed(tmp_path / "checkpoints") == left + own


def _no_optimizer(made: Any) -> Any:
    made.prepare(torch.nn.Linear(2, 2))
    return lambda: None


def _optimizer_of_its_own(made: Any) -> Any:
    net = made.prepare(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(2)).sum().backward()
        optimizer.step()

    return step


def _twice_in_a_step(made: Any) -> Any:
    net = torch.nn.Linear(2, 2)
    net, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters()))
    calls = itertools.count()

    def step() -> None:
        net(torch.ones(2)).sum().backward()
        if next(calls) % 2:
            optimizer.step()

    return step


@pytest.mark.parametrize("prepare_for", [_no_optimizer, _optimizer_of_its_own, _twice_in_a_step])
def test_a_total_limit_counts_saves_whether_or_not_steps_are_counted(
    tmp_path: Path, prepare_for: Any
) -> None:
    """As in stock, where the number of the save alone counts; also after a resume and a jump in numbers."""
    root = tmp_path / "checkpoints"
    job = JOB.but(root=str(tmp_path), automatic=True, total_limit=2)
    for run in range(2):
        made = accelerator(job)
        accelerate_ckpt.enable(made)
        step = prepare_for(made)
        if run:
            made.load_state(str(root / "checkpoint_4"))
            made.project_configuration.iteration = 9
        for _ in range(5):
            step()
            made.save_state()
        accelerate_ckpt.checkpoints(made).wait()
        made.end_training()
        last = 13 if run else 4
        assert committed(root) == sorted([f"checkpoint_{last - 1}", f"checkpoint_{last}"])
        forget_accelerators()


# Rule 10: signals reach somebody.


def test_no_handler_is_installed_before_anybody_would_act_on_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CKPT_SUITE_ROOT", str(tmp_path))
    monkeypatch.setenv("CKPT_SUITE_SAVE", "{on_preemption: true}")
    before = signal.getsignal(signal.SIGTERM)
    made = accelerator(JOB)
    enable_implicitly(made)
    net, optimizer, *_ = prepare(JOB, made)
    made.load_state()
    step(made, net, optimizer)
    assert signal.getsignal(signal.SIGTERM) is before
    made.save_state()
    assert signal.getsignal(signal.SIGTERM) is not before
    made.end_training()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_script_that_knows_nothing_of_us_ends_after_its_last_checkpoint(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CKPT_SUITE_ROOT", str(tmp_path))
    monkeypatch.setenv("CKPT_SUITE_SAVE", "{on_preemption: {signals: [SIGUSR1]}}")
    made = accelerator(JOB)
    enable_implicitly(made)
    net, optimizer, *_ = prepare(JOB, made)
    step(made, net, optimizer)
    made.save_state()
    signal.raise_signal(signal.SIGUSR1)
    step(made, net, optimizer)
    with pytest.raises(SystemExit) as ended:
        made.save_state()
    assert ended.value.code == ENDED
    assert committed(tmp_path) == ["checkpoint_0"]
    assert not (tmp_path / ".ckpt-suite/writer.json").exists()


def test_a_script_that_knows_us_is_left_to_stop_by_itself(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)), save=OnPreemption(("SIGUSR1",)))
    signal.raise_signal(signal.SIGUSR1)
    step(made, *rest)
    made.save_state()
    assert accelerate_ckpt.checkpoints(made).preempted
    made.end_training()
    assert committed(tmp_path) == ["checkpoint_0"]


_WAITS = """
import os, signal, sys
from accelerate import Accelerator

if sys.path[0] != os.path.abspath("scripts") or os.getcwd() in sys.path:
    sys.exit(f"python would have another path than {sys.path}")

accelerator = Accelerator(cpu=True)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit("trained on")
"""


@pytest.mark.slow
def test_the_runner_swallows_no_signal_of_a_script_that_never_saves(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "wait.py").write_text(_WAITS)
    for name in ("torch", "yaml", "wave"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    settings = {"CKPT_SUITE_SAVE": "{on_preemption: true}", "CKPT_SUITE_ROOT": "out"}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_ckpt", "scripts/wait.py"],
        check=False, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM, done.stderr


# Rule 11: counters, loops and hosts.


def saved_in(manager: CheckpointManager) -> list[int]:
    infos = manager.checkpoints(abandoned=True)
    return [info.step for info in sorted(infos, key=lambda info: info.created)]


@pytest.mark.slow
@pytest.mark.parametrize("freed_by", ["free_memory", "clear"])
def test_every_fold_saves_as_the_first_did(
    tmp_path: Path, freed_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = JOB.but(root=str(tmp_path))
    made = accelerator(job)
    accelerate_ckpt.enable(made, tmp_path, save=EverySteps(3))
    for _ in range(3):
        rest = prepare(job, made)
        for _ in range(7):
            step(made, *rest)
            made.save_state()
        getattr(made, freed_by)()
        assert accelerate_ckpt.checkpoints(made).step == 0
    made.end_training()
    assert saved_in(CheckpointManager(tmp_path)) == [3, 6] * 3
    assert "starting afresh" not in caplog.text, "the script has ended the fold before by itself"


def test_a_fold_is_warned_of_a_run_before_this_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        caplog.clear()
        made, *rest = prepared(JOB.but(root=str(tmp_path)))
        for _ in range(2):
            step(made, *rest)
            made.save_state()
            made.free_memory(*rest)
            rest = list(prepare(JOB, made))
        made.end_training()
    (told,) = [each for each in caplog.records if "starting afresh" in each.getMessage()]
    assert told.levelname == "WARNING"


def test_directories_that_a_script_names_one_by_one_are_no_run_to_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for fold in range(2):
        forget_accelerators()
        made = accelerator(JOB)
        accelerate_ckpt.enable(made)
        step(made, *prepare(JOB, made))
        made.save_state(str(tmp_path / f"fold-{fold}"))
        made.end_training()
    assert "starting afresh" not in caplog.text
    for fold in range(2):
        made.load_state(str(tmp_path / f"fold-{fold}"))


def test_a_retry_with_a_smaller_batch_saves_as_the_first_did(tmp_path: Path) -> None:
    from accelerate.utils import find_executable_batch_size

    job = JOB.but(root=str(tmp_path))
    made = accelerator(job)
    accelerate_ckpt.enable(made, tmp_path, save=EverySteps(2))
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> None:
        sizes.append(batch_size)
        made.free_memory()
        rest = prepare(job, made)
        for number in range(5):
            step(made, *rest)
            made.save_state()
            if batch_size == 8 and number == 2:
                raise RuntimeError("CUDA out of memory.")

    attempt()
    made.end_training()
    assert len(sizes) == 2
    assert saved_in(CheckpointManager(tmp_path)) == [2, 2, 4]


def test_an_optimizer_that_joins_later_makes_steps_count(tmp_path: Path) -> None:
    job = JOB.but(root=str(tmp_path))
    made, *rest = prepared(job, save=EverySteps(2))
    for _ in range(4):
        step(made, *rest)
        made.save_state()
    rest = list(prepare(job, made))  # the cell with the model and the loop, once more
    for _ in range(2):
        step(made, *rest)
        made.save_state()
    made.end_training()
    assert saved_in(CheckpointManager(tmp_path)) == [2, 4, 6]


def test_a_cell_that_is_run_again_saves_as_it_did(tmp_path: Path) -> None:
    for _ in range(2):
        made, *rest = prepared(JOB.but(root=str(tmp_path)), save=EverySteps(2))
        for _ in range(4):
            step(made, *rest)
            made.save_state()
        accelerate_ckpt.checkpoints(made).wait()
        forget_accelerators()
    made.end_training()
    gc.collect()
    assert saved_in(CheckpointManager(tmp_path)) == [2, 4, 2, 4]


def test_training_after_end_training_saves_too(tmp_path: Path) -> None:
    made, *rest = prepared(JOB.but(root=str(tmp_path)))
    for _ in range(2):
        step(made, *rest)
        made.save_state()
        made.end_training()
    assert committed(tmp_path) == ["checkpoint_0", "checkpoint_1"]


# Rule 14: one script serves first and later runs.


@pytest.mark.slow
@pytest.mark.parametrize("there", ["nothing", "an interrupted save", "files of others"])
def test_where_there_is_nothing_yet_a_load_starts_afresh_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: str
) -> None:
    job = JOB.but(root=str(tmp_path), automatic=True)
    root = tmp_path / "checkpoints"
    if there != "nothing":
        made, *rest = prepared(job)
        step(made, *rest)
        made.save_state()
        made.end_training()
        forget_accelerators()
        name = "checkpoint_0.incomplete-0123456789abcdef" if there == "an interrupted save" else "notes"
        (root / "checkpoint_0").rename(root / name)
        (root / name / "COMMITTED").unlink()
        if there == "files of others":
            (root / name / "manifest.json").unlink()
    made, net, *rest = prepared(job)
    before = weights(net)
    with caplog.at_level(logging.INFO):
        assert made.load_state() is None
    assert "training starts afresh" in caplog.text
    assert weights(net) == before
    assert accelerate_ckpt.checkpoints(made).step == 0
    step(made, net, *rest)
    made.save_state()
    made.end_training()
    assert committed(root)


def test_what_is_named_and_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path)))
    step(made, net, *rest)
    made.save_state(str(tmp_path / "run" / "one"))
    accelerate_ckpt.checkpoints(made).wait()
    before = weights(net)
    for wrong, told in (("run", "it holds 1; .*run/one"), ("run/one/manifest.json", "it is a file")):
        with pytest.raises(ConfigError, match=told):
            made.load_state(str(tmp_path / wrong))
    with pytest.raises(CheckpointNotFoundError):
        made.load_state(str(tmp_path / "nothing" / "there"))
    assert weights(net) == before
    made.end_training()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"strict": False}])
@pytest.mark.parametrize("now", ["trains more", "trains less", "trains more of a larger model"])
def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes(
    tmp_path: Path, now: str, how: dict[str, bool]
) -> None:
    class Net(nn.Module):
        def __init__(self, *, larger: bool = False) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
            if larger:
                self.more = nn.Linear(3, 3)

    def made_with(net: Net, *trained: nn.Module) -> tuple[Any, Any]:
        forget_accelerators()
        made = accelerator(JOB.but(root=str(tmp_path)))
        accelerate_ckpt.enable(made, tmp_path)
        parameters = [each for module in trained for each in module.parameters()]
        return made, made.prepare(net, torch.optim.AdamW(parameters))

    net = Net()
    made, _ = made_with(net, net.body)
    made.save_state()
    made.end_training()
    net = Net(larger=now == "trains more of a larger model")
    trained = {"trains more": [net.body, net.head], "trains less": [net.head]}
    made, _ = made_with(net, *trained.get(now, [net.body, net.head]))
    before = weights(net)
    for where in ((), (str(tmp_path / "checkpoint_0"),)):
        with pytest.raises(IncompatibleCheckpointError, match="nothing was loaded"):
            made.load_state(*where, **how)
        assert weights(net) == before
    made.end_training()


def test_a_root_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for root in ("file", "file/below"):
        with pytest.raises(ConfigError, match=f"{root} is no directory"):
            prepared(JOB.but(root=str(tmp_path / root)))
        forget_accelerators()


@pytest.mark.parametrize("wrong", [5, b"runs", ["runs"], 0.5, ""])
def test_what_can_be_no_directory_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    made, *_ = prepared(JOB.but(root=str(tmp_path)))
    for call in (made.save_state, made.load_state, accelerate_ckpt.checkpoints(made).directory):
        with pytest.raises(ConfigError, match="must be a path or URL, not"):
            call(wrong)
    made.end_training()
    assert not list(tmp_path.glob("*/COMMITTED"))


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), "runs/x", None])
def test_what_is_no_accelerator_is_told_so(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes an accelerate.Accelerator, not a"):
        accelerate_ckpt.enable(wrong)


def test_an_engine_with_checkpoints_of_its_own_is_told_so() -> None:
    from accelerate.utils import DistributedType

    made = accelerator(JOB)
    made.state.distributed_type = DistributedType.DEEPSPEED
    accelerate_ckpt.enable(made)
    with pytest.raises(ConfigError, match="DEEPSPEED keeps its own"):
        accelerate_ckpt.checkpoints(made)
