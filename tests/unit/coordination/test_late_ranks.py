"""Ranks that come too late, and a store that does not answer: nobody waits for long, nobody decides alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination._channel import Channel
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, SaveError

pytestmark = pytest.mark.reliability

LONG = 30.0
SHORT = 0.2


def never(_: list[Any]) -> Any:
    raise AssertionError("nothing is to be decided any more")


def caught(channel: Channel, topic: str, commit: Any, deadline: float = SHORT) -> DeadlineError:
    with pytest.raises(DeadlineError) as error:
        channel.commit_barrier(topic, 1, commit, deadline)
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
    thread = threading.Thread(target=lambda: other.commit_barrier("save/2", 2, sum, LONG))
    thread.start()
    assert coordinator.commit_barrier("save/2", 1, sum, LONG) == 3
    thread.join(LONG)


def test_a_coordinator_that_hangs_in_the_commit_leaves_its_end_in_doubt():
    store, gate = dist.HashStore(), threading.Event()
    coordinator, other = (Channel(store, rank, 2) for rank in range(2))

    def commit(_: list[Any]) -> str:
        gate.wait(LONG)
        return "done"

    thread = threading.Thread(target=lambda: coordinator.commit_barrier("save/1", 1, commit, LONG))
    thread.start()
    error = caught(other, "save/1", never)
    gate.set()
    thread.join(LONG)
    assert error.in_doubt
    assert "the outcome on rank 0 is not known here" in str(error)


@pytest.mark.slow
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

    thread = threading.Thread(target=lambda: coordinator.commit_barrier("save/1", 1, commit, LONG))
    thread.start()
    assert other.commit_barrier("save/1", 2, never, 0.5) == "done"
    thread.join(LONG)


class SilentStore:
    """A store whose server hangs from some moment on: its clients get no answers any more."""

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
        with pytest.raises(DeadlineError, match=r"the job's store has not answered for .* hangs"):
            channel.commit_barrier(f"save/{number}", 1, sum, SHORT)
    store.answers.set()
    until = time.monotonic() + LONG
    while time.monotonic() < until:  # the answer to the question before comes on another thread
        try:
            assert channel.commit_barrier("save/4", 1, sum, LONG) == 1
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
        Channel(Lost(), 1, 2).commit_barrier("save/1", 1, sum, LONG)


class LostStore:
    """A store whose server is lost, or hangs, from some moment on."""

    def __init__(self, *, silent: bool) -> None:
        self.inner = dist.HashStore()
        self.lost = threading.Event()
        self._silent = silent

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.lost.is_set():
                if self._silent:
                    threading.Event().wait(SHORT * 3)
                raise dist.DistNetworkError("Connection reset by peer")
            return getattr(self.inner, name)(*args)

        return call


def ends(store: Any, commit: Any, value: Any = 2, late: float = LONG) -> list[Any]:
    """What a commit barrier of two ranks returned or raised, by rank."""
    found: list[Any] = [None, None]

    def arrive(rank: int) -> None:
        channel = Channel(store, rank, 2, patience_seconds=SHORT)
        try:
            found[rank] = channel.commit_barrier("save/7", value if rank else 1, commit, late)
        except CheckpointError as error:
            found[rank] = error

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return found


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_a_rank_that_has_reported_and_loses_the_store_does_not_know_how_it_ended(silent):
    store = LostStore(silent=silent)

    def commit(_: list[Any]) -> str:
        store.lost.set()
        return "done"

    first, second = ends(store, commit)
    assert first == "done"  # a commit that came to its end is never reported as a failure
    assert isinstance(second, CoordinationError)
    assert second.in_doubt
    assert "rank 1 had reported to rank 0 before" in str(second)


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_what_kept_the_coordinator_from_committing_is_told_even_if_nobody_else_hears_it(silent):
    store = LostStore(silent=silent)

    def commit(_: list[Any]) -> str:
        store.lost.set()
        raise SaveError("the marker may be there", step=7, phase="commit", in_doubt=True)

    first, second = ends(store, commit)
    assert (type(first), first.step, first.in_doubt) == (SaveError, 7, True)
    assert second.in_doubt


def test_a_rank_that_brought_an_error_knows_that_nothing_was_committed():
    store = LostStore(silent=False)
    store.set("save/7/arrive/1", b"")  # so that the store is lost before the coordinator has read
    channel = Channel(store, 1, 2, patience_seconds=SHORT)
    threading.Timer(SHORT, store.lost.set).start()
    with pytest.raises(CoordinationError, match="the job's store is gone") as caught:
        channel.commit_barrier("save/7", OSError("disk"), never, LONG)
    assert not caught.value.in_doubt


def test_a_rank_that_gave_up_before_the_coordinator_came_knows_that_nothing_was_committed():
    error = caught(Channel(dist.HashStore(), 1, 2), "save/7", never)
    assert error.awaited == (0,)
    assert not error.in_doubt


def test_an_answer_that_was_heard_counts_though_the_store_is_lost_right_after():
    store = LostStore(silent=False)

    class Forgetful:
        """Is lost as soon as the other rank cleans up."""

        def __getattr__(self, name: str) -> Any:
            if name == "delete_key":
                store.lost.set()
            return getattr(store, name)

    other = Channel(Forgetful(), 1, 2, patience_seconds=SHORT)
    coordinator = Channel(store, 0, 2, patience_seconds=SHORT)
    thread = threading.Thread(target=lambda: coordinator.commit_barrier("save/7", 1, sum, LONG))
    thread.start()
    assert other.commit_barrier("save/7", 2, never, LONG) == 3
    thread.join(LONG)
