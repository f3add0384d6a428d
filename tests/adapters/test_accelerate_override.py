"""Hyperparameters that a resumed run of Accelerate or of the Trainer changes: once, and recorded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import accelerate_ckpt
from accelerate_ckpt._roots import Settings
from accelerate_ckpt._runner import main
from ckpt_core import CheckpointManager, ConfigError
from tests.adapters.accelerate_jobs import Job, prepared, step, train
from tests.adapters.trainer_jobs import TrainerJob, run, trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

CHANGE = {"lr": 5e-3, "weight_decay": 0.25}


def annotations(root: Path) -> dict[str, Any]:
    manifests = root.glob("*/manifest.json")
    return {
        each.parent.name: json.loads(each.read_text())["annotations"].get("override") for each in manifests
    }


def lineages(root: Path) -> int:
    return len({info.lineage.id for info in CheckpointManager(root).checkpoints()})


def test_accelerate_goes_on_from_an_override_as_if_never_stopped(tmp_path: Path) -> None:
    job = Job(strategy="single", world=1, steps=9, save_at=(3, 6, 9))
    results = []
    for root, stops in ((tmp_path / "whole", (9,)), (tmp_path / "cut", (6, 9))):
        train(job.but(root=str(root), steps=3))
        trace = []
        for steps in stops:
            found = train(job.but(root=str(root), steps=steps, resume=True), override=CHANGE)
            trace += found["trace"]
        results.append((trace, found["state"]))
    assert results[0] == results[1]
    assert annotations(tmp_path / "cut") == {
        "checkpoint_3": None,
        "checkpoint_6": CHANGE,
        "checkpoint_9": CHANGE,
    }
    assert lineages(tmp_path / "cut") == 2


def test_accelerate_changes_groups_and_schedule_where_it_loads(tmp_path: Path) -> None:
    job = Job(strategy="single", world=1, root=str(tmp_path), steps=3, save_at=(3,))
    train(job)
    for load in (None, tmp_path / "checkpoint_3"):
        made, net, optimizer, scheduler, _ = prepared(job, override={"lr": 1e-3})
        made.load_state(load)
        assert (optimizer.param_groups[0]["lr"], scheduler.get_last_lr()) == (1e-3, [pytest.approx(1e-3)])
        step(made, net, optimizer)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 1.3 / 1.4)
        made.end_training()


def test_accelerate_refuses_a_change_that_cannot_be_made_or_recorded(tmp_path: Path) -> None:
    job = Job(strategy="single", world=1, root=str(tmp_path / "run"), steps=3, save_at=(3,))
    train(job)
    for change, act, told in (
        ({"learning_rate": 1}, "load", "no optimizer has learning_rate; there are"),
        ({"lr": 1}, "save", "nothing was loaded from"),
        ({"lr": 1}, "elsewhere", "nothing was loaded from"),
    ):
        made, net, *_ = prepared(job, override=change)
        before = [each.clone() for each in net.parameters()]
        if act == "elsewhere":
            made.load_state()
        with pytest.raises(ConfigError, match=told):
            made.load_state() if act == "load" else made.save_state(str(tmp_path / "other" / "a"))
        unchanged = [a.equal(b) for a, b in zip(before, net.parameters(), strict=True)]
        assert act == "elsewhere" or all(unchanged)
        made.end_training()
    assert list(annotations(tmp_path / "run")) == ["checkpoint_3"]
    assert not (tmp_path / "other").exists()


def test_the_trainer_goes_on_from_an_override_as_if_never_stopped(tmp_path: Path) -> None:
    results = []
    for root, stops in ((tmp_path / "whole", (9,)), (tmp_path / "cut", (6, 9))):
        job = TrainerJob(root=str(root), steps=9, arguments={"max_steps": 9, "lr_scheduler_type": "constant"})
        run(job.but(arguments={**job.arguments, "max_steps": 3}))
        losses = {}
        for steps in stops:
            arguments = {**job.arguments, "max_steps": steps}
            found = run(job.but(resume=True, arguments=arguments, options={"override": CHANGE}))
            losses |= found["losses"]
        results.append((losses, found["weights"]))
    assert results[0] == results[1]
    assert annotations(tmp_path / "cut") == {
        "checkpoint-3": None,
        "checkpoint-6": CHANGE,
        "checkpoint-9": CHANGE,
    }


def test_the_trainer_keeps_the_checkpoints_rate_unless_it_is_overridden(tmp_path: Path) -> None:
    """As stock does: `learning_rate` of other arguments counts for a fresh optimizer only."""
    job = TrainerJob(root=str(tmp_path), steps=6, arguments={"lr_scheduler_type": "linear"})
    first = trainer(job)
    first.train()
    accelerate_ckpt.disable_trainer(first)
    rates = []
    for options in ({}, {"override": {"lr": 1e-4}}):
        other = job.but(steps=7, arguments={"max_steps": 6, "learning_rate": 0.5}, options=options)
        made = trainer(other)
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        rates.append([entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry])
        accelerate_ckpt.disable_trainer(made)
    kept, changed = rates
    assert kept[-3:] == pytest.approx([1e-2 * left / 6 for left in (3, 2, 1)])
    assert changed[-3:] == pytest.approx([1e-4 * left / 3 for left in (3, 2, 1)])


def test_the_trainer_refuses_a_change_that_cannot_be_made_or_recorded(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path), steps=3, options={"override": {"lr": 1e-3}})
    with pytest.raises(ConfigError, match="resumes no checkpoint of ours"):
        run(job.but(resume=True))
    run(job.but(options={}))
    with pytest.raises(ConfigError, match="no optimizer has learning_rate"):
        run(job.but(resume=True, steps=6, options={"override": {"learning_rate": 1e-3}}))


def test_the_launcher_hands_overrides_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_SUITE_OVERRIDE", "{lr: 1}")
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['CKPT_SUITE_OVERRIDE'], sys.argv[1:])\n")
    monkeypatch.setattr(sys, "argv", ["accelerate_ckpt"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("accelerate_ckpt._runner._enable_every_accelerator", lambda: None)
    monkeypatch.setattr("accelerate_ckpt._runner.enable_every_trainer", lambda: None)
    main(["--override", "lr=1e-4", "--override=betas=[0.8,0.9]", str(script), "--override", "own"])
    assert capsys.readouterr().out == "{\"lr\": 0.0001, \"betas\": [0.8, 0.9]} ['--override', 'own']\n"
    settings = Settings.resolve({}, os.environ)
    assert settings.override.values == {"lr": 1e-4, "betas": [0.8, 0.9]}
    for wrong in ("lr", "lr=fast", "=1"):
        with pytest.raises(SystemExit, match="override"):
            main(["--override", wrong, str(script)])


def test_an_override_comes_from_every_carrier(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("override: {lr: 1e-4, param_groups.1.lr: 2.0e-4}\n")
    settings = Settings.resolve({}, {"CKPT_SUITE_CONFIG": str(file)})
    assert settings.override.values == {"lr": 1e-4, "param_groups.1.lr": 2e-4}
    assert Settings.resolve({}, {"CKPT_SUITE_OVERRIDE": "{lr: 1e-4}"}).override.values == {"lr": 1e-4}
    with pytest.raises(ConfigError, match="override must be a mapping"):
        Settings.resolve({}, {"CKPT_SUITE_OVERRIDE": "3"})
