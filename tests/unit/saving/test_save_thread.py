"""The thread on which saves end: one that hangs leaves nobody waiting, and does no harm when it wakes up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest

from ckpt_core.crew import run_with_timeout
from ckpt_core.saving._in_flight import SaveThread, Task

pytestmark = pytest.mark.reliability

LONG = 30.0
SHORT = 0.1


class Work(Task):
    """One that does not raise."""

    def __init__(self, run: Callable[[], object], give_up: Callable[[str], None]) -> None:
        super().__init__()
        self.run = run
        self.give_up = give_up

    def fail(self, error: BaseException) -> None:
        pytest.fail(repr(error))


@pytest.fixture
def background() -> Generator[SaveThread]:
    made = SaveThread(SHORT)
    yield made
    made.close()


def test_work_is_done_in_its_order(background):
    done: list[int] = []
    runs = [background.submit(Work(lambda each=each: done.append(each), done.append)) for each in range(3)]
    assert all(run.ended.wait(LONG) for run in runs)
    assert done == [0, 1, 2]
    assert background.stuck() == ""


def test_work_that_does_not_get_on_is_given_up_once_and_told_what_it_hangs_in(background):
    gate, told = threading.Event(), list[str]()

    def work() -> None:
        background.heartbeat("writing a/b")
        gate.wait(LONG)

    run = background.submit(Work(work, told.append))
    assert run.over.wait(LONG)
    assert not run.ended.is_set()
    assert [text.partition(" has made no progress for")[0] for text in told] == ["writing a/b"]
    assert "writing a/b has made no progress for" in background.stuck()
    gate.set()
    assert run.ended.wait(LONG)
    assert len(told) == 1


def test_a_thread_that_has_woken_up_takes_work_again(background):
    gate, told = threading.Event(), list[str]()
    first = background.submit(Work(lambda: gate.wait(LONG) and None, told.append))
    assert first.over.wait(LONG)
    gate.set()
    assert first.ended.wait(LONG)
    assert background.stuck() == ""
    again = background.submit(Work(lambda: told.append("done"), told.append))
    assert again.ended.wait(LONG)
    assert told[1:] == ["done"]


def test_work_behind_work_that_hangs_is_given_up_too(background):
    gate, told = threading.Event(), list[str]()
    first = background.submit(Work(lambda: gate.wait(LONG) and None, lambda _: told.append("first")))
    behind = background.submit(Work(lambda: None, lambda _: told.append("second")))
    assert first.over.wait(LONG)
    assert behind.over.wait(LONG)
    gate.set()
    assert behind.ended.wait(LONG)
    assert sorted(told) == ["first", "second"]


def test_work_that_gets_on_is_not_given_up_however_long_it_takes():
    background, told = SaveThread(0.5), list[str]()
    ticks = [threading.Event() for _ in range(6)]

    def work() -> None:
        for tick in ticks:
            background.heartbeat("writing")
            tick.wait(0.15)  # the time it takes is what is tested: 0.9 s in all

    run = background.submit(Work(work, told.append))
    assert run.ended.wait(LONG)
    assert told == []
    background.close()


def test_what_may_take_longer_says_so(background):
    gate, told = threading.Event(), list[str]()

    def work() -> None:
        background.heartbeat("waiting for others", LONG)
        gate.wait(4 * SHORT)

    assert background.submit(Work(work, told.append)).ended.wait(LONG)
    assert told == []


def test_a_farewell_that_hangs_is_not_waited_for(caplog):
    gate = threading.Event()
    assert not run_with_timeout(SHORT, lambda: gate.wait(LONG) and None)
    gate.set()

    def fail() -> None:
        raise OSError("gone")

    assert run_with_timeout(LONG, fail)
    assert "while cleaning up" in caplog.text


class _LateWaker(threading.Event):
    """Its waiters come to run some time after it is set, as on a busy machine."""

    def wait(self, timeout: float | None = None) -> bool:
        woken = super().wait(timeout)
        if threading.current_thread().name == "ckpt-save-watch":
            threading.Event().wait(SHORT)
        return woken


def _fail() -> None:
    raise OSError("no space")


@pytest.mark.parametrize("works", [["save"], ["save"] * 3, ["fail"], ["hang"], ["save", "fail", "save"]])
def test_closing_leaves_no_thread_that_watches_a_save(works):
    before, gate = set(threading.enumerate()), threading.Event()
    runs = {"save": lambda: None, "fail": _fail, "hang": lambda: gate.wait(LONG) and None}
    background = SaveThread(SHORT)
    for work in works:
        each = Work(runs[work], lambda _: None)
        each.fail = lambda _: None
        each.over = _LateWaker()
        background.submit(each)
    background.until_idle()
    background.close()
    assert not [left for left in set(threading.enumerate()) - before if left.name == "ckpt-save-watch"]
    gate.set()
