"""Accelerate in directories that are the user's, or stock Accelerate's, as scripts have them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import accelerate_ckpt
from ckpt_core import CheckpointError
from ckpt_core.commit import replaced
from ckpt_core.storage import LocalStorage
from tests.adapters.accelerate_jobs import Job, committed, prepared, step, weights

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

JOB = Job(strategy="single", world=1)


def test_what_a_script_puts_there_before_during_and_after_a_save_stays(tmp_path: Path) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path)), stock_files=True)
    place = tmp_path / "checkpoint-5"
    place.mkdir()
    (place / "args.json").write_text(json.dumps({"lr": 1}))
    (place / "model.safetensors").write_bytes(b"exported by the user")
    step(made, net, *rest)
    made.save_state(str(place))
    (place / "logs").mkdir(exist_ok=True)
    (place / "logs" / "events").write_bytes(b"while it is in flight")
    accelerate_ckpt.checkpoints(made).wait()
    (place / "tokenizer.json").write_text("{}")
    step(made, net, *rest)
    saved = weights(net)
    made.save_state(str(place))
    step(made, net, *rest)
    made.load_state(str(place))
    assert weights(net) == saved
    made.end_training()
    for name in ("args.json", "tokenizer.json", "logs/events"):
        assert (place / name).exists(), name
    (beside,) = place.glob("model.safetensors.yours-*")
    assert beside.read_bytes() == b"exported by the user"
    assert committed(tmp_path) == ["checkpoint-5"]


def test_the_jobs_own_working_directory_is_refused_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Hydra, which starts a job in its output directory, and `save_state(os.getcwd())`."""
    place = tmp_path / "output"
    place.mkdir()
    monkeypatch.chdir(place)
    Path("train.log").write_text("still mine")
    made, *rest = prepared(JOB.but(root=str(tmp_path)))
    step(made, *rest)

    def save() -> None:
        made.save_state(str(place))
        made.end_training()

    with pytest.raises(CheckpointError, match=r"output is the working directory of this job.*another name"):
        save()
    Path("after.txt").write_text("relative to where the job is")
    assert {path.name for path in place.iterdir()} == {"train.log", "after.txt"}
    assert committed(tmp_path) == []


def test_over_a_stock_checkpoint_of_the_same_name_training_goes_on(tmp_path: Path) -> None:
    made, net, *rest = prepared(JOB.but(root=str(tmp_path), enabled=False))
    step(made, net, *rest)
    made.save_state(str(tmp_path / "checkpoint_0"))
    before = {path.name for path in (tmp_path / "checkpoint_0").iterdir()}
    stock = weights(net)
    accelerate_ckpt.enable(made, tmp_path)
    step(made, net, *rest)
    made.save_state(str(tmp_path / "checkpoint_0"))
    accelerate_ckpt.checkpoints(made).wait()
    (moved,) = replaced(LocalStorage(tmp_path))
    assert {path.name for path in (tmp_path / moved).iterdir()} == before
    made.load_state(str(tmp_path / moved))
    assert weights(net) == stock
    made.end_training()
    assert committed(tmp_path) == ["checkpoint_0"]


def test_scripts_that_split_names_never_meet_one_in_flight(tmp_path: Path) -> None:
    """diffusers' rotation and its `--resume_from_checkpoint latest`, before each save and after a kill."""
    made, *rest = prepared(JOB.but(root=str(tmp_path)))
    for number in (1, 2, 3):
        step(made, *rest)
        made.save_state(str(tmp_path / f"checkpoint-{number}"))
        names = [name for name in os.listdir(tmp_path) if name.startswith("checkpoint")]  # noqa: PTH208
        assert sorted(names, key=lambda name: int(name.split("-")[1]))[-1:] in (
            [],
            [f"checkpoint-{number}"],
            [f"checkpoint-{number - 1}"],
        )
    made.end_training()
