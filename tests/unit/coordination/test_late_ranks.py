"""Ranks that come too late, and a store that does not answer: nobody waits for long, nobody decides alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination._channel import Channel
from ckpt_core.errors import CoordinationError, DeadlineError

pytestmark = pytest.mark.reliability

LONG = 30.0
SHORT = 0.2


def never(_: list[Any]) -> Any:
    raise AssertionError("nothing is to be decided any more")


def caught(channel: Channel, topic: str, commit: Any, deadline: float = SHORT) -> DeadlineError:
    with pytest.raises(DeadlineError) as error:
        channel.meet(topic, 1, commit, deadline)
    return error.value


def test_a_coordinator_that_wakes_up_after_the_others_gave_up_decides_nothing():
    store = dist.HashStore()
    coordinator, other = (Channel(store, rank, 2) for rank in range(2))
    assert caught(other, "save/1", never).awaited == (0,)
    late = caught(coordinator, "save/1", never, LONG)
    assert "rank 1 gave up waiting for rank 0" in str(late)


def test_a_rank_that_wakes_up_after_the_coordinator_gave_up_is_told_so_at_once():
    store = dist.HashStore()
    coordinator, other = (Channel(store, rank, 2) for rank in range(2))
    given_up = caught(coordinator, "save/1", never)
    late = caught(other, "save/1", never, LONG)
    assert str(late) == str(given_up)
    assert late.awaited == (1,)


def test_after_a_rank_was_late_all_of_them_talk_again():
    store = dist.HashStore()
    coordinator, other = (Channel(store, rank, 2) for rank in range(2))
    caught(other, "save/1", never)
    caught(coordinator, "save/1", never)
    thread = threading.Thread(target=lambda: other.meet("save/2", 2, sum, LONG))
    thread.start()
    assert coordinator.meet("save/2", 1, sum, LONG) == 3
    thread.join(LONG)


def test_a_coordinator_that_hangs_in_the_commit_leaves_its_end_in_doubt():
    store, gate = dist.HashStore(), threading.Event()
    coordinator, other = (Channel(store, rank, 2) for rank in range(2))

    def commit(_: list[Any]) -> str:
        gate.wait(LONG)
        return "done"

    thread = threading.Thread(target=lambda: coordinator.meet("save/1", 1, commit, LONG))
    thread.start()
    error = caught(other, "save/1", never)
    gate.set()
    thread.join(LONG)
    assert error.in_doubt
    assert "whether it came to its end is not known here" in str(error)


def test_a_coordinator_that_is_slow_to_commit_gets_a_second_chance():
    store, gave_up = dist.HashStore(), threading.Event()

    class Watched:
        """Tells when the other rank has asked whether the coordinator is at it."""

        def __getattr__(self, name: str) -> Any:
            if name == "compare_set":
                threading.Timer(0.05, gave_up.set).start()
            return getattr(store, name)

    coordinator, other = Channel(store, 0, 2), Channel(Watched(), 1, 2)

    def commit(_: list[Any]) -> str:
        assert gave_up.wait(LONG)
        return "done"

    thread = threading.Thread(target=lambda: coordinator.meet("save/1", 1, commit, LONG))
    thread.start()
    assert other.meet("save/1", 2, never, 1.0) == "done"
    thread.join(LONG)


class SilentStore:
    """A store whose server stands still from some moment on: its clients hear nothing any more."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.answers.wait(LONG)
            return getattr(self.inner, name)(*args)

        return call


def test_a_store_that_does_not_answer_is_told_within_the_deadline_and_asked_again_later():
    store = SilentStore()
    channel = Channel(store, 0, 1, patience_seconds=SHORT)
    store.answers.clear()
    for number in range(3):
        with pytest.raises(DeadlineError, match=r"the job's store has not answered for .* stands still"):
            channel.meet(f"save/{number}", 1, sum, SHORT)
    store.answers.set()
    until = time.monotonic() + LONG
    while time.monotonic() < until:  # the answer to the question before comes on another thread
        try:
            assert channel.meet("save/4", 1, sum, LONG) == 1
        except CoordinationError:
            continue
        break
    else:
        pytest.fail("the store answers, and is not heard")


def test_any_loss_of_the_store_is_an_error_of_ours():
    class Lost:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                raise dist.DistStoreError("No such file or directory")

            return call

    with pytest.raises(CoordinationError, match=r"the job's store is gone: No such file.*was removed"):
        Channel(Lost(), 1, 2).meet("save/1", 1, sum, LONG)
