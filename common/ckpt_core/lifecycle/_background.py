"""The thread on which saves end, and how it is known that it does not get on any more.

A call to storage that never returns, as on a network filesystem whose server is gone, cannot be interrupted.
So the thread tells whenever it gets on; if it does not for too long, what it was doing counts as failed,
whoever waits for it is told, and the thread is left to itself. It may wake up at any time: whatever it does
then must look first whether it was given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import final

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)


@final
@dataclass(frozen=True, slots=True)
class _Beat:
    """When the thread got on last, with what, and for how long that may take."""

    doing: str
    limit_seconds: float
    since: float = field(default_factory=time.monotonic)

    @property
    def remaining_seconds(self) -> float:
        return self.since + self.limit_seconds - time.monotonic()


@final
class Run:
    """One piece of work of the background thread.

    Attributes:
        over: set when it has ended, or was given up.
        ended: set when it has ended.
    """

    def __init__(self, work: Callable[[], None], give_up: Callable[[str], None]) -> None:
        self.work = work
        self.give_up = give_up
        self.over = threading.Event()
        self.ended = threading.Event()


@final
class Background:
    """Runs one piece of work after another.

    Concurrency: `submit`, `stuck` and `close` on the main thread, `beat` on the background thread.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self._work: SimpleQueue[Run | None] = SimpleQueue()
        self._beat = _Beat("nothing", deadline_seconds)
        self._thread: threading.Thread | None = None
        self._last: Run | None = None

    def submit(self, work: Callable[[], None], give_up: Callable[[str], None]) -> Run:
        """Do `work` after all that was submitted before.

        Args:
            work: raises nothing.
            give_up: called once, on another thread, with what the background thread hangs in, if it does.
        """
        run = Run(work, give_up)
        if self._thread is None:
            # A daemon: the process must be able to end while the thread hangs.
            self._thread = threading.Thread(target=self._go, name="ckpt-save", daemon=True)
            self._thread.start()
        if self._last is None or self._last.ended.is_set():
            self.beat("beginning")
        self._last = run
        self._work.put(run)
        # Not a daemon: a process whose main thread ends waits for its last save, but not for ever.
        threading.Thread(target=self._watch, args=(run,), name="ckpt-save-watch").start()
        return run

    def beat(self, doing: str, limit_seconds: float | None = None) -> None:
        """The thread has got on.

        Args:
            doing: what it does next, in words.
            limit_seconds: after how long it counts as hanging; by default after the deadline.
        """
        self._beat = _Beat(doing, self.deadline_seconds if limit_seconds is None else limit_seconds)

    @property
    def waiting(self) -> bool:
        """Whether more work waits for the thread."""
        return not self._work.empty()

    def until_idle(self) -> None:
        """Return when all work is over: done, or given up. On any thread."""
        if (last := self._last) is not None:
            last.over.wait()

    def stuck(self) -> str:
        """In what the thread hangs still, after it was given up; "" if it is not so."""
        last = self._last
        return (
            self._described() if last is not None and last.over.is_set() and not last.ended.is_set() else ""
        )

    def close(self) -> None:
        """Take no more work, end the thread unless it hangs. All work must be over."""
        self._work.put(None)
        if self._thread is not None and self._last is not None and self._last.ended.is_set():
            self._thread.join()

    def _go(self) -> None:
        while (run := self._work.get()) is not None:
            try:
                run.work()
            finally:
                self.beat("beginning")
                run.ended.set()
                run.over.set()

    def _watch(self, run: Run) -> None:
        while not run.over.wait(max(0.0, (beat := self._beat).remaining_seconds)):
            if self._beat is beat and beat.remaining_seconds <= 0:
                run.give_up(self._described())
                run.over.set()

    def _described(self) -> str:
        beat = self._beat
        return f"{beat.doing} has not got on for {time.monotonic() - beat.since:.3g} s"


def within(seconds: float, act: Callable[[], None]) -> bool:
    """Do something that may hang; whether it was done in time. What it raises is logged."""

    def quietly() -> None:
        try:
            act()
        except Exception:
            _logger.exception("while cleaning up after a save that hangs")

    thread = threading.Thread(target=quietly, name="ckpt-farewell", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
