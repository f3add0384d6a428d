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

from ckpt_core.coordination import StoreCoordinator, coordinator_for_job
from ckpt_core.errors import (
    CheckpointExistsError,
    CoordinationError,
    DeadlineError,
)
from ckpt_core.testing import run_ranks

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
    assert isinstance(coordinator.as_of_now(), StoreCoordinator)
    rank, calls = coordinator.rank, []

    def deciding() -> str:
        calls.append(rank)
        return f"by rank {rank}"

    results = {
        "agree": coordinator.agree({"from": rank}),
        "gather": coordinator.gather(rank * 10),
        "exchange": coordinator.exchange(rank, lambda values: [sum(values) + v for v in values]),
        "once": coordinator.once(deciding),
        "combine": coordinator.combine([rank, 5 - rank, 1 << 60]),
        "meet": coordinator.meet("m", bytes([rank]), b"".join, deadline_seconds=30),
        "one failed": error_of(lambda: coordinator.gather(OSError("disk") if rank == 1 else 1)),
        "refused": error_of(lambda: coordinator.exchange(1, refuse)),
        "after": coordinator.gather(rank),
        "calls": calls,
    }
    coordinator.close()
    return results


@pytest.fixture(scope="module")
def talked():
    return run_ranks(talks, 3)


def test_ranks_agree_and_exchange(talked):
    for rank, found in enumerate(talked):
        assert found["agree"] == {"from": 0}
        assert found["gather"] == [0, 10, 20]
        assert found["exchange"] == 3 + rank
        assert found["once"] == "by rank 0"
        assert found["calls"] == ([0] if rank == 0 else [])
        assert found["combine"] == (2, 5, 1 << 60)
        assert found["meet"] == b"\0\1\2"
        assert found["after"] == [0, 1, 2]


def test_errors_are_the_same_on_every_rank(talked):
    for found in talked:
        kind, text, attributes = found["one failed"]
        assert (kind, text) == ("CoordinationError", "rank 1: OSError: disk")
        assert attributes["failures"] == {1: "OSError: disk"}
        assert found["refused"][:2] == ("CheckpointExistsError", "step 3 is there")
        assert found["refused"][2]["step"] == 3


def meets_beside_training(count: int) -> list[float]:
    """Meetings on a background thread while the main thread trains, in another order on every rank."""
    coordinator = coordinator_for_job(deadline_seconds=60)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def meet(number: int) -> bytes:
        return coordinator.meet(f"save/{number}", b"%d" % coordinator.rank, b"-".join, deadline_seconds=60)

    losses = []
    with ThreadPoolExecutor(1) as pool:
        if coordinator.rank:  # this rank's meetings start before the training, the other's in its midst
            meetings = [pool.submit(meet, number) for number in range(count)]
        for step in range(20):
            if step == 10 and not coordinator.rank:
                meetings = [pool.submit(meet, number) for number in range(count)]
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
            assert coordinator.combine([step]) == (step,)
            coordinator.agree(step)
        assert {meeting.result(60) for meeting in meetings} == {b"0-1"}
    coordinator.close()
    return losses


def test_meetings_in_the_background_never_mix_with_the_collectives_of_training():
    first, second = run_ranks(meets_beside_training, 2, 30)
    assert first == second


def one_never_arrives() -> tuple[str, str, dict[str, Any]] | None:
    coordinator = coordinator_for_job(deadline_seconds=SHORT)
    store = dist.distributed_c10d._get_default_store()
    if coordinator.rank == 1:
        store.wait(["others are done"])
        return None
    found = error_of(lambda: coordinator.meet("save/7", b"", b"".join, deadline_seconds=SHORT))
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

    def meet() -> None:
        found.append(error_of(lambda: coordinator.meet("save/7", b"", b"".join, deadline_seconds=SHORT)))

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()
    coordinator.close()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_to_the_survivor(who):
    kind, text, attributes = run_ranks(one_dies, 2, who, expect_death=[who])[1 - who]
    assert kind == DeadlineError.__name__
    assert attributes["awaited"] == (who,)
    assert f"rank(s) {who} did not arrive" in text
