"""The local disk is lost: each host resumes from the further tier by its own ordinary call."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest

import accelerate_ckpt
from ckpt_core import EverySteps
from tests.adapters.accelerate_jobs import Job, prepared, step, weights
from tests.adapters.fabric_jobs import Training
from tests.adapters.lightning_jobs import Job as LightningJob
from tests.adapters.lightning_jobs import fit
from tests.adapters.trainer_jobs import TrainerJob, run

# Lightning and Fabric warn of small data sets and few workers, and torchdata of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def fetched(caplog):
    """Names of the checkpoints that were fetched since the last look."""
    caplog.set_level(logging.INFO, "ckpt_core")

    def look() -> list[str]:
        found = re.findall(r"(\S+) is not whole in \S+: it is fetched", caplog.text)
        caplog.clear()
        return found

    return look


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def remove(name: str, *roots: Path) -> None:
    for root in roots:
        shutil.rmtree(root / name)


@pytest.mark.slow
def test_the_trainer_resumes_what_its_disk_lost_or_damaged(tmp_path, fresh_accelerate, fetched):
    local, bucket = tmp_path / "local", tmp_path / "bucket"
    job = TrainerJob(root=str(local), steps=6, options={"upload": str(bucket)})
    whole = run(job)["weights"]
    assert sorted(path.name for path in bucket.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert fetched() == []
    remove("checkpoint-6", bucket)
    shutil.rmtree(local)
    assert run(job.but(resume=True))["weights"] == whole
    assert fetched() == ["checkpoint-3"]
    remove("checkpoint-6", local, bucket)
    # Found by the Trainer's look at every byte.
    flip(local / "checkpoint-3" / "model.safetensors")
    assert run(job.but(resume=True))["weights"] == whole
    assert fetched() == ["checkpoint-3"]
    shutil.rmtree(local)
    assert run(job.but(resume=f"{local}/checkpoint-3"))["weights"] == whole
    assert fetched() == ["checkpoint-3"]


def test_load_state_finds_what_the_disk_of_accelerate_lost(tmp_path, fresh_accelerate, fetched):
    job = Job(strategy="single", world=1, root=str(tmp_path / "project"), automatic=True)
    local, bucket = tmp_path / "project" / "checkpoints", tmp_path / "bucket"
    made, net, *rest = prepared(job, upload=str(bucket))
    saved = []
    for _ in range(2):
        step(made, net, *rest)
        made.save_state()
        saved.append(weights(net))
    made.end_training()
    shutil.rmtree(local)

    made, net, *rest = prepared(job, upload=str(bucket))
    made.load_state(str(local / "checkpoint_0"))
    assert weights(net) == saved[0]
    made.load_state()
    assert weights(net) == saved[1]
    assert fetched() == ["checkpoint_0", "checkpoint_1"]
    step(made, net, *rest)
    made.save_state()
    saved.append(weights(net))
    made.end_training()
    names = ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert sorted(path.name for path in bucket.glob("checkpoint_*")) == names

    flip(next((local / "checkpoint_2").glob("rank-*.json")))
    made, net, *rest = prepared(job, upload=str(bucket))
    made.load_state()
    assert weights(net) == saved[2]
    assert fetched() == ["checkpoint_2"]
    assert not accelerate_ckpt.checkpoints(made).manager.verify()
    made.end_training()


def test_lightning_resumes_what_its_disk_lost(tmp_path):
    unsaved, saves = {"save": None, "save_last": False}, {"save": EverySteps(4), "save_last": False}
    options = {**saves, "upload": str(tmp_path / "bucket")}
    full = fit(LightningJob(root=str(tmp_path / "full"), max_steps=9, options=unsaved))
    job = {"root": str(tmp_path / "cut"), "options": options}
    fit(LightningJob(max_steps=6, **job))
    local = tmp_path / "cut" / "run"
    for path in ("last", f"{local}/step-000000004"):
        shutil.rmtree(local)
        resumed = fit(LightningJob(max_steps=7 if path == "last" else 9, ckpt_path=path, **job))
        assert min(resumed.losses) == 4
    assert resumed.weights == full.weights


def test_fabric_resumes_what_its_disk_lost(tmp_path):
    options = {"upload": str(tmp_path / "bucket")}
    training = Training(tmp_path / "run", options=options)
    training.run(3)
    training.fabric.save(tmp_path / "run" / "three", training.state)
    losses = training.run(2)
    training.checkpoints.close()
    for path in ("last", tmp_path / "run" / "three"):
        shutil.rmtree(tmp_path / "run")
        resumed = Training(tmp_path / "run", options=options, seed=9)
        resumed.fabric.load(path, resumed.state)
        assert resumed.state["step"] == 3
        assert resumed.run(2) == losses
        resumed.checkpoints.close()
