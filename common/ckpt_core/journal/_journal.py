"""The journal of a manager, as its training thread sees it."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, final

from ckpt_core.cadence import FailureRate
from ckpt_core.journal._failure_rate import failure_rate
from ckpt_core.journal._recorder import Recorder
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink

_PATIENCE_SECONDS: Final = 5.0


@final
class Journal:
    """What has happened to a root: a file for this run, beside those of earlier ones.

    Every rank of a job has one, and that of the coordinator writes, on a thread of its own, from the moment
    at which the root is taken. A run begins with its first step, so that one that only loads leaves no
    trace. It ends with `end`, or with the process: one whose training an exception has ended has no end, as
    if it had been killed, and the next run says what it lost.

    Concurrency: main thread.

    Args:
        storage: the root.
        tiers: further roots of the run, which get a copy when a run begins or ends.
        enabled: whether anything is written.
    """

    def __init__(self, storage: Storage, tiers: Sequence[Storage] = (), *, enabled: bool = True) -> None:
        self._recorder = Recorder(storage, tiers)
        self._enabled = enabled
        self._opened = False
        self._amid = _in_flight()
        # Also at exit, for scripts that never close their manager, and for managers that are forgotten.
        self._finish = weakref.finalize(self, _finish, self._recorder, self._amid)

    @property
    def sinks(self) -> Sequence[Sink]:
        """The receivers of telemetry: the one that writes, or none."""
        return (self._recorder,) if self._enabled else ()

    def open(self, run: str, ranks: int, check: Callable[[], None] | None) -> None:
        """Begin to write, where this process has the root.

        Args:
            run: the id of this start of the job.
            ranks: how many the job has.
            check: raises once another job has the root; None on all ranks but the coordinator.
        """
        if not self._enabled:
            return
        if check is None:
            self._recorder.drop()
            return
        self._opened = True
        self._recorder.begin(run, ranks, check)

    def seen(self, step: int, *, began: tuple[float, float] | None = None) -> None:
        """Note that training has come to a step. In every step: two writes to memory.

        Args:
            step: of the training.
            began: when the save of it began, on the clock and as Unix time: training may begin with it.
        """
        recorder = self._recorder
        training = recorder.training
        training.last = (step, recorder.clock(), time.time())
        if training.first is None:
            training.first = training.last if began is None else (step, *began)
            recorder.wake.set()

    def waited(self) -> None:
        """Note that training has waited for a save since its last step."""
        last = self._recorder.training.last
        if last is not None:
            self.seen(last[0])

    def resumed(self, step: int) -> None:
        """Note that the live state is that of a checkpoint."""
        training = self._recorder.training
        training.resumed.append(((step, self._recorder.clock(), time.time()), training.last))

    def end(self, *, preempted: bool = False, failed: bool | None = None) -> None:
        """Note that training is over.

        Args:
            preempted: whether a scheduler has asked for it.
            failed: whether an exception has ended it; None to look for one that is being handled.
        """
        if failed is None:
            failed = _has_failed(self._amid)
        _note_end(self._recorder, "" if failed else "preempted" if preempted else "end")

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._opened:
            self._finish()

    def failures(self, devices: int) -> FailureRate:
        """Return how often this job fails. Coordinator only, once the root is taken.

        It waits a few seconds for the history; if that is not there by then, published rates are all.
        """
        recorder = self._recorder
        known = self._opened and recorder.known.wait(_PATIENCE_SECONDS)
        return failure_rate(recorder.log.provisional() if known else [], devices)


def _finish(recorder: Recorder, amid: int) -> None:
    if recorder.training.ending is None:
        _note_end(recorder, "" if _has_failed(amid) else "end")
    recorder.finish()


def _note_end(recorder: Recorder, ending: str) -> None:
    if recorder.training.ending is None:
        recorder.training.ending = ending, time.time()
        recorder.wake.set()


def _in_flight() -> int:
    """Return the identity of the exception being handled; 0 without one."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def _has_failed(amid: int) -> bool:
    """Return whether an exception ends training now.

    One that was being handled before training began does not. At exit it is the one that has ended the
    script. In a notebook that may be an old one.
    """
    kind, error, _ = sys.exc_info()
    if error is not None and id(error) != amid:
        return _is_failure(kind, error)
    if threading.main_thread().is_alive() or hasattr(sys, "ps1"):
        return False
    return _is_failure(getattr(sys, "last_type", None), getattr(sys, "last_value", None))


def _is_failure(kind: type[BaseException] | None, error: BaseException | None) -> bool:
    """Return whether it is an error, not a user who stops, or a script that is done."""
    if kind is None or issubclass(kind, KeyboardInterrupt | GeneratorExit):
        return False
    return not (isinstance(error, SystemExit) and error.code in {None, 0})
