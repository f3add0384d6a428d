"""One rule for paths in every host: a directory is one root, in whatever way it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import accelerate_ckpt
from ckpt_core import CheckpointManager, EverySteps
from ckpt_core.cli import main
from tests.adapters.accelerate_jobs import Job, prepared, step
from tests.adapters.trainer_jobs import TrainerJob, trainer

JOB = Job(strategy="single", world=1)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to the directory that `run` is in."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    return tmp_path / "link"


def names(root: Path) -> list[str]:
    return [info.name for info in CheckpointManager(root).checkpoints()]


def spellings(link: Path, name: str) -> list[str]:
    root = link.parent / "disk" / "run"
    (root / "latest").symlink_to(name)
    return [f"{link}/run/{name}", f"file://{root}/{name}", f"{root}/x/../{name}", f"{link}/run/latest"]


def test_lightning_continues_a_run_by_any_spelling_of_its_directory(
    link: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning.pytorch")
    from tests.adapters.test_lightning_lineage import ShardedCheckpoint, Small, data, trainer_of

    def fit(dirpath: str, max_steps: int, ckpt_path: str | None = None) -> Any:
        callback = ShardedCheckpoint(dirpath, save=EverySteps(1))
        monkeypatch.chdir(link.parent)
        trainer_of(callback, max_steps=max_steps).fit(Small(), data(), ckpt_path=ckpt_path)
        return callback

    monkeypatch.chdir(link)
    assert fit("run", 1).last_model_path == str(link.parent / "disk" / "run" / "step-000000001")
    for number, path in enumerate(spellings(link, "step-000000001")):
        assert fit(f"{link}/run", number + 2, path).settings.root == str(link.parent / "disk" / "run")
    assert "starting afresh" not in caplog.text
    assert "earlier run" not in caplog.text
    assert names(link / "run")[-1] == "step-000000005"


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_saves_and_loads_by_any_spelling_of_one_root(
    link: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(link)
    made, *rest = prepared(JOB.but(root="run"))
    monkeypatch.chdir(link.parent)
    step(made, *rest)
    root = link.parent / "disk" / "run"
    assert made.save_state() == root / "checkpoint_0", "where it was when `enable` was called"
    accelerate_ckpt.checkpoints(made).wait()
    for path in spellings(link, "checkpoint_0"):
        made.load_state(path)
    for number, path in enumerate([f"{link}/run", f"file://{root}", f"{root}/x/.."]):
        step(made, *rest)
        assert accelerate_ckpt.checkpoints(made).directory(f"{path}/mine-{number}") == f"{root}/mine-{number}"
        made.save_state(f"{path}/mine-{number}")  # by a second manager the root would be refused
    made.end_training()
    assert names(root) == ["checkpoint_0", "mine-0", "mine-1", "mine-2"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_the_trainer_resumes_by_any_spelling_of_its_output_directory(
    link: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainerJob(root=f"{link}/run", steps=1, save_steps=1)
    trainer(job).train()
    for number, path in enumerate(spellings(link, "checkpoint-1")[::2]):
        trainer(job.but(steps=number + 2)).train(resume_from_checkpoint=path)
    assert "starting afresh" not in caplog.text
    assert names(link / "run") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_command_line_finds_a_checkpoint_by_any_spelling(
    link: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = link.parent / "disk" / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, {"value": 1})
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(link))
    for path in [*spellings(link, "step-000000001"), "step-000000001", "~/run/step-000000001"]:
        assert main(["verify", path]) == 0
        assert main(["show", path, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out.partition("\n")[2])
        assert shown["checkpoint"] == f"{root}/{path.rpartition('/')[2]}"
    for path in (f"{link}/run", f"file://{root}", "."):
        assert main(["ls", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["root"] == str(root)


def test_a_trainer_whose_output_directory_is_a_url_saves_to_that_store_and_resumes_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # the Trainer itself makes a directory of that name here
    job = TrainerJob(root="memory://trainers/run", steps=2, save_steps=1)
    trainer(job).train()
    assert [info.step for info in CheckpointManager(job.root).checkpoints()] == [1, 2]
    trainer(job.but(steps=3)).train(resume_from_checkpoint=True)
    trainer(job.but(steps=4)).train(resume_from_checkpoint=f"{job.root}/checkpoint-3")
    assert [info.step for info in CheckpointManager(job.root).checkpoints()] == [1, 2, 3, 4]
    assert list(tmp_path.rglob("*.distcp")) == []
