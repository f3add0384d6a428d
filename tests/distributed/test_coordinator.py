"""`StoreCoordinator` on real ranks: what threads over a store in memory cannot show."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_core.coordination import coordinator_for_job
from ckpt_core.errors import (
    CheckpointExistsError,
    CoordinationError,
    DeadlineError,
)
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

SHORT = 2.0


def error_of(act: Callable[[], Any]) -> tuple[str, str, dict[str, Any]]:
    """What a call raised, in a form that travels."""
    try:
        act()
    except CoordinationError as error:
        return type(error).__name__, str(error), vars(error)
    except CheckpointExistsError as error:
        return type(error).__name__, str(error), vars(error)
    return "nothing", "", {}


def refuse(_: list[Any]) -> list[Any]:
    raise CheckpointExistsError("step 3 is there", step=3)


def talks() -> dict[str, Any]:
    coordinator = coordinator_for_job(deadline_seconds=30)
    channel, rank, calls = coordinator.commit_channel(), coordinator.rank, []

    def deciding() -> str:
        calls.append(rank)
        return f"by rank {rank}"

    results = {
        "broadcast": coordinator.broadcast({"from": rank}),
        "gather": coordinator.gather(rank * 10),
        "gather_scatter": coordinator.gather_scatter(rank, lambda values: [sum(values) + v for v in values]),
        "run_on_coordinator": coordinator.run_on_coordinator(deciding),
        "all_reduce_max": coordinator.all_reduce_max([rank, 5 - rank, 1 << 60]),
        "commit_barrier": channel.commit_barrier("m", bytes([rank]), b"".join, deadline_seconds=30),
        "one failed": error_of(lambda: coordinator.gather(OSError("disk") if rank == 1 else 1)),
        "refused": error_of(lambda: coordinator.gather_scatter(1, refuse)),
        "after": coordinator.gather(rank),
        "calls": calls,
    }
    coordinator.close()
    return results


@pytest.fixture(scope="module")
def talked():
    return run_ranks(talks, 3)


def test_ranks_agree(talked):
    for rank, found in enumerate(talked):
        assert found["broadcast"] == {"from": 0}
        assert found["gather"] == [0, 10, 20]
        assert found["gather_scatter"] == 3 + rank
        assert found["run_on_coordinator"] == "by rank 0"
        assert found["calls"] == ([0] if rank == 0 else [])
        assert found["all_reduce_max"] == (2, 5, 1 << 60)
        assert found["commit_barrier"] == b"\0\1\2"
        assert found["after"] == [0, 1, 2]


def test_errors_are_the_same_on_every_rank(talked):
    for found in talked:
        kind, text, attributes = found["one failed"]
        assert (kind, text) == ("CoordinationError", "rank 1: OSError: disk")
        assert attributes["failures"] == {1: "OSError: disk"}
        assert found["refused"][:2] == ("CheckpointExistsError", "step 3 is there")
        assert found["refused"][2]["step"] == 3


def commits_beside_training(count: int) -> list[float]:
    """Commit barriers on a background thread while the main thread trains, in another order on each rank."""
    coordinator = coordinator_for_job(deadline_seconds=60)
    channel = coordinator.commit_channel()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def commit(number: int) -> bytes:
        return channel.commit_barrier(
            f"save/{number}", b"%d" % coordinator.rank, b"-".join, deadline_seconds=60
        )

    losses = []
    with ThreadPoolExecutor(1) as pool:
        if coordinator.rank:  # this rank's commits start before the training, the other's in its midst
            commits = [pool.submit(commit, number) for number in range(count)]
        for step in range(20):
            if step == 10 and not coordinator.rank:
                commits = [pool.submit(commit, number) for number in range(count)]
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
            assert coordinator.all_reduce_max([step]) == (step,)
            coordinator.broadcast(step)
        assert {each.result(60) for each in commits} == {b"0-1"}
    coordinator.close()
    return losses


def test_commits_in_the_background_never_mix_with_the_collectives_of_training():
    first, second = run_ranks(commits_beside_training, 2, 30)
    assert first == second


def one_never_arrives() -> tuple[str, str, dict[str, Any]] | None:
    coordinator = coordinator_for_job(deadline_seconds=SHORT)
    store = dist.distributed_c10d._get_default_store()
    if coordinator.rank == 1:
        store.wait(["others are done"])
        return None
    channel = coordinator.commit_channel()
    found = error_of(lambda: channel.commit_barrier("save/7", b"", b"".join, deadline_seconds=SHORT))
    if coordinator.rank == 0:
        store.set("others are done", "")
    return found


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named_to_all_others():
    first, absent, third = run_ranks(one_never_arrives, 3)
    assert absent is None
    for kind, text, attributes in (first, third):
        assert kind == DeadlineError.__name__
        assert attributes["awaited"] == (1,)
        assert text.startswith("save/7: rank(s) 1 did not arrive within 2 s")


def one_dies(who: int) -> tuple[str, str, dict[str, Any]]:
    coordinator = coordinator_for_job(deadline_seconds=SHORT)
    coordinator.gather(None)
    if coordinator.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    found: list[Any] = []

    channel = coordinator.commit_channel()

    def commit() -> None:
        found.append(
            error_of(lambda: channel.commit_barrier("save/7", b"", b"".join, deadline_seconds=SHORT))
        )

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join()
    channel.close()
    coordinator.close()
    assert "ckpt-store" not in [each.name for each in threading.enumerate()]
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_to_the_survivor(who):
    kind, text, attributes = run_ranks(one_dies, 2, who, expect_death=[who])[1 - who]
    assert kind == DeadlineError.__name__
    assert attributes["awaited"] == (who,)
    assert f"rank(s) {who} did not arrive" in text
