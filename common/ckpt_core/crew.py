"""A few threads that share a list or a stream of tasks.

Plain threads: an executor accepts no work while the interpreter ends, when a last save and its prune may
still run. From Python 3.12 on no thread can be started then either: the calling thread does the work itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import Generic, Self, TypeVar, final

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)

T = TypeVar("T")
Task = TypeVar("Task")


def cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(
    work: Callable[[Task], None], tasks: Sequence[Task], threads: int, *, name: str = "ckpt-read"
) -> None:
    """Run `work` for every task on several threads, which have ended at the return.

    Tasks are begun in their order, on fewer threads, or the calling one alone, if no more can be started. The
    first error of `work` is raised; tasks not begun by then are dropped.
    """
    left, failures, started = deque(tasks), list[BaseException](), list[threading.Thread]()
    run, count = partial(_run, work, left, failures), min(threads, len(tasks))
    try:
        for number in range(count if count > 1 else 0):
            thread = threading.Thread(target=run, name=f"{name}-{number}")
            try:
                thread.start()
            except RuntimeError:
                break  # the interpreter is ending, or there are too many: the started ones do all tasks
            started.append(thread)
        if not started:
            run()
        for thread in started:
            thread.join()
    finally:
        # After an interruption, too: no thread may write to live memory after the return.
        left.clear()
        for thread in started:
            thread.join()
    if failures:
        raise failures[0]


def _run(work: Callable[[Task], None], left: deque[Task], failures: list[BaseException]) -> None:
    while True:
        try:
            task = left.popleft()
        except IndexError:
            return
        try:
            work(task)
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
            failures.append(error)
            left.clear()


def give_way(nice: int = 10) -> None:
    """Let this thread, and those that it starts, run after others: at least so nice.

    With 10 they have a tenth of a core that others want, with 0 nothing changes. Linux alone has such
    priorities, and derives those of I/O from them; where the system refuses, nothing changes.
    """
    if nice and sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), nice))


def run_with_timeout(seconds: float, act: Callable[[], None]) -> bool:
    """Run an action that may hang; return whether it ended in time. Errors are logged."""

    def quietly() -> None:
        try:
            act()
        except Exception:
            _logger.exception("while cleaning up after storage that hangs")

    thread = threading.Thread(target=quietly, name="ckpt-farewell", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def settle(future: Future[T], outcome: T | BaseException) -> bool:
    """Give a future its value or error; return False if it had an outcome already."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return False
    return True


@final
class Workers(Generic[Task]):
    """Threads that each do a task while the next one is being prepared.

    Where no thread can be started, the calling thread does the tasks. As many wait as there are threads.
    """

    def __init__(self, work: Callable[[Task], None], threads: int, *, name: str) -> None:
        self._work = work
        self._name = name
        self._tasks: Queue[Task | None] = Queue(maxsize=threads)
        self._failures: list[BaseException] = []
        self._count = threads
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait until all tasks are done or one has failed; harmless when repeated."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def take(self, task: Task) -> None:
        """Queue a task; raise the failure of an earlier one."""
        self.raise_first()
        if len(self._threads) < self._count:
            # Daemons: a task that hangs must not keep the process from ending.
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._count = len(self._threads)
            else:
                self._threads.append(thread)
        if self._threads:
            self._tasks.put(task)
        else:
            self._work(task)

    def raise_first(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failures:
            raise self._failures[0]

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if not self._failures:
                    self._work(task)
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
                if not self._failures:  # each keeps what it failed with
                    self._failures.append(error)
            del task  # its memory may be waited for
