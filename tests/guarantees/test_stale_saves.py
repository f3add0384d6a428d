"""A save in which nothing was trained since the one before is told, and what may stay the same is not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, SaveError, TrainState
from tests.kit.ranks import run_ranks


class Run:
    """A small training whose parts can be kept from changing."""

    def __init__(self, root, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.model[0].requires_grad_(requires_grad=False)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = optimizer(trained, lr=0.1)
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.manager = CheckpointManager(root, **options)
        self.step = 0

    def train(self, steps=1):
        for _ in range(steps):
            self.model(torch.randn(8, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, by=10, **arguments):
        self.step += by
        self.manager.save(self.step, self.state, **arguments)
        self.manager.wait()

    @property
    def steps(self):
        return [info.step for info in self.manager.checkpoints()]


@pytest.fixture(params=["blocking", "overlapped"])
def run(request, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path, staging=request.param)
    run.train()
    run.save()
    run.train()
    run.save()
    assert not caplog.records  # frozen parameters stay the same
    with run.manager:
        yield run


def told(caplog):
    return [record.getMessage() for record in caplog.records if "has changed since" in record.getMessage()]


def test_a_save_without_a_step_of_the_optimizer_is_told_once_with_the_names(run, caplog):
    run.model(torch.randn(8, 4))  # statistics of batches change
    run.save()
    run.save()
    (text,) = told(caplog)
    assert text.startswith("step 30: nothing that is trained of the model (model.1.weight, model.1.bias, ")
    assert "and of the optimizer's state (optimizer.state.1.weight." in text
    assert "has changed since step 20" in text
    assert "model.0" not in text
    assert run.steps == [10, 20, 30, 40]


def test_steps_that_leave_the_model_as_it_was_are_told(run, caplog):
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.train()
    run.save()
    (text,) = told(caplog)
    assert "of the model" in text
    assert "of the optimizer" not in text


def test_an_optimizer_whose_state_stays_the_same_is_told(run, caplog):
    with torch.no_grad():
        run.model[2].weight.add_(1.0)
    run.save()
    (text,) = told(caplog)
    assert "of the optimizer" in text
    assert "of the model" not in text


def test_one_changed_element_of_one_trained_tensor_is_training(run, caplog):
    with torch.no_grad():
        run.model[1].bias[3] += 1e-3
        next(iter(run.optimizer.state.values()))["step"] += 1
    run.save()
    assert told(caplog) == []


def test_the_same_step_again_a_step_back_and_another_plan_are_not_told(run, caplog):
    run.save(by=0, name="best")  # the same step under a name
    run.save(by=-5)  # training went back
    run.save(by=0, name="again")
    run.model.register_buffer("extra", torch.zeros(2))
    run.save()  # not comparable
    assert told(caplog) == []
    run.save()
    assert len(told(caplog)) == 1


def test_an_evaluation_without_an_optimizer_is_not_told(tmp_path, caplog):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, TrainState(model=nn.Linear(2, 2).requires_grad_(requires_grad=False)))
            manager.save(10 + step, {"w": torch.zeros(3)}, name=f"plain-{step}")
            manager.wait()
    assert told(caplog) == []


def test_an_optimizer_without_state_is_compared_by_its_model(tmp_path, caplog):
    run = Run(tmp_path, torch.optim.SGD)
    with run.manager:
        for _ in range(3):
            run.train()
            run.save()
        assert told(caplog) == []
        run.save()
    assert len(told(caplog)) == 1


def test_an_optimizer_that_waits_while_one_without_state_steps_is_not_told(tmp_path, caplog):
    run = Run(tmp_path, torch.optim.SGD)
    waits = torch.optim.AdamW(run.model[2].parameters())
    run.state = TrainState(model=run.model, optimizer=[run.optimizer, waits])
    with run.manager:
        run.train()
        waits.step()
        for _ in range(2):
            run.train()
            run.save()
        assert told(caplog) == []
        run.save()
    assert len(told(caplog)) == 1


def test_a_refused_save_commits_nothing_and_the_next_is_compared_with_the_last_commit(tmp_path):
    run = Run(tmp_path, on_stale="refuse")
    with run.manager:
        run.train()
        run.save()
        for _ in range(2):
            with pytest.raises(SaveError, match=r"was not saved.* has changed since step 10"):
                run.save()
        run.train()
        run.save()
        assert run.steps == [10, 40]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] != ".") == [
        "step-000000010",
        "step-000000040",
    ]


def test_who_ignores_it_is_told_nothing(tmp_path, caplog):
    run = Run(tmp_path, on_stale="ignore")
    with run.manager:
        run.train()
        for _ in range(3):
            run.save()
    assert told(caplog) == []
    with pytest.raises(ConfigError, match="on_stale"):
        CheckpointOptions(on_stale="never")  # type: ignore[arg-type]


def _on_ranks(root):
    """Train one rank's share alone, then nothing; return what each rank hears and what is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer, heard = torch.optim.AdamW(model.parameters(), lr=0.1), []
    state = TrainState(model=model, optimizer=optimizer)
    rank = torch.distributed.get_rank()
    with CheckpointManager(root, on_stale="refuse") as manager:
        for step in (1, 2, 3, 4):
            if step < 3:
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            elif step == 3 and rank == 1:
                with torch.no_grad():
                    model[1].bias.to_local().add_(1.0)
                    optimizer.state[model[1].bias]["exp_avg"].to_local().add_(1.0)
            try:
                manager.save(step, state)
                manager.wait()
            except SaveError as error:
                heard.append(str(error))
        return heard, [info.step for info in manager.checkpoints()]


@pytest.mark.distributed
def test_what_one_rank_has_changed_counts_for_all_and_a_refusal_reaches_all(tmp_path):
    results = run_ranks(_on_ranks, 2, str(tmp_path))
    assert [steps for _, steps in results] == [[1, 2, 3]] * 2
    assert results[0][0] == results[1][0]
    (text,) = results[0][0]
    assert "step 4 was not saved" in text
    assert "since step 3" in text
