"""A Trainer script that knows nothing of us, under `python -m accelerate_ckpt`."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from transformers import Trainer, TrainerCallback

import accelerate_ckpt
from accelerate_ckpt import _runner as _trainer_runner
from accelerate_ckpt.trainer._checkpoints import attached_to
from ckpt_core import ConfigError
from tests.adapters.trainer_jobs import TrainerJob, trainer
from tests.scripts import run_python

SCRIPT = """
import os, signal, sys
from transformers import TrainerCallback
from tests.adapters.trainer_jobs import TrainerJob, trainer

class Preempted(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGTERM)

made = trainer(TrainerJob(root=sys.argv[1], steps=6, save_steps=100, enabled=False))
made.add_callback(Preempted())
made.train(resume_from_checkpoint=True)
print("finished at", made.state.global_step)
"""


@pytest.fixture
def every_trainer_enabled(fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the runner does, taken back afterwards."""
    for name in ("__init__", "create_accelerator_and_postprocess"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))
    _trainer_runner.enable_every_trainer()
    return monkeypatch


class Preempted(TrainerCallback):  # type: ignore[misc,unused-ignore]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def unchanged(root: Path, **arguments: Any) -> Any:
    return trainer(TrainerJob(root=str(root), steps=6, enabled=False, arguments=arguments))


def test_a_trainer_is_enabled_whole_and_a_preempted_script_ends(
    tmp_path: Path, every_trainer_enabled: pytest.MonkeyPatch
) -> None:
    every_trainer_enabled.setenv("CKPT_SUITE_SAVE", "{every_steps: 2, on_preemption: true}")
    every_trainer_enabled.setenv("CKPT_SUITE_KEEP", "{latest: 1}")
    made = unchanged(tmp_path)
    made.add_callback(Preempted())
    with pytest.raises(SystemExit) as ended:
        made.train()
    assert ended.value.code == 143
    assert [path.parent.name for path in tmp_path.glob("*/COMMITTED")] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_trainer_that_only_evaluates_hears_no_signal(
    tmp_path: Path, every_trainer_enabled: pytest.MonkeyPatch
) -> None:
    every_trainer_enabled.setenv("CKPT_SUITE_SAVE", "{on_preemption: true}")
    made = unchanged(tmp_path)
    made.evaluate()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_subclass_is_enabled_with_its_own_methods_and_the_users_call_wins(
    tmp_path: Path, every_trainer_enabled: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    class Sub(Trainer):  # type: ignore[misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.own = "set after the base class"

        def train(self, *args: Any, **kwargs: Any) -> Any:
            trained.append(self.own)
            return super().train(*args, **kwargs)

    every_trainer_enabled.setattr(transformers, "Trainer", Sub)
    made = unchanged(tmp_path, save_steps=3)
    assert attached_to(made) is None, "nothing is claimed before it trains"
    made.train()
    implicit = attached_to(made)
    assert implicit is not None
    assert implicit.implicit
    assert trained == ["set after the base class"]
    assert len(list(tmp_path.glob("*/COMMITTED"))) == 2
    accelerate_ckpt.enable_trainer(made)
    assert attached_to(made) is not implicit
    with pytest.raises(ConfigError, match="enabled already"):
        accelerate_ckpt.enable_trainer(made)
    accelerate_ckpt.disable_trainer(made)
    waiting = unchanged(tmp_path / "explicit", save_steps=3)
    accelerate_ckpt.enable_trainer(waiting, stock_files=False)
    waiting.train()
    assert trained == ["set after the base class"] * 2
    assert not (tmp_path / "explicit" / "checkpoint-3" / "model.safetensors").exists()


def test_what_cannot_be_enabled_is_said_and_stays_the_stock_trainers(
    tmp_path: Path, every_trainer_enabled: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = unchanged(tmp_path, push_to_hub=False, max_steps=1)
    made.args.push_to_hub = True
    with pytest.raises(AttributeError):  # no repository was made when it was made
        made.train()
    assert attached_to(made) is None
    assert "they stay the stock Trainer's own" in caplog.text
    searched = unchanged(tmp_path)
    with pytest.raises(RuntimeError, match="trial"):  # no library for such a search is installed
        searched.train(trial={"learning_rate": 1e-3})
    assert "hyperparameter" in caplog.text
    assert attached_to(searched) is None


def test_the_class_is_changed_when_its_module_is_imported_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_trainer.py").write_text(
        "class Trainer:\n    def create_accelerator_and_postprocess(self): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_trainer_runner, "_MODULE", "late_trainer")
    monkeypatch.setattr(sys, "meta_path", before := list(sys.meta_path))
    _trainer_runner.enable_every_trainer()
    assert "late_trainer" not in sys.modules
    late: Any = importlib.import_module("late_trainer")
    monkeypatch.delitem(sys.modules, "late_trainer")
    assert hasattr(late.Trainer.__init__, "__wrapped__")
    assert [finder for finder in sys.meta_path if type(finder) is _trainer_runner._Watch] == []
    assert sys.meta_path == before


@pytest.mark.slow
def test_a_whole_script_is_preempted_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {"ACCELERATE_USE_CPU": "true", "CKPT_SUITE_SAVE": "{on_preemption: true}"}

    def arguments(stop_at: int) -> tuple[str, ...]:
        return "-m", "accelerate_ckpt", "script.py", "run", str(stop_at)

    # The first from a cold start, with the imports that the runner has to watch.
    first = subprocess.run(
        [sys.executable, *arguments(2)],
        check=False, cwd=tmp_path, env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    second = run_python(*arguments(-1), cwd=tmp_path, variables=variables)
    assert first.returncode == 143, first.stderr
    assert "finished" not in first.stdout
    assert (second.returncode, "finished at 6" in second.stdout) == (0, True), second.stderr
    assert {path.parent.name for path in (tmp_path / "run").glob("*/COMMITTED")} == {
        "checkpoint-3",
        "checkpoint-6",
    }
