"""`Coordinator.broadcast_tensor` on real ranks: every subset, every source, and missing peers."""

from __future__ import annotations

import os
import signal
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_core.coordination import StoreCoordinator, coordinator_for_job
from ckpt_core.errors import CoordinationError, DeadlineError
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

SHORT = 2.0


def routes(world: int) -> list[tuple[int, ...]]:
    """Every subset in every rotation, so that each of its ranks is the source once."""
    subsets = [each for count in range(1, world + 1) for each in combinations(range(world), count)]
    return [subset[at:] + subset[:at] for subset in subsets for at in range(len(subset))]


def broadcasts_all(num_bytes: int) -> int:
    coordinator = coordinator_for_job(deadline_seconds=60)
    assert coordinator.can_broadcast_tensors
    checked = 0
    for number, route in enumerate(routes(coordinator.world_size)):
        if coordinator.rank not in route:
            continue
        content = torch.arange(num_bytes, dtype=torch.int64).mul(number + 3).to(torch.uint8)
        buffer = content.clone() if coordinator.rank == route[0] else torch.zeros_like(content)
        coordinator.broadcast_tensor(buffer, route)
        assert torch.equal(buffer, content), (route, coordinator.rank)
        checked += 1
    coordinator.close()
    return checked


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_the_first_rank_has_arrives_in_every_subset_from_every_source(world):
    counts = run_ranks(broadcasts_all, world, 100_001)
    assert counts == [sum(rank in route for route in routes(world)) for rank in range(world)]


def amid_training() -> None:
    coordinator = coordinator_for_job(deadline_seconds=60)
    for step in range(20):
        buffer = torch.full((1000,), coordinator.rank + step, dtype=torch.uint8)
        coordinator.broadcast_tensor(buffer, (1, 0))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert buffer.unique().tolist() == [1 + step]
        assert total.item() == 2
        assert coordinator.all_reduce_max([step]) == (step,)
    coordinator.close()


@pytest.mark.slow
def test_broadcasts_of_tensors_never_mix_with_the_collectives_of_training():
    run_ranks(amid_training, 2)


def error_of_broadcast(coordinator: StoreCoordinator, route: tuple[int, ...]) -> tuple[str, str, Any]:
    try:
        coordinator.broadcast_tensor(torch.zeros(1000, dtype=torch.uint8), route)
    except CoordinationError as error:
        return type(error).__name__, str(error), tuple(getattr(error, "awaited", ()))
    return "nothing", "", ()


def source_never_calls() -> tuple[str, str, Any] | None:
    coordinator = StoreCoordinator(deadline_seconds=SHORT)
    store = dist.distributed_c10d._get_default_store()
    if coordinator.rank == 0:
        store.wait(["the other is done"])
        return None
    found = error_of_broadcast(coordinator, (0, 1))
    store.set("the other is done", "")
    return found


@pytest.mark.slow
def test_a_source_that_does_not_make_the_call_is_named_after_the_deadline():
    absent, (kind, text, awaited) = run_ranks(source_never_calls, 2)
    assert absent is None
    assert kind == DeadlineError.__name__
    assert awaited == (0,)
    assert text.startswith("rank 1: broadcast of 1000 bytes from rank 0 did not end within 2 s")


def source_dies() -> tuple[str, str, Any]:
    coordinator = StoreCoordinator(deadline_seconds=60)
    coordinator.broadcast_tensor(torch.zeros(10, dtype=torch.uint8), (0, 1))
    coordinator.gather(None)
    if coordinator.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of_broadcast(coordinator, (0, 1))


def test_a_source_that_dies_is_named_at_once():
    _, (kind, text, _) = run_ranks(source_dies, 2, expect_death=[0], timeout_seconds=50)
    assert kind == CoordinationError.__name__
    assert text.startswith("rank 1: broadcast of 1000 bytes from rank 0 failed, the connection was lost")
