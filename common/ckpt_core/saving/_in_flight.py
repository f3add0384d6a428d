"""Saves in flight: one after another on one watched background thread, their outcomes never lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import SaveError
from ckpt_core.options import CheckpointOptions
from ckpt_core.saving._handle import SaveHandle, reject

_logger = logger_of(__name__)


@final
@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """The last progress of the thread, what it does since, and for how long that may take."""

    doing: str
    limit_seconds: float
    since: float = field(default_factory=time.monotonic)

    @property
    def remaining_seconds(self) -> float:
        return self.since + self.limit_seconds - time.monotonic()


def _log_broken(error: BaseException) -> None:
    _logger.error("a task of the save thread broke", exc_info=error)


@final
class Task:
    """One piece of work for the save thread.

    Args:
        run: the work.
        give_up: called once, on another thread, with the reason if the work hangs.
        fail: called with what `run` raised.

    Attributes:
        over: set when it has ended, or was given up.
        ended: set when it has ended.
    """

    def __init__(
        self,
        run: Callable[[], None],
        give_up: Callable[[str], None],
        fail: Callable[[BaseException], None] = _log_broken,
    ) -> None:
        self.run = run
        self.give_up = give_up
        self.fail = fail
        self.over = threading.Event()
        self.ended = threading.Event()


@final
class SaveThread:
    """Runs one task after another, and notices one that stops making progress.

    Concurrency: `submit`, `stuck` and `close` on the main thread, `heartbeat` on the save thread.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._heartbeat = _Heartbeat("nothing", deadline_seconds)
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def submit(self, task: Task) -> Task:
        """Run `task` after every task submitted before."""
        if self._thread is None:
            # A daemon: the process must be able to end while the thread hangs.
            self._thread = threading.Thread(target=self._loop, name="ckpt-save", daemon=True)
            self._thread.start()
        if self._last is None or self._last.ended.is_set():
            self.heartbeat("beginning")
        self._last = task
        self._tasks.put(task)
        # Not a daemon: a process whose main thread ends waits for its last save, but not for ever.
        threading.Thread(target=self._watch, args=(task,), name="ckpt-save-watch").start()
        return task

    def heartbeat(self, doing: str, limit_seconds: float | None = None) -> None:
        """Record progress.

        Args:
            doing: what the thread does next, in words.
            limit_seconds: how long that may take before it counts as hanging; by default the deadline.
        """
        self._heartbeat = _Heartbeat(doing, self.deadline_seconds if limit_seconds is None else limit_seconds)

    @property
    def waiting(self) -> bool:
        """Whether more tasks wait for the thread."""
        return not self._tasks.empty()

    def until_idle(self) -> None:
        """Block until every task is over: done, or given up. On any thread."""
        if (last := self._last) is not None:
            last.over.wait()

    def stuck(self) -> str:
        """Describe what the thread still hangs in after it was given up; "" if it does not hang."""
        last = self._last
        hangs = last is not None and last.over.is_set() and not last.ended.is_set()
        return self._described() if hangs else ""

    def close(self) -> None:
        """Take no more tasks, end the thread unless it hangs. All tasks must be over."""
        self._tasks.put(None)
        if self._thread is not None and self._last is not None and self._last.ended.is_set():
            self._thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.run()
            except BaseException as error:  # noqa: BLE001 - reported to whoever waits for the task
                task.fail(error)
            finally:
                self.heartbeat("beginning")
                task.ended.set()
                task.over.set()

    def _watch(self, task: Task) -> None:
        while not task.over.wait(max(0.0, (last := self._heartbeat).remaining_seconds)):
            if self._heartbeat is last and last.remaining_seconds <= 0:
                task.give_up(self._described())
                task.over.set()

    def _described(self) -> str:
        last = self._heartbeat
        return f"{last.doing} has made no progress for {time.monotonic() - last.since:.3g} s"


