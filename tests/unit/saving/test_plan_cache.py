from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.coordination import CommitChannel, Coordinator, Solo
from ckpt_core.errors import CoordinationError
from ckpt_core.saving._plan_cache import KeepOwn, Offer, PlanCache, _keepings


@final
class Counting(Coordinator):
    """One rank, and a peer that may say that its state has changed."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.exchanges = 0
        self.peer_changed = False
        self._inner = Solo()

    def broadcast(self, value: Any, *, what: str = "") -> Any:
        return value

    def gather_scatter(self, value: Any, decide: Callable[[list[Any]], list[Any]], **_: Any) -> Any:
        self.exchanges += 1
        return self._inner.gather_scatter(value, decide)

    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        return tuple(max(flag, int(self.peer_changed)) for flag in flags)

    def commit_channel(self) -> CommitChannel:
        return self._inner.commit_channel()

    def close(self) -> None: ...


def update(plans: PlanCache, *, rank_local: Any = (), files: Any = (), **tree: Any) -> bool:
    return plans.update({"": tree}, Offer(rank_local=frozenset(rank_local), files=frozenset(files)))


def save(plans: PlanCache, coordinator: Counting, **state: Any) -> None:
    """What a save does about its plans."""
    if coordinator.all_reduce_max([int(update(plans, **state))])[0]:
        plans.negotiate(coordinator)
    plans.raise_pending()


def keys(plans: PlanCache) -> list[str]:
    part = plans.parts[""]
    return [index.fqn for index, _, _ in part.specs] + [index.fqn for index in part.value_indices]


def test_an_unchanged_state_is_negotiated_once():
    plans, coordinator = PlanCache(), Counting()
    for value in range(5):
        save(plans, coordinator, w=torch.full((3,), value), n=value, files=["rank"])
    assert coordinator.exchanges == plans.generation == 1
    assert keys(plans) == ["w", "n"]
    assert plans.files == {"rank"}


def test_changes_are_negotiated_again():
    plans, coordinator = PlanCache(), Counting()
    for tree in ({"w": torch.ones(3)}, {"w": torch.ones(4)}, {"w": torch.ones(4), "x": 1}):
        save(plans, coordinator, **tree)
        assert set(plans.metadata[""].index.names) == set(tree)
    assert coordinator.exchanges == plans.generation == 3


def test_a_change_on_another_rank_is_enough():
    plans, coordinator = PlanCache(), Counting()
    save(plans, coordinator, w=1)
    coordinator.peer_changed = True
    save(plans, coordinator, w=1)
    assert coordinator.exchanges == 2


@pytest.mark.parametrize(
    "change", [{"rank_local": [("", "w")]}, {"files": ["a"]}], ids=["rank-local", "files"]
)
def test_keys_that_become_rank_local_and_other_files_are_negotiated_again(change):
    plans, coordinator = PlanCache(), Counting()
    save(plans, coordinator, w=torch.ones(1))
    save(plans, coordinator, w=torch.ones(1), **change)
    save(plans, coordinator, w=torch.ones(1), **change)
    assert coordinator.exchanges == 2


def test_after_an_error_plans_are_negotiated_again():
    plans, coordinator = PlanCache(), Counting()
    save(plans, coordinator, w=torch.ones(2))
    with pytest.raises(CoordinationError, match="rank 0"):
        save(plans, coordinator, w=torch.eye(2).to_sparse())
    save(plans, coordinator, w=torch.ones(2))
    assert coordinator.exchanges == 3
    assert keys(plans) == ["w"]


A, B = ("", "a"), ("", "b")


@pytest.mark.parametrize(
    ("rank_local", "keepings"),
    [
        ([{A}, {A}], [KeepOwn.NEVER, KeepOwn.IF_DIFFERENT]),
        ([{A}, {B}, {B}], [KeepOwn.NEVER, KeepOwn.NEVER, KeepOwn.ALWAYS]),
        ([{A}, {A, B}], [KeepOwn.NEVER, KeepOwn.ALWAYS]),
        ([{A, B}, {A}], [KeepOwn.NEVER, KeepOwn.ALWAYS]),
        ([set(), {A}, set()], [KeepOwn.NEVER] * 3),
    ],
    ids=["replicas", "stages", "more", "fewer", "one"],
)
def test_a_rank_keeps_its_own_values_unless_the_checkpoint_has_them(rank_local, keepings):
    assert _keepings([frozenset(keys) for keys in rank_local]) == keepings


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
