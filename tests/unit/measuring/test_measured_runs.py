"""Managers that measure their own saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, EverySteps, TrainState
from ckpt_core.policies import CadenceContext, SaveCosts, SavePolicy
from ckpt_core.telemetry import InMemorySink
from tests.kit.ranks import run_ranks


@dataclass(frozen=True)
class EveryTenWithCosts(SavePolicy):
    """Saves every ten steps, and gives what the saves so far have cost as the reason."""

    def decide(self, context: CadenceContext) -> str | None:
        return repr(context.costs) if context.step % 10 == 0 else None

    @property
    def needs_costs(self) -> bool:
        return True


def train(root: Path, policy: SavePolicy | None, steps: int = 50, **options: object) -> list[dict]:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state, sink = TrainState(model=model, optimizer=optimizer), InMemorySink()
    with CheckpointManager(root, save=policy, sinks=[sink], **options) as manager:
        for step in range(1, steps + 1):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            if policy is None:
                if step % 10 == 0:
                    manager.save(step, state)
            else:
                manager.maybe_save(step, state)
        manager.wait()
        costs = manager.costs
        assert costs is None or 0 < costs.stall <= costs.lost
        assert costs is not None or steps < 50
    return [dict(event.attributes) for event in sink.finished("save.cost")]


def test_every_save_of_a_manager_is_reported_with_what_it_cost(tmp_path):
    for number, options in enumerate([{}, {"staging": "overlapped"}, {"arenas": 2}]):
        events = train(tmp_path / str(number), EverySteps(10), **options)
        assert [event["step"] for event in events] == [10, 20, 30, 40, 50]
        assert {event["reason"] for event in events} == {"every 10 steps"}
        assert {event["outcome"] for event in events} == {"committed"}
        assert all(event["size_bytes"] > 64 * 64 * 4 for event in events)
        # The last save has been waited for, which is stall, too.
        assert all(0 < event["stall_seconds"] < event["durable_seconds"] < 60 for event in events[:-1])


def test_a_training_that_never_decides_is_measured_by_its_optimizer(tmp_path):
    events = train(tmp_path, None)
    assert [event["step"] for event in events] == [10, 20, 30, 40, 50]


def test_a_save_that_back_pressure_leaves_out_is_reported(tmp_path):
    events = train(tmp_path, EverySteps(1), steps=40, back_pressure="skip")
    assert [event["step"] for event in events] == list(range(1, 41))
    outcomes = [event["outcome"] for event in events]
    assert outcomes[0] == "committed"
    assert set(outcomes) <= {"committed", "skipped"}


def _rank(root: str) -> tuple[list[dict], list[str]]:
    events = train(Path(root), EveryTenWithCosts())
    with CheckpointManager(root) as manager:
        steps = [info.step for info in manager.checkpoints()]
    assert steps == [10, 20, 30, 40, 50]
    return events, []


@pytest.mark.distributed
def test_ranks_decide_on_the_coordinators_costs(tmp_path):
    """Ranks that read figures of their own would save under different annotations, which is refused."""
    first, second = run_ranks(_rank, 2, str(tmp_path / "run"))
    assert [event["step"] for event in first[0]] == [10, 20, 30, 40, 50]
    assert second[0] == []
    reasons = [event["reason"] for event in first[0]]
    assert reasons[0] == "None"
    assert reasons[-1].startswith(SaveCosts.__name__)
