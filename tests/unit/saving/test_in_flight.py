from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from ckpt_core.coordination import Solo
from ckpt_core.errors import SaveError
from ckpt_core.options import CheckpointOptions
from ckpt_core.saving._in_flight import InFlightSaves, SaveHandle, SaveThread, Task
from ckpt_core.types import CheckpointInfo

INFO = CheckpointInfo(step=1, name="step-000000001", created=0.0)
LONG = 30.0


def handle(step: int = 1) -> SaveHandle:
    return SaveHandle(step, f"step-{step:09d}", 0.0)


@contextmanager
def flight(back_pressure: str = "wait", on_error: str = "raise", limit: int = 1) -> Generator[InFlightSaves]:
    thread = SaveThread(LONG)
    options = CheckpointOptions(back_pressure=back_pressure, on_error=on_error, arenas=limit)
    try:
        yield InFlightSaves(Solo(), thread, options)
    finally:
        thread.close()


class Work(Task):
    def __init__(self, save: SaveHandle, run: Callable[[], None]) -> None:
        super().__init__()
        self.handle = save
        self.run = run

    def give_up(self, reason: str) -> None:
        self.handle.committed.set_exception(SaveError(reason))


def start(of: InFlightSaves, save: SaveHandle, run: Callable[[], None]) -> None:
    of.start(Work(save, run))


def succeed(of: SaveHandle) -> Callable[[], None]:
    return lambda: of.committed.set_result(INFO)


def fail(of: SaveHandle, text: str = "disk") -> Callable[[], None]:
    return lambda: of.committed.set_exception(SaveError(text, step=of.step))


