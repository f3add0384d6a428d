"""Ranks are threads here, over a store in memory; real processes are under tests/distributed."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination._channel import Channel, _packed, _read
from ckpt_core.errors import (
    CheckpointExistsError,
    CoordinationError,
    DeadlineError,
    IncompatibleCheckpointError,
    SaveError,
)

WORLD = 3
LONG = 30.0
SHORT = 0.2


def each_itself(values: list[Any]) -> list[Any]:
    return list(values)


class Job:
    """Channels of several ranks over one store, and a way to call on all of them at once."""

    def __init__(self, world_size: int = WORLD, store: Any = None) -> None:
        self.store = dist.HashStore() if store is None else store
        self.channels = [Channel(self.store, rank, world_size) for rank in range(world_size)]

    def call(self, act: Callable[[int, Channel], Any], ranks: Any = None) -> dict[int, Any]:
        """What `act(rank, channel)` returned or raised, by rank."""
        chosen = list(range(len(self.channels))) if ranks is None else list(ranks)
        with ThreadPoolExecutor(len(chosen)) as pool:
            futures = {rank: pool.submit(act, rank, self.channels[rank]) for rank in chosen}
            return {rank: future.exception() or future.result() for rank, future in futures.items()}

    def gather_scatter(
        self, values: list[Any], decide: Callable[[list[Any]], list[Any]], **options: Any
    ) -> list[Any]:
        topic = options.pop("topic", "topic")
        results = self.call(
            lambda rank, channel: channel.gather_scatter(topic, values[rank], decide, LONG), **options
        )
        return list(results.values())


def test_every_rank_gets_its_own_answer():
    assert Job().gather_scatter([1, 2, 3], lambda values: [sum(values) * v for v in values]) == [6, 12, 18]


def test_only_the_coordinator_decides_with_the_values_in_rank_order():
    calls: list[tuple[str, list[Any]]] = []

    def decide(values: list[Any]) -> list[Any]:
        calls.append((threading.current_thread().name, values))
        return values

    Job().gather_scatter(["a", "b", "c"], decide)
    assert [values for _, values in calls] == [["a", "b", "c"]]


def test_a_broadcast_brings_the_coordinators_value_to_all():
    results = Job().call(lambda rank, channel: channel.broadcast("topic", lambda: ("value", rank), LONG))
    assert set(results.values()) == {("value", 0)}


def test_one_rank_alone_needs_nobody():
    assert Job(1).gather_scatter([4], lambda values: [values[0] + 1]) == [5]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_names_it(failing):
    values: list[Any] = [1, 2, 3]
    values[failing] = OSError(28, "No space left on device")
    errors = Job().gather_scatter(values, each_itself)
    for rank, error in enumerate(errors):
        assert type(error) is CoordinationError
        assert error.failures == {failing: "OSError: [Errno 28] No space left on device"}
        assert (error.causes[failing].kind, error.causes[failing].errno) == ("OSError", 28)
        assert f"rank {failing}: OSError" in str(error)
        assert error.__cause__ is (values[failing] if rank == failing else None)


def test_a_failure_arrives_with_its_phase_and_with_the_number_of_what_it_came_from():
    error = SaveError("while writing: no space", phase="write")
    error.__cause__ = OSError(28, "No space left on device")
    for caught in Job().gather_scatter([1, error, 3], each_itself):
        found = caught.causes[1]
        assert (found.kind, found.errno, found.phase) == ("SaveError", 28, "write")


def test_errors_of_several_ranks_are_all_told():
    errors = Job().gather_scatter([ValueError("a"), 2, KeyError("c")], each_itself)
    assert {str(error) for error in errors} == {"rank 0: ValueError: a; rank 2: KeyError: 'c'"}


def test_an_error_that_cannot_be_pickled_is_told_all_the_same():
    class LocalError(Exception):
        pass

    errors = Job().gather_scatter([1, LocalError("here"), 3], each_itself)
    assert [error.failures for error in errors] == [{1: "LocalError: here"}] * 3


@pytest.mark.parametrize(
    "error",
    [
        CheckpointExistsError("step 4 is there", step=4, root="r"),
        IncompatibleCheckpointError("does not fit", missing=("a",)),
        DeadlineError("late", awaited=(9,)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_decision_to_refuse_arrives_with_its_type_and_its_attributes(error):
    def decide(values: list[Any]) -> list[Any]:
        raise error

    for caught in Job().gather_scatter([1, 2, 3], decide):
        assert type(caught) is type(error)
        assert str(caught) == str(error)
        assert vars(caught) == vars(error)


def test_any_other_failure_of_the_decision_names_the_coordinator():
    cause = ZeroDivisionError("oops")

    def decide(values: list[Any]) -> list[Any]:
        raise cause

    errors = Job().gather_scatter([1, 2, 3], decide)
    assert {type(error) for error in errors} == {CoordinationError}
    assert [error.failures for error in errors] == [{0: "ZeroDivisionError: oops"}] * 3
    assert errors[0].__cause__ is cause


def test_answers_that_cannot_be_sent_fail_on_every_rank_at_once():
    errors = Job().gather_scatter([1, 2, 3], lambda values: [threading.Lock()] * 3)
    assert {type(error) for error in errors} == {CoordinationError}
    assert all("rank 0" in str(error) for error in errors)


def test_a_value_that_cannot_be_sent_fails_on_every_rank_at_once():
    errors = Job().gather_scatter([1, threading.Lock(), 3], each_itself)
    assert {type(error) for error in errors} == {CoordinationError}
    assert all("rank 1" in str(error) for error in errors)


def test_the_coordinator_names_the_ranks_that_did_not_arrive():
    job = Job(4)
    results = job.call(
        lambda rank, channel: channel.gather_scatter(
            "save/7", rank, each_itself, SHORT if rank == 0 else LONG
        ),
        ranks=[0, 2],
    )
    for error in results.values():
        assert type(error) is DeadlineError
        assert error.awaited == (1, 3)
        assert str(error).startswith(r"save/7: rank(s) 1, 3 did not arrive within 0.2 s")


def test_missing_ranks_do_not_hide_the_errors_of_those_that_came():
    job = Job()
    results = job.call(
        lambda rank, channel: channel.gather_scatter(
            "t", OSError("disk"), each_itself, SHORT if rank == 0 else LONG
        ),
        ranks=[0],
    )
    assert results[0].failures == {0: "OSError: disk"}
    assert "OSError: disk" in str(results[0])
    assert results[0].awaited == (1, 2)


def test_a_rank_whose_coordinator_is_gone_names_it(monkeypatch):
    monkeypatch.setattr("ckpt_core.coordination._channel._GRACE_SECONDS", 0.0)
    (error,) = (
        Job().call(lambda _, channel: channel.gather_scatter("t", 1, each_itself, SHORT), ranks=[1]).values()
    )
    assert type(error) is DeadlineError
    assert error.awaited == (0,)
    (error,) = Job().call(lambda _, channel: channel.broadcast("t", lambda: 1, SHORT), ranks=[2]).values()
    assert error.awaited == (0,)


def test_the_channel_works_on_after_an_error():
    job = Job()
    job.gather_scatter([1, ValueError("x"), 3], each_itself, topic="first")
    assert job.gather_scatter([1, 2, 3], each_itself, topic="second") == [1, 2, 3]


@pytest.mark.slow
def test_very_many_calls_leave_no_more_keys_than_one():
    job = Job()

    def calls(count: int, label: str) -> int:
        def act(rank: int, channel: Channel) -> None:
            for number in range(count):
                channel.gather_scatter(f"{label}/{number}", rank, each_itself, LONG)

        assert set(job.call(act).values()) == {None}
        return job.store.num_keys()

    after_one = calls(1, "a")
    assert calls(200, "b") == after_one


def test_keys_of_failed_calls_are_deleted_too():
    job = Job()
    job.gather_scatter([1, 2, 3], each_itself, topic="warm")
    before = job.store.num_keys()
    for number in range(50):
        job.gather_scatter([1, OSError("x"), 3], each_itself, topic=f"failing/{number}")
    job.gather_scatter([1, 2, 3], each_itself, topic="last")
    assert job.store.num_keys() == before


class DyingStore:
    """A store whose server goes away: from then on every call fails as the client of a TCPStore does."""

    def __init__(self, healthy_calls: int) -> None:
        self._inner = dist.HashStore()
        self._left = healthy_calls

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise dist.DistNetworkError("Connection reset by peer")
            return getattr(self._inner, name)(*args)

        return call


@pytest.mark.parametrize(("rank", "healthy_calls"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)], ids=str)
def test_a_store_that_dies_is_an_error_of_ours_that_says_so(rank, healthy_calls, monkeypatch):
    monkeypatch.setattr("ckpt_core.coordination._channel._GRACE_SECONDS", 0.0)
    channel = Channel(DyingStore(healthy_calls), rank, 2)

    def talk() -> None:
        channel.broadcast("topic", lambda: 1, SHORT)
        channel.gather_scatter("topic", 1, each_itself, SHORT)

    with pytest.raises(CoordinationError, match=r"the job's store is gone.*rank 0 or the launcher"):
        talk()


def test_a_store_that_has_the_key_already_does_not_wait():
    store = dist.HashStore()
    job = Job(2, store)
    job.call(lambda _, channel: channel.broadcast("t", lambda: 5, LONG), ranks=[0])
    store.set_timeout(timedelta(seconds=1))
    assert job.call(lambda _, channel: channel.broadcast("t", lambda: None, LONG), ranks=[1]) == {1: 5}


def test_a_broadcast_is_made_once_and_heard_by_all():
    made: list[int] = []
    job = Job()

    def make() -> str:
        made.append(1)
        return "go"

    heard = job.call(lambda _, channel: channel.broadcast("t", make, LONG))
    assert heard == dict.fromkeys(range(WORLD), "go")
    assert len(made) == 1


def test_a_broadcast_that_fails_fails_on_every_rank_with_its_type():
    def make() -> str:
        raise CheckpointExistsError("step 3 is there")

    heard = Job().call(lambda _, channel: channel.broadcast("t", make, LONG))
    assert {type(error) for error in heard.values()} == {CheckpointExistsError}


def test_no_rank_waits_for_ever_for_a_broadcast(monkeypatch):
    monkeypatch.setattr("ckpt_core.coordination._channel._GRACE_SECONDS", 0.0)
    heard = Job().call(lambda _, channel: channel.broadcast("t", lambda: 1, SHORT), ranks=[2])
    assert isinstance(heard[2], DeadlineError)
    assert heard[2].awaited == (0,)


def test_all_ranks_at_a_commit_barrier_get_the_one_answer():
    job = Job()
    heard = job.call(lambda rank, channel: channel.commit_barrier("t", rank, sum, LONG))
    assert heard == dict.fromkeys(range(WORLD), 3)


@pytest.mark.slow
def test_a_thousand_saves_leave_no_more_keys_than_one():
    job = Job()

    def save(number: int) -> int:
        job.call(lambda _, channel: channel.broadcast(f"open/{number}", lambda: b"", LONG))
        job.call(lambda rank, channel: channel.commit_barrier(f"save/{number}", rank, sum, LONG))
        return int(job.store.num_keys())

    assert len({save(number) for number in range(100)}) == 1


class CountingStore:
    """A store in memory that counts the coordinator's requests."""

    def __init__(self) -> None:
        self._inner = dist.HashStore()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.requests += 1
            return getattr(self._inner, name)(*args)

        return call


