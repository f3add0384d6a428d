from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import (
    AtSteps,
    ConfigError,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    OnPreemption,
)
from ckpt_core.coordination import Coordinator, Solo
from ckpt_core.preemption import CadenceKeeper
from tests.kit.clock import FakeClock


@pytest.fixture
def handler() -> Generator[object]:
    """The handler of SIGUSR1 that was there before us, put back whatever happens."""

    def previous(*_: object) -> None: ...

    original = signal.signal(signal.SIGUSR1, previous)
    yield previous
    signal.signal(signal.SIGUSR1, original)


def keeper(policy: object, clock: FakeClock | None = None) -> CadenceKeeper:
    return CadenceKeeper(policy, Solo(), clock or FakeClock())


def due_steps(cadence: CadenceKeeper, steps: range) -> list[int]:
    found = []
    for step in steps:
        if cadence.due(step):
            found.append(step)
            cadence.saved(step)
    return found


def test_without_a_policy_nothing_is_ever_due():
    assert due_steps(keeper(None), range(5)) == []


def test_steps_are_counted():
    assert due_steps(keeper(EverySteps(3)), range(10)) == [3, 6, 9]


class Unreachable(Coordinator):
    """One of four ranks, of which none answers."""

    rank, world_size = 0, 4

    def _fail(self, *_: object, **__: object):
        raise AssertionError("a rank was asked")

    commit_channel = broadcast = gather_scatter = all_reduce_max = broadcast_tensor = _fail

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "policy",
    [
        EverySteps(3),
        AtSteps([2, 5]) | EverySteps(4),
        EveryFraction(0.5) & ~EverySteps(2),
        EveryEpochs(2) | EveryTokens(40),
    ],
)
def test_a_policy_of_steps_asks_no_other_rank(policy):
    cadence = CadenceKeeper(policy, Unreachable(), FakeClock())
    for step in range(1, 12):
        cadence.due(step, 12, epochs=step // 3, tokens=step * 8)


def test_a_step_that_is_decided_on_twice_is_compared_with_the_step_before_it():
    """As at the end of an epoch: before its validation, and after it."""
    cadence = keeper(EverySteps(2) & AtSteps([4, 5]))
    found = [(step, cadence.due(step) is not None, cadence.due(step) is not None) for step in range(1, 6)]
    assert [step for step, *due in found if any(due)] == [4]
    assert all(first == second for _, first, second in found)


def test_a_boundary_that_a_skip_lost_does_not_come_back():
    cadence = keeper(EverySteps(3))
    assert cadence.due(3)
    assert cadence.due(4) is None


def test_resuming_counts_as_a_save():
    cadence = keeper(AtSteps([1]) | EverySteps(5))
    cadence.saved(5)
    assert due_steps(cadence, range(5, 12)) == [10]


def test_time_is_counted_from_the_start_and_then_from_the_last_save():
    clock = FakeClock()
    cadence = keeper(EverySeconds(60), clock)
    clock.advance(59)
    assert cadence.due(1) is None
    clock.advance(1)
    assert cadence.due(2)
    cadence.saved(2)
    clock.advance(59)
    assert cadence.due(3) is None
    clock.advance(2)
    assert cadence.due(4)


class Asked(Coordinator):
    """The coordinator of two ranks, or with `answers` the other one, which hears what that one heard."""

    world_size = 2

    def __init__(self, answers: list[list[int]] | None = None) -> None:
        self.rank = 0 if answers is None else 1
        self.heard: list[list[int]] = []
        self._answers = None if answers is None else iter(answers)

    def all_reduce_max(self, values, *, what):
        self.heard.append(list(values) if self._answers is None else next(self._answers))
        return self.heard[-1]

    def check(self) -> None: ...

    def _fail(self, *_: object, **__: object):
        raise AssertionError("a rank was asked for something else")

    commit_channel = broadcast = gather_scatter = broadcast_tensor = _fail

    def close(self) -> None: ...


def _train(cadence: CadenceKeeper, clock: FakeClock, lengths: list[float]) -> list[int]:
    found = []
    for step, seconds in enumerate(lengths, start=1):
        clock.advance(seconds)
        if cadence.due(step):
            found.append(step)
            cadence.saved(step)
    return found


def test_short_steps_are_not_worth_an_exchange_each():
    clock, ranks = FakeClock(), Asked()
    assert _train(CadenceKeeper(EverySeconds(1000), ranks, clock), clock, [0.01] * 20_000) == []
    assert len(ranks.heard) < 2_000
    clock, ranks = FakeClock(), Asked()
    _train(CadenceKeeper(EverySeconds(1000), ranks, clock), clock, [2.0] * 300)
    assert len(ranks.heard) == 300


@given(
    st.lists(st.sampled_from([0.001, 0.01, 0.1, 1.0, 30.0]), min_size=1, max_size=12),
    st.integers(1, 90),
    st.sampled_from([0.3, 5.0, 60.0]),
)
def test_all_ranks_ask_at_the_same_steps_whatever_their_clocks_say(lengths, times, seconds):
    lengths = [each for each in lengths for _ in range(times)]
    clock, first = FakeClock(), Asked()
    policy = EverySeconds(seconds)
    saved = _train(CadenceKeeper(policy, first, clock), clock, lengths)
    other, second = FakeClock(12_345.0), Asked(first.heard)
    assert _train(CadenceKeeper(policy, second, other), other, lengths[::-1]) == saved
    assert len(second.heard) == len(first.heard)


@given(st.floats(0.001, 3.0), st.sampled_from([1.0, 20.0, 400.0]))
def test_a_save_is_late_by_a_hundredth_of_its_interval_or_a_second(step, seconds):
    clock = FakeClock()
    cadence = CadenceKeeper(EverySeconds(seconds), Asked(), clock)
    times, number = [clock()], 0
    while len(times) < 4:
        clock.advance(step)
        number += 1
        if cadence.due(number):
            cadence.saved(number)
            times.append(clock())
    late = [after - before - seconds for before, after in itertools.pairwise(times)]
    assert max(late) <= min(seconds * 0.011, 1.0) + 2 * step


def test_steps_that_become_long_are_not_passed_over(handler):
    """However short the steps were, a preemption waits for no more than 16 of them."""
    clock, ranks = FakeClock(), Asked()
    cadence = CadenceKeeper(OnPreemption(signals=("SIGUSR1",)), ranks, clock)
    _train(cadence, clock, [0.001] * 100_000)
    signal.raise_signal(signal.SIGUSR1)
    found = [step for step in range(100_001, 100_020) if cadence.due(step)]
    assert found[0] <= 100_016
    cadence.close()


def test_the_last_step_is_agreed_on_and_so_is_the_one_after_a_save_or_a_look(handler):
    clock, ranks = FakeClock(), Asked()
    cadence = CadenceKeeper(OnPreemption(signals=("SIGUSR1",)), ranks, clock)
    _train(cadence, clock, [0.001] * 100_000)
    for act in (lambda: cadence.saved(100_000), cadence.check_preemption, lambda: None):
        act()
        before = len(ranks.heard)
        cadence.due(100_002, 100_002)
        assert len(ranks.heard) == before + 1
    cadence.close()


def test_the_time_of_a_save_that_nobody_was_asked_about_is_that_of_the_next_look():
    clock = FakeClock()
    cadence = keeper(EverySeconds(60), clock)
    clock.advance(100)
    cadence.saved(1)
    assert cadence.due(2) is None
    clock.advance(59)
    assert cadence.due(3) is None
    clock.advance(1)
    assert cadence.due(4)


def test_time_survives_on_a_clock_with_microseconds():
    clock = FakeClock(1_795_000_000.25)
    cadence = keeper(EverySeconds(0.5), clock)
    clock.advance(0.4999)
    assert cadence.due(1) is None
    clock.advance(0.001)
    assert cadence.due(2)


def test_a_signal_makes_one_save_due_and_leaves_the_job_preempted(handler):
    cadence = keeper(OnPreemption(signals=("SIGUSR1",)))
    assert cadence.due(1) is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not cadence.preempted
    assert cadence.due(2)
    assert cadence.preempted
    cadence.saved(2)
    assert cadence.due(3) is None
    assert cadence.preempted
    cadence.close()


def test_a_save_that_was_skipped_stays_due_after_a_signal(handler):
    cadence = keeper(OnPreemption(signals=("SIGUSR1",)))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert cadence.due(1)
    assert cadence.due(2)
    cadence.close()


def test_close_puts_the_handler_before_back(handler):
    cadence = keeper(AtSteps([1]) | OnPreemption(signals=("SIGUSR1",)))
    assert signal.getsignal(signal.SIGUSR1) is not handler
    cadence.close()
    assert signal.getsignal(signal.SIGUSR1) is handler
    cadence.close()


def test_close_leaves_a_handler_alone_that_came_after_ours(handler):
    def later(*_: object) -> None: ...

    cadence = keeper(OnPreemption(signals=("SIGUSR1",)))
    signal.signal(signal.SIGUSR1, later)
    cadence.close()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_without_preemption_no_handler_is_touched(handler):
    cadence = keeper(EverySteps(1))
    assert signal.getsignal(signal.SIGUSR1) is handler
    cadence.close()


def test_off_the_main_thread_it_warns_instead_of_failing(handler, caplog):
    made: list[CadenceKeeper] = []
    thread = threading.Thread(target=lambda: made.append(keeper(OnPreemption(signals=("SIGUSR1",)))))
    thread.start()
    thread.join()
    assert made[0].due(1) is None
    assert "not on the main thread: SIGUSR1 will not be noticed" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.fixture
def announced(handler) -> Generator[tuple[CadenceKeeper, FakeClock]]:
    """One that saves and goes on, on SIGUSR1."""
    clock = FakeClock()
    cadence = keeper(OnPreemption(("SIGUSR1",), stop=False), clock)
    yield cadence, clock
    cadence.close()


def test_without_stop_it_saves_and_training_goes_on(announced):
    cadence, clock = announced
    os.kill(os.getpid(), signal.SIGUSR1)
    assert due_steps(cadence, range(1, 4)) == [1]
    clock.advance(31)
    assert due_steps(cadence, range(4, 6)) == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert due_steps(cadence, range(6, 8)) == [6]
    assert not cadence.preempted


def test_what_comes_within_thirty_seconds_is_the_same_announcement(announced):
    cadence, clock = announced
    os.kill(os.getpid(), signal.SIGUSR1)
    assert due_steps(cadence, range(1, 4)) == [1]
    clock.advance(29)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert due_steps(cadence, range(4, 6)) == []
    clock.advance(10)
    assert due_steps(cadence, range(6, 8)) == []


def test_a_look_between_steps_tells_and_the_next_step_is_saved(handler):
    cadence = keeper(OnPreemption(("SIGUSR1",)))
    assert not cadence.check_preemption()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert cadence.check_preemption() == "preemption"
    assert cadence.pending
    assert cadence.due(7) == "preemption"
    cadence.close()


def test_a_step_that_is_saved_already_is_not_saved_again_for_a_preemption(handler):
    cadence = keeper(EverySteps(5) | OnPreemption(("SIGUSR1",)))
    assert due_steps(cadence, range(5, 6)) == [5]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert cadence.check_preemption() == "preemption", "training is to stop"
    assert cadence.due(5) is None
    assert not cadence.pending, "nothing is left to be saved"
    cadence.close()


def test_a_policy_without_preemption_looks_for_none():
    cadence = keeper(EverySteps(5) | EverySeconds(5))
    assert not cadence.check_preemption()
    assert not keeper(None).check_preemption()


@given(
    n=st.integers(1, 50),
    strides=st.lists(st.integers(0, 120), min_size=1, max_size=40),
    others=st.sets(st.integers(1, 40)),
    crashes=st.sets(st.integers(1, 40)),
)
def test_every_multiple_of_tokens_is_saved_once_across_crashes_and_resumes(n, strides, others, crashes):
    """A run that crashes goes on from its last save, made for this policy or another, on any ranks."""
    tokens = [sum(strides[: step + 1]) for step in range(len(strides))]
    cadence, last, saves, step = keeper(EveryTokens(n)), (0, {}), [], 0
    while step < len(tokens):
        step += 1
        if step in crashes:
            crashes = crashes - {step}
            step, annotations = last
            saves = [save for save in saves if save <= step]
            cadence = keeper(EveryTokens(n))
            if step:
                cadence.saved(step)
                cadence.count_from(lambda found=annotations: found)
            continue
        due = cadence.due(step, tokens=tokens[step - 1])
        if due:
            saves.append(step)
        if due or step in others:
            last = step, cadence.annotations
            cadence.saved(step)
    before = [0, *tokens]
    assert saves == [step for step in range(1, len(before)) if before[step] // n > before[step - 1] // n]


def test_an_end_of_an_epoch_after_the_look_at_its_last_step_is_due_at_that_step():
    cadence = keeper(EverySteps(5) | EveryEpochs(1))
    looks = [(2, 0), (3, 0), (3, 1), (4, 1), (5, 1), (5, 2), (6, 2)]
    due = []
    for step, epochs in looks:
        if cadence.due(step, epochs=epochs):
            due.append((step, epochs))
            cadence.saved(step)
    assert due == [(3, 1), (5, 1)]


def test_counting_begins_where_the_host_says_or_else_where_an_older_checkpoint_is_resumed():
    told, resumed, fresh = (keeper(EveryEpochs(2)) for _ in range(3))
    told.check_preemption(epochs=3)
    resumed.saved(7)
    resumed.count_from(lambda: {"counts": "the user's own"})
    due = [bool(each.due(8, epochs=epochs)) for each, epochs in ((told, 3), (resumed, 4), (fresh, 3))]
    assert due == [False, False, True]
    assert [bool(each.due(9, epochs=6)) for each in (told, resumed, fresh)] == [True] * 3


def test_going_back_neither_blocks_nor_floods_a_count():
    cadence = keeper(EveryTokens(100))
    assert [bool(cadence.due(step, tokens=t)) for step, t in ((9, 950), (3, 250), (4, 290), (5, 300))] == [
        True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"tokens": 1.5}, {"epochs": True}, {"batches": 3}])
def test_a_wrong_count_is_named_whatever_the_policy(wrong):
    for policy in (EverySteps(3), None):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            keeper(policy).due(1, **wrong)
