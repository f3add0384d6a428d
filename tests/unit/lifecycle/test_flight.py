from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from ckpt_core.coordination import Solo
from ckpt_core.errors import SaveError
from ckpt_core.lifecycle._flight import Flight
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.types import CheckpointInfo

INFO = CheckpointInfo(step=1, name="step-000000001", created=0.0)
LONG = 30.0


def handle(step: int = 1) -> SaveHandle:
    return SaveHandle(step, f"step-{step:09d}", 0.0)


@contextmanager
def flight(back_pressure: str = "wait", on_error: str = "raise") -> Generator[Flight]:
    made = Flight(Solo(), back_pressure=back_pressure, on_error=on_error)
    try:
        yield made
    finally:
        made._pool.shutdown()


def succeed(of: SaveHandle) -> Callable[[], None]:
    return lambda: of.committed.set_result(INFO)


def fail(of: SaveHandle, text: str = "disk") -> Callable[[], None]:
    return lambda: of.committed.set_exception(SaveError(text, step=of.step))


def test_a_save_runs_in_the_background_and_is_waited_for():
    with flight() as each:
        save, go = handle(), threading.Event()
        each.start(save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        assert not save.done()
        go.set()
        each.wait()
        assert save.result(0) is INFO


def test_ready_waits_for_the_save_before():
    with flight() as each:
        save, go = handle(), threading.Event()
        each.start(save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        threading.Timer(0.05, go.set).start()
        assert each.ready()
        assert save.done()


def test_ready_refuses_while_a_save_is_in_flight_if_told_to_skip():
    with flight("skip") as each:
        save, go = handle(), threading.Event()
        each.start(save, lambda: go.wait(LONG) and save.committed.set_result(INFO))
        assert not each.ready()
        go.set()
        save.result(LONG)
        assert each.ready()


@pytest.mark.parametrize("back_pressure", ["wait", "skip"])
@pytest.mark.parametrize("deliver", ["ready", "wait", "close"])
def test_a_failure_is_delivered_exactly_once(deliver, back_pressure):
    with flight(back_pressure) as each:
        save = handle()
        each.start(save, fail(save))
        save.committed.exception(LONG)
        with pytest.raises(SaveError, match="disk"):
            getattr(each, deliver)()
        each.wait()
        each.close()


def test_a_failure_is_only_logged_if_errors_are_to_be_warnings(caplog):
    with flight(on_error="warn") as each, caplog.at_level(logging.ERROR):
        save = handle(7)
        each.start(save, fail(save))
        each.wait()
        assert each.ready()
        assert "training goes on without the checkpoint of step 7: disk" in caplog.text
        assert isinstance(save.committed.exception(0), SaveError)


def test_a_run_that_breaks_fails_its_save_instead_of_leaving_it_open():
    with flight() as each:
        save = handle()
        each.start(save, lambda: {}["lost"])
        with pytest.raises(KeyError):
            each.wait()


def test_a_failure_after_the_commit_is_logged_and_the_checkpoint_stands(caplog):
    def run() -> None:
        save.committed.set_result(INFO)
        raise ValueError("prune broke")

    with flight() as each:
        save = handle()
        each.start(save, run)
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

        each.start(save, run)
        assert each.ready()
        assert not after.is_set()
        threading.Timer(0.05, go.set).start()
        each.wait()
        assert after.is_set()


def test_the_save_after_a_failed_one_is_told_apart():
    with flight() as each:
        failed, fine = handle(1), handle(2)
        each.start(failed, fail(failed))
        with pytest.raises(SaveError):
            each.wait()
        assert each.latest is None
        each.start(fine, succeed(fine))
        each.wait()
        assert each.latest is fine


def test_close_stops_the_thread():
    with flight() as each:
        save = handle()
        each.start(save, succeed(save))
        each.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            each.start(handle(2), lambda: None)


def test_nobody_who_holds_a_handle_can_cancel_the_save():
    save = handle()
    assert not save.committed.cancel()
    assert not save.staged.cancel()
    save.committed.set_result(INFO)
    with pytest.raises(TimeoutError):
        save.staged.result(0)
    assert save.result() is save.uploaded.result()
    assert not isinstance(save.committed.exception(), CancelledError)
