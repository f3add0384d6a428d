from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
import torch

from ckpt_core import OnPreemption
from ckpt_core.errors import ConfigError
from ckpt_core.preemption._sources import PreemptionSources, SignalCounter

pytestmark = pytest.mark.reliability
spot = threading.Event()


def interrupted() -> bool:
    return spot.is_set()


@pytest.fixture(autouse=True)
def _handlers() -> Generator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    # What a host or a library has left there is not what these tests are about.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    spot.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def announcements(*policies: OnPreemption) -> PreemptionSources:
    return PreemptionSources(policies, period_seconds=0.001)


def eventually(true: Callable[[], bool]) -> None:
    """Fails by never ending, which the run's own time-out reports with every stack."""
    while not true():
        time.sleep(0.001)


def send(number: signal.Signals, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


def test_a_file_announces_by_being_there(tmp_path: Path) -> None:
    heard = announcements(OnPreemption((), file=tmp_path / "stop"))
    assert not heard.stop
    (tmp_path / "stop").touch()
    eventually(lambda: heard.stop)
    (tmp_path / "stop").unlink()
    assert heard.stop, "once announced, it stays"
    heard.close()


def test_a_file_that_was_there_before_counts(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    heard = announcements(OnPreemption((), file=str(tmp_path / "stop")))
    eventually(lambda: heard.stop)
    heard.close()


@pytest.mark.parametrize("when", [interrupted, f"{__name__}:interrupted"], ids=["function", "name"])
def test_a_function_announces_by_being_true(when: Callable[[], bool] | str) -> None:
    heard = announcements(OnPreemption((), when=when))
    assert not heard.stop
    spot.set()
    eventually(lambda: heard.stop)
    heard.close()


def test_whatever_comes_first_announces(tmp_path: Path) -> None:
    policy = OnPreemption(("SIGUSR1",), file=tmp_path / "stop", when=interrupted)
    for announce in (lambda: send(signal.SIGUSR1), (tmp_path / "stop").touch, spot.set):
        heard = announcements(policy)
        if announce is not spot.set:
            assert not heard.stop
        announce()
        eventually(lambda heard=heard: heard.stop)
        heard.close()
        (tmp_path / "stop").unlink(missing_ok=True)


def test_one_that_goes_away_and_comes_again_is_announced_again() -> None:
    heard = announcements(OnPreemption((), when=interrupted, stop=False))
    spot.set()
    eventually(lambda: heard.count == 1)
    spot.clear()
    eventually(lambda: not any(heard._true.values()))
    spot.set()
    eventually(lambda: heard.count == 2)
    assert not heard.stop
    heard.close()


def test_a_function_that_fails_is_told_once_and_asked_again(caplog) -> None:
    asked: list[int] = []

    def ask() -> bool:
        asked.append(0)
        if len(asked) < 3:
            raise OSError("no route to the metadata service")
        return True

    heard = announcements(OnPreemption((), when=ask))
    eventually(lambda: heard.stop)
    heard.close()
    told = [
        record.message for record in caplog.records if "no route to the metadata service" in record.message
    ]
    assert len(told) == 1
    assert "could not be asked about a preemption" in told[0]


def test_a_function_that_hangs_does_not_hold_up_the_training() -> None:
    inside, leave = threading.Event(), threading.Event()

    def ask() -> bool:
        inside.set()
        return leave.wait()

    heard = announcements(OnPreemption((), when=ask))
    inside.wait()
    assert not heard.stop
    heard.close()
    leave.set()


@pytest.mark.parametrize(
    ("name", "words"), [("no_such:thing", "no_such"), ("os:nothing", "nothing"), ("os:sep", "no function")]
)
def test_a_function_that_cannot_be_imported_is_an_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        announcements(OnPreemption((), when=name))


def test_one_signal_may_stop_and_another_only_save() -> None:
    heard = announcements(OnPreemption(("SIGTERM",)), OnPreemption(("SIGUSR1",), stop=False))
    send(signal.SIGUSR1, times=2)
    assert not heard.stop
    assert heard.count == 2
    send(signal.SIGTERM)
    assert heard.stop
    assert heard.count == 2
    heard.close()


def test_a_handler_from_before_is_called_too() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    counter = SignalCounter(["SIGUSR1"])
    send(signal.SIGUSR1, times=2)
    counter.close()
    send(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] * 3
    assert counter.count(["SIGUSR1"]) == 2


@pytest.mark.parametrize("raised", [SystemExit(0), ValueError("broken")])
def test_a_handler_from_before_that_exits_or_fails_does_not_end_the_step(
    raised: BaseException, caplog
) -> None:
    def leave(*_: object) -> None:
        raise raised

    signal.signal(signal.SIGUSR1, leave)
    counter = SignalCounter(["SIGUSR1"])
    send(signal.SIGUSR1)
    assert counter.count(["SIGUSR1"]) == 1
    assert repr(raised) in caplog.text
    counter.close()


def test_however_many_signals_come_the_process_goes_on() -> None:
    counter = SignalCounter(["SIGTERM"])
    send(signal.SIGTERM, times=5)
    assert counter.count(["SIGTERM"]) == 5
    counter.close()


def test_the_third_interrupt_interrupts() -> None:
    counter = SignalCounter(["SIGINT"])
    send(signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    counter.close()


def test_handlers_are_put_back_in_whatever_order_counters_close() -> None:
    def before(*_: object) -> None: ...

    signal.signal(signal.SIGUSR1, before)
    first, second, third = (SignalCounter(["SIGUSR1"]) for _ in range(3))
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == third._note
    third.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def in_a_child(act: Callable[[], None], expected: Sequence[int]) -> None:
    """Fork, act there, and compare how the child ends: an exit code, or minus a signal."""
    child = os.fork()
    if child == 0:
        act()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in expected


def test_a_forked_child_is_ended_by_a_signal_as_ever() -> None:
    counter = SignalCounter(["SIGTERM"])
    in_a_child(lambda: send(signal.SIGTERM), [-signal.SIGTERM])
    counter.close()


def test_a_loaders_worker_passes_over_the_first_signal_and_ends_by_the_second() -> None:
    """Schedulers signal whole groups of processes; without its workers training would break."""
    counter = SignalCounter(["SIGTERM"])

    def work() -> None:
        torch.utils.data._utils.worker._worker_info = object()  # as in a worker
        send(signal.SIGTERM)

    in_a_child(work, [7])
    in_a_child(lambda: (work(), send(signal.SIGTERM))[0], [-signal.SIGTERM])
    counter.close()
