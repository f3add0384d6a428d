from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.coordination import Coordinator, Solo
from ckpt_core.dcp import PartPlanner
from ckpt_core.errors import CoordinationError
from ckpt_core.lifecycle._plans import AgreedPlans


@final
class Counting(Coordinator):
    """One rank, and a peer that may say that its state has changed."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.exchanges = 0
        self.peer_changed = False
        self._inner = Solo()

    def agree(self, value: Any) -> Any:
        return value

    def exchange(self, value: Any, decide: Callable[[list[Any]], list[Any]]) -> Any:
        self.exchanges += 1
        return self._inner.exchange(value, decide)

    def combine(self, flags: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(flag, int(self.peer_changed)) for flag in flags)

    def meet(self, name: str, payload: Any, commit: Any, *, deadline_seconds: float) -> bytes:
        return self._inner.meet(name, payload, commit, deadline_seconds=deadline_seconds)

    def close(self) -> None: ...


def planners(**tree: Any) -> dict[str, PartPlanner]:
    return {"": PartPlanner(tree)}


def keys(plans: AgreedPlans) -> list[str]:
    return [item.index.fqn for item in plans.own[""].items]


def test_what_does_not_change_is_agreed_on_once():
    plans, coordinator = AgreedPlans(), Counting()
    for value in range(5):
        plans.agree(planners(w=torch.full((3,), value), n=value), (), coordinator)
    assert coordinator.exchanges == 1
    assert keys(plans) == ["w", "n"]


def test_what_changes_is_agreed_on_anew():
    plans, coordinator = AgreedPlans(), Counting()
    for tree in ({"w": torch.ones(3)}, {"w": torch.ones(4)}, {"w": torch.ones(4), "x": 1}):
        plans.agree(planners(**tree), (), coordinator)
        assert set(plans.metadata[""].state_dict_metadata) == set(tree)
    assert coordinator.exchanges == 3


def test_a_change_on_another_rank_is_enough():
    plans, coordinator = AgreedPlans(), Counting()
    plans.agree(planners(w=1), (), coordinator)
    coordinator.peer_changed = True
    plans.agree(planners(w=1), (), coordinator)
    assert coordinator.exchanges == 2


def test_keys_that_become_uneven_are_agreed_on_anew():
    plans, coordinator = AgreedPlans(), Counting()
    plans.agree(planners(w=torch.ones(1)), (), coordinator)
    plans.agree(planners(w=torch.ones(1)), [("", "w")], coordinator)
    assert coordinator.exchanges == 2


@pytest.mark.parametrize("broken", [KeyError("lost"), {"": PartPlanner({"w": torch.eye(2).to_sparse()})}])
def test_after_an_error_plans_are_agreed_on_anew(broken):
    plans, coordinator = AgreedPlans(), Counting()
    plans.agree(planners(w=torch.ones(2)), (), coordinator)
    with pytest.raises(CoordinationError, match="rank 0"):
        plans.agree(broken, (), coordinator)
    plans.agree(planners(w=torch.ones(2)), (), coordinator)
    assert coordinator.exchanges == 3
    assert keys(plans) == ["w"]


def test_every_save_of_a_changing_state_is_what_it_was_at_that_step(tmp_path):
    states = [
        {"w": torch.ones(3), "n": 1},
        {"w": torch.full((3,), 2.0), "n": 2},
        {"w": torch.full((5,), 3.0), "n": torch.ones(1)},
        {"w": torch.full((5,), 4.0), "n": torch.ones(1), "deep": {"x": [torch.ones(2), "text"]}},
        {"w": 5, "deep.x": torch.ones(1)},
        {"w": torch.ones(3), "n": 1},
    ]
    with CheckpointManager(tmp_path) as checkpoints:
        for step, state in enumerate(states):
            checkpoints.save(step, state)
        for step, state in enumerate(states):
            target = blank(state)
            checkpoints.load(target, step=step)
            assert str(target) == str(state)
            assert checkpoints.verify(step) == []


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else None