def run_with_timeout(seconds: float, act: Callable[[], None]) -> bool:
    """Run something that may hang; return whether it ended in time. What it raises is logged."""

    def quietly() -> None:
        try:
            act()
        except Exception:
            _logger.exception("while cleaning up after a save that hangs")

    thread = threading.Thread(target=quietly, name="ckpt-farewell", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@final
class InFlightSaves:
    """Back-pressure, and the outcome of every save, delivered exactly once.

    At most `options.arenas` saves are in flight. A save counts until its outcome is delivered, which happens
    at the same calls on every rank. A save without progress for longer than the deadline has failed (see
    `SaveThread`), so nothing here waits for ever.

    Concurrency: all methods on the main thread; `ready` and `overdue` are collective.

    Attributes:
        latest: the last save started, unless it is known to have failed.
    """

    def __init__(self, coordinator: Coordinator, thread: SaveThread, options: CheckpointOptions) -> None:
        self._coordinator = coordinator
        self._thread = thread
        self._options = options
        self._undelivered: deque[SaveHandle] = deque()
        self._task: Task | None = None
        self._pending = self._closed = False
        self.latest: SaveHandle | None = None

    def ready(self) -> bool:
        """Return whether a new save may start; wait for the oldest in flight unless the policy is to skip.

        Raises:
            SaveError: the oldest save has failed, and errors are to be raised.
        """
        if self._options.back_pressure != "wait" and self._full():
            self._pending = self._options.back_pressure == "coalesce"
            return False
        # How many there are is the same on every rank, so that all of them raise at the same call.
        while len(self._undelivered) >= self._options.arenas:
            self._deliver()
        return True

    def overdue(self) -> bool:
        """Return whether a save that back-pressure kept from starting can be made up for now.

        Communicates only while there is one.
        """
        return self._pending and not self._full()

    def start(self, handle: SaveHandle, run: Callable[[], None], give_up: Callable[[str], None]) -> None:
        """Run a save in the background.

        Args:
            handle: of the save.
            run: resolves the handle.
            give_up: resolves it, if it is not yet, when the save hangs; see `Task`.
        """
        if self._closed:
            raise RuntimeError("cannot start a save after shutdown")
        self.latest = handle
        self._undelivered.append(handle)
        self._pending = False
        self._task = self._thread.submit(Task(run, give_up, partial(_fail, handle)))

    def stuck(self) -> str:
        """Describe what a given-up save still hangs in; "" if none does."""
        return self._thread.stuck()

    def wait(self) -> None:
        """Wait for every save in flight and for the prune behind it, and deliver the first failure.

        Raises:
            SaveError: a save failed, and errors are to be raised. If several did, the next call raises the
                next error.
        """
        if self._task is not None:
            self._task.over.wait()
        while self._undelivered:
            self._deliver()

    def settle(self) -> None:
        """Wait for every save in flight, because one follows that must be made; failures are only logged."""
        if self._task is not None:
            self._task.over.wait()
        while self._undelivered:
            try:
                self._deliver()
            except SaveError as error:
                _logger.error("%s", error)  # noqa: TRY400 - the next save makes up for it

    def forget(self) -> None:
        """Forget the last save: after a load, a save of the same name is not the same save again."""
        self.latest = None
        self._pending = False

    def close(self) -> None:
        """Wait for every save in flight and stop the thread; same errors as `wait`, later ones logged."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.close()
            for handle in self._undelivered:
                _log_failure(handle)
            self._undelivered.clear()

    def _full(self) -> bool:
        """Whether every arena is in flight on some rank; ranks finish at different moments."""
        flying = sum(not handle.done() for handle in self._undelivered)
        full = self._coordinator.all_reduce_max(
            [int(flying >= self._options.arenas)], what="deciding whether to save"
        )
        return bool(full[0])

    def _deliver(self) -> None:
        """Wait for the oldest save and raise or log its failure."""
        handle = self._undelivered[0]
        error = handle.committed.exception()
        self._undelivered.popleft()
        if error is None:
            return
        if self.latest is handle:
            self.latest = None  # a save of the same name from now on is another try
        # Only a save that failed may be lived with: that the root belongs to another job may not.
        if self._options.on_error == "raise" or not isinstance(error, SaveError):
            raise error
        _log_failure(handle)


def _fail(handle: SaveHandle, error: BaseException) -> None:
    if not reject(handle.committed, error):
        _logger.error("after the commit of step %d: %s", handle.step, error, exc_info=error)


def _log_failure(handle: SaveHandle) -> None:
    error = handle.committed.exception()
    if error is not None:
        _logger.error("training goes on without the checkpoint of step %d: %s", handle.step, error)
