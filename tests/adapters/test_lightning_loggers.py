"""Lightning's loggers hear of each checkpoint once it is committed, and cannot harm it."""

from __future__ import annotations

import inspect
import logging
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch.loggers import Logger, mlflow, wandb
from lightning.pytorch.loggers.utilities import _scan_checkpoints

from ckpt_core import EverySteps, KeepBest
from ckpt_core.names import MARKER
from tests.adapters.lightning_jobs import Job, fit

pytestmark = pytest.mark.filterwarnings("ignore")


class Recorder(Logger):
    """A logger as users write one; `told` has what it could see when it was told."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []
        self.uploads: list[Any] = []
        self.finalized_after: int | None = None
        self._error = error

    name, version = "recorder", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...
    def log_hyperparams(self, params: Any) -> None: ...

    def finalize(self, status: str) -> None:
        self.finalized_after = len(self.told)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = Path(checkpoint_callback.last_model_path)
        names = ("dirpath", "monitor", "mode", "save_top_k", "best_model_path", "current_score")
        self.told.append(
            {
                **{name: getattr(checkpoint_callback, name) for name in names},
                "path": path.name,
                "committed": (path / MARKER).exists(),
                "best": {Path(p).name: s.item() for p, s in checkpoint_callback.best_k_models.items()},
                "thread": threading.current_thread(),
            }
        )
        # What stock loggers would upload.
        self.uploads += _scan_checkpoints(checkpoint_callback, {})
        if self._error is not None:
            raise self._error


class MLFlowLogger(Recorder):
    """What ours uses of Lightning's logger of this name; it records instead of sending."""

    _log_model: ClassVar[Any] = "all"
    run_id = "run"

    @property
    def experiment(self) -> Any:
        return self

    def log_dict(self, run_id: str, content: dict[str, Any], path: str) -> None:
        self.uploads.append((run_id, path, content))


class LogsLast(MLFlowLogger):
    _log_model = True


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[Any], list[str]]:
    """One training with several loggers, one of which fails."""
    root = tmp_path_factory.mktemp("loggers")
    loggers = [Recorder(OSError("no network")), Recorder(), MLFlowLogger(), LogsLast()]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_ckpt").addHandler(handler)
    options = {"save": EverySteps(3), "keep": KeepBest("val_loss", n=2)}
    patched = {"logger": loggers, "val_check_interval": 3}
    job = Job(root=str(root), max_steps=8, validate=True, options=options, trainer=patched)
    fit(job)
    logging.getLogger("lightning_ckpt").removeHandler(handler)
    return root / "run", loggers, lines


def test_every_commit_is_announced_once_in_order_on_the_thread_that_trains(trained):
    root, (_, recorder, *_), _ = trained

    assert [told["path"] for told in recorder.told] == [f"step-{step:09d}" for step in (3, 6, 8)]
    assert all(told["committed"] and told["thread"] is threading.main_thread() for told in recorder.told)
    assert {told["dirpath"] for told in recorder.told} == {str(root)}
    assert recorder.finalized_after == 3


def test_loggers_find_what_they_read_of_a_model_checkpoint(trained):
    root, (_, recorder, *_), _ = trained
    second = recorder.told[1]

    assert (second["monitor"], second["mode"], second["save_top_k"]) == ("val_loss", "min", -1)
    assert set(second["best"]) == {"step-000000003", "step-000000006"}
    assert second["current_score"].item() == second["best"]["step-000000006"]
    assert Path(second["best_model_path"]).parent == root


def test_no_logger_is_given_a_directory_to_upload_but_those_that_log_models_get_its_url(trained):
    root, (_, recorder, every, last), _ = trained

    assert recorder.uploads == []
    assert [(run, path) for run, path, _ in every.uploads] == [
        ("run", f"checkpoints/step-{step:09d}.json") for step in (3, 6, 8)
    ]
    _, path, content = last.uploads[0]
    assert (path, len(last.uploads)) == ("checkpoints/step-000000008.json", 1)
    assert content["url"] == (root / "step-000000008").as_uri()
    assert (content["step"], "latest" in content["aliases"]) == (8, True)


def test_a_logger_that_fails_is_reported_once_and_harms_nothing(trained):
    root, (broken, recorder, *_), lines = trained

    assert len(broken.told) == len(recorder.told) == 3
    assert [line for line in lines if "Recorder failed" in line and "no network" in line] == [
        next(line for line in lines if "Recorder failed" in line)
    ]
    assert (root / "step-000000008" / MARKER).exists()


def test_lightnings_loggers_still_have_what_is_read_of_them():
    """Neither package is installed here; the names are those of Lightning's own classes."""
    for kind, names in (
        (wandb.WandbLogger, ("_log_model", "_checkpoint_name")),
        (mlflow.MLFlowLogger, ("_log_model",)),
    ):
        code = inspect.getsource(kind.__init__)
        assert all(f"self.{name} = " in code for name in names)
        assert isinstance(inspect.getattr_static(kind, "experiment"), property)