def test_a_save_runs_in_the_background_and_is_waited_for():
    with flight() as each:
        save, go = handle(), threading.Event()
        start(each, save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        assert not save.done()
        go.set()
        each.wait()
        assert save.result(0) is INFO


def test_ready_waits_for_the_save_before():
    with flight() as each:
        save, go = handle(), threading.Event()
        start(each, save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        threading.Timer(0.05, go.set).start()
        assert each.ready()
        assert save.done()


def test_ready_refuses_while_a_save_is_in_flight_if_told_to_skip():
    with flight("skip") as each:
        save, go = handle(), threading.Event()
        start(each, save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        assert not each.ready()
        go.set()
        save.result(LONG)
        assert each.ready()


@pytest.mark.parametrize("back_pressure", ["wait", "skip"])
@pytest.mark.parametrize("deliver", ["ready", "wait", "close"])
def test_a_failure_is_delivered_exactly_once(deliver, back_pressure):
    with flight(back_pressure) as each:
        save = handle()
        start(each, save, fail(save))
        wait([save.committed], LONG)
        with pytest.raises(SaveError, match="disk"):
            getattr(each, deliver)()
        each.wait()
        each.close()


def test_a_failure_is_only_logged_if_errors_are_to_be_warnings(caplog):
    with flight(on_error="warn") as each, caplog.at_level(logging.ERROR):
        save = handle(7)
        start(each, save, fail(save))
        each.wait()
        assert each.ready()
        assert "training continues without the checkpoint of step 7: disk" in caplog.text
        assert isinstance(save.committed.exception(0), SaveError)


def test_a_run_that_breaks_fails_its_save_instead_of_leaving_it_open():
    with flight() as each:
        save = handle()
        start(each, save, lambda: {}["lost"])
        with pytest.raises(KeyError):
            each.wait()


def test_a_failure_after_the_commit_is_logged_and_the_checkpoint_stands(caplog):
    def run() -> None:
        save.committed.set_result(INFO)
        raise ValueError("prune broke")

    with flight() as each:
        save = handle()
        start(each, save, run)
        each.close()
        assert save.result(0) is INFO
    assert "after the commit of step 1: prune broke" in caplog.text


def test_wait_waits_for_what_comes_after_the_commit_but_ready_does_not():
    with flight() as each:
        save, go, after = handle(), threading.Event(), threading.Event()

        def run() -> None:
            save.committed.set_result(INFO)
            go.wait(LONG)
            after.set()

        start(each, save, run)
        assert each.ready()
        assert not after.is_set()
        threading.Timer(0.05, go.set).start()
        each.wait()
        assert after.is_set()


def test_the_save_after_a_failed_one_is_told_apart():
    with flight() as each:
        failed, fine = handle(1), handle(2)
        start(each, failed, fail(failed))
        with pytest.raises(SaveError):
            each.wait()
        assert each.latest is None
        start(each, fine, succeed(fine))
        each.wait()
        assert each.latest is fine


def test_close_stops_the_thread():
    with flight() as each:
        save = handle()
        start(each, save, succeed(save))
        each.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            start(each, handle(2), lambda: None)


def test_nobody_who_holds_a_handle_can_cancel_the_save():
    save = handle()
    assert not save.committed.cancel()
    assert not save.staged.cancel()
    save.committed.set_result(INFO)
    with pytest.raises(TimeoutError):
        save.staged.result(0)
    assert save.result() is save.uploaded.result()
    assert not isinstance(save.committed.exception(), CancelledError)


def held(of: SaveHandle, go: threading.Event) -> Callable[[], None]:
    def run() -> None:
        assert go.wait(LONG)
        of.committed.set_result(INFO)

    return run


def test_as_many_saves_are_in_flight_as_there_are_arenas_and_no_more():
    with flight("skip", limit=2) as each:
        first, second, go = handle(1), handle(2), threading.Event()
        assert each.ready()
        start(each, first, held(first, go))
        assert each.ready()
        start(each, second, held(second, go))
        assert not each.ready()
        go.set()
        second.result(LONG)
        assert each.ready()


def test_saves_run_one_after_another_in_their_order():
    with flight(limit=2) as each:
        order: list[int] = []
        saves = [handle(step) for step in (1, 2)]

        def run(of: SaveHandle) -> None:
            order.append(of.step)
            of.committed.set_result(INFO)

        for save in saves:
            assert each.ready()
            start(each, save, lambda save=save: run(save))
        each.wait()
        assert order == [1, 2]


def test_ready_waits_for_the_oldest_save_only():
    with flight(limit=2) as each:
        first, second, go, later = handle(1), handle(2), threading.Event(), threading.Event()
        start(each, first, held(first, go))
        start(each, second, held(second, later))
        go.set()
        assert each.ready()
        assert first.done()
        assert not second.done()
        later.set()


def test_failures_of_two_saves_are_delivered_once_each_and_in_order():
    with flight(limit=2) as each:
        for step in (1, 2):
            save = handle(step)
            start(each, save, fail(save, f"disk {step}"))
        for expected in ("disk 1", "disk 2"):
            with pytest.raises(SaveError, match=expected):
                each.wait()
        each.wait()
        assert each.ready()


def test_a_failure_is_told_at_the_same_call_on_every_rank():
    """A rank that has seen the failure already must not raise before the others can."""
    with flight(limit=2) as each:
        save = handle(1)
        start(each, save, fail(save))
        wait([save.committed], LONG)
        assert each.ready()
        later = handle(2)
        start(each, later, succeed(later))
        with pytest.raises(SaveError, match="disk"):
            each.ready()


def in_another_thread(save: SaveHandle) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(SaveError):
        pool.submit(save.result, LONG).result()


def by_result(save: SaveHandle) -> None:
    with pytest.raises(SaveError):
        save.result(LONG)


def by_the_future(save: SaveHandle) -> None:
    with pytest.raises(SaveError):
        save.committed.result(LONG)


TAKERS: dict[str, Callable[[SaveHandle], object]] = {
    "result": by_result,
    "the future's result": by_the_future,
    "the future's exception": lambda save: save.committed.exception(LONG),
    "another thread": in_another_thread,
    "twice": lambda save: (by_result(save), by_result(save)),
}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("deliver", ["ready", "wait", "close", "settle"])
@pytest.mark.parametrize("taker", TAKERS)
def test_an_error_that_was_taken_is_not_delivered_again(taker, deliver, on_error, caplog):
    with flight(on_error=on_error) as each:
        save = handle()
        start(each, save, fail(save))
        TAKERS[taker](save)
        getattr(each, deliver)()
        assert each.latest is None
        each.close()
    assert not caplog.records


def test_a_look_that_timed_out_or_that_is_ours_takes_nothing():
    with flight() as each:
        save, go = handle(), threading.Event()
        start(each, save, lambda: go.wait(LONG) and fail(save)())
        with pytest.raises(TimeoutError):
            save.result(0)
        assert save.error is None
        go.set()
        wait([save.committed], LONG)
        assert str(save.error) == "disk"
        with pytest.raises(SaveError, match="disk"):
            each.wait()


def test_of_two_failed_saves_the_one_that_was_not_taken_is_delivered():
    for taken in (1, 2):
        with flight(limit=2) as each:
            saves = [handle(step) for step in (1, 2)]
            for save in saves:
                start(each, save, fail(save, f"disk {save.step}"))
            by_result(saves[taken - 1])
            with pytest.raises(SaveError, match=f"disk {3 - taken}"):
                each.wait()
            each.wait()


def test_a_failure_behind_the_one_that_close_raises_is_logged(caplog):
    with flight(limit=2) as each:
        for step in (1, 2):
            save = handle(step)
            start(each, save, fail(save, f"disk {step}"))
        with pytest.raises(SaveError, match="disk 1"):
            each.close()
    assert "without the checkpoint of step 2: disk 2" in caplog.text