def test_the_coordinators_requests_do_not_grow_with_the_number_of_ranks():
    def requests(world_size: int) -> int:
        peers, own = dist.HashStore(), CountingStore()
        own._inner = peers
        for rank in range(1, world_size):
            peers.set(f"t/arrive/{rank}", _packed(rank))
        assert Channel(own, 0, world_size).commit_barrier("t", 0, sum, LONG) == sum(range(world_size))
        return own.requests

    assert requests(4) == requests(400)


class Canary:
    """Leaves a directory behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def coordinator(left: bytes) -> Channel:
    """Of two ranks, where something lies in the place of what rank 1 says."""
    store = dist.HashStore()
    store.set("t/arrive/1", left)
    return Channel(store, 0, 2)


def test_what_is_no_message_is_an_error_of_ours_and_a_pickle_is_never_loaded(tmp_path):
    canary = Canary(tmp_path / "ran")
    pickles = [kind + pickle.dumps(each) for kind in (b"", b"v", b"f", b"e") for each in (canary, [canary])]
    for content in (
        b"",
        b"\xff" * 40,
        *pickles,
        b"x" + _packed(1)[1:],
        _packed(1)[:-1],
        b"\0" * 7 + b"\x011",
    ):
        with pytest.raises(CoordinationError, match=r"t/arrive/1: a message that"):
            coordinator(content).gather_scatter("t", 0, list, LONG)
    assert not (tmp_path / "ran").exists()


def test_ten_thousand_mutations_of_a_message_are_values_or_errors_of_ours():
    chance, honest = random.Random(3), _packed({"a": [1, b"xyz", ("b", None)]})
    refused = 0
    for _ in range(10_000):
        changed = bytearray(honest)
        for _ in range(chance.choice((1, 1, 3))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        cut = bytes(changed[: chance.choice((None, None, chance.randrange(len(changed))))])
        try:
            _read("t/arrive/1", cut)
        except CoordinationError:
            refused += 1
    assert refused > 5_000


@pytest.mark.parametrize("word", ["deciding", "rank 1", "\x00", "\xff"])
def test_a_claim_of_whatever_word_that_is_there_already_is_no_decision(word):
    store = dist.HashStore()
    store.set("t/arrive/1", _packed(1))
    store.set("t/verdict", word.encode("latin-1"))
    if word == "deciding":  # its own, of which it had no answer
        assert Channel(store, 0, 2).commit_barrier("t", 0, sum, LONG) == 1
    else:
        with pytest.raises(DeadlineError, match="gave up waiting for rank 0"):
            Channel(store, 0, 2).commit_barrier("t", 0, sum, LONG)
