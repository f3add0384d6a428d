"""Accelerate: a save inside an accumulation window, with its gradients, resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_ckpt
from accelerate_ckpt._roots import Settings
from ckpt_core import ConfigError, IncompatibleCheckpointError, SaveError
from tests.adapters.accelerate_jobs import Job, accelerator, forget_accelerators, prepare
from tests.kit.ranks import run_ranks

JOB = Job(strategy="single", world=1, accumulation=4)


def begun(job: Job, **options: Any) -> tuple[Any, ...]:
    made = accelerator(job)
    accelerate_ckpt.enable(made, job.root, **options)
    torch.manual_seed(made.process_index)
    return made, *prepare(job, made)[:3]


def train(made: Any, net: Any, optimizer: Any, scheduler: Any, *, until: int) -> None:
    while made.step < until:
        seed = made.step * 10 + made.process_index
        batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        with made.accumulate(net):
            made.backward(net(batch).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def values(made: Any, net: Any) -> Any:
    found = [None if each.grad is None else each.grad.tolist() for each in net.parameters()]
    return [each.tolist() for each in net.parameters()], found, made.sync_gradients, made.step


def cut_inside_a_window(job: Job) -> list[Any]:
    """Values at the save and at the end, of the run that saves and of the one that resumes."""
    results = []
    for resumes in (False, True):
        made, *trained = begun(job, gradients=True)
        if resumes:
            made.load_state()
        else:
            train(made, *trained, until=6)
            made.save_state()
        at_the_save = values(made, trained[0])
        train(made, *trained, until=11)
        results.append((at_the_save, values(made, trained[0])))
        accelerate_ckpt.disable(made)
        forget_accelerators()
    return results


def refused(job: Job) -> str:
    made, *trained = begun(job.but(strategy="fsdp2"), gradients=True)
    train(made, *trained, until=2)
    with pytest.raises(SaveError) as caught:
        made.save_state()
    accelerate_ckpt.disable(made)
    return str(caught.value)


def on_two_ranks(job: Job) -> tuple[Any, str]:
    return cut_inside_a_window(job), refused(job.but(root=f"{job.root}-refused"))


def check(results: list[Any]) -> None:
    saving, resumed = results
    assert saving == resumed
    (_, gradients, synchronised, step), _ = saving
    assert None not in gradients
    assert (synchronised, step) == (False, 6)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_save_within_a_window_resumes_with_its_gradients_and_its_place_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = JOB.but(root=str(tmp_path))
    check(cut_inside_a_window(job))
    assert "accumulation window" not in caplog.text
    made, *_ = begun(job)
    made.load_state()
    assert "gradients accumulated until then are not loaded" in caplog.text
    made.end_training()


@pytest.mark.distributed
@pytest.mark.usefixtures("fresh_accelerate")
def test_ranks_resume_within_a_window_with_gradients_of_their_own(tmp_path: Path) -> None:
    job = JOB.but(strategy="ddp", world=2, root=str(tmp_path / "run"))
    ranks = run_ranks(on_two_ranks, 2, job)
    for results, said in ranks:
        check(results)
        assert "FSDP2 accumulates them without synchronisation" in said
    made, *_ = begun(JOB.but(root=job.root), gradients=True)
    with pytest.raises(IncompatibleCheckpointError, match="gradients that 2 ranks had each by itself"):
        made.load_state()
    made.end_training()


def test_gradients_are_a_switch_of_every_carrier() -> None:
    assert Settings.resolve({}, {"CKPT_SUITE_GRADIENTS": "1"}).gradients is True
    assert Settings.resolve({}, {}).gradients is False
    with pytest.raises(ConfigError, match="gradients must be true or false"):
        Settings.resolve({"gradients": 3}, {})
