"""A few threads that share a list of tasks.

Plain threads: an executor takes no work while the interpreter ends, when a last save and its prune may still
run. From Python 3.12 on no thread can be begun then either: the thread that asks does the work itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

Task = TypeVar("Task")


def run_all(
    work: Callable[[Task], None], tasks: Sequence[Task], threads: int, *, name: str = "ckpt-read"
) -> None:
    """Do `work` for every task, in order of their start; all threads have ended when this returns or raises.

    Args:
        work: called on several threads at once.
        tasks: what it is called with.
        threads: how many at most; fewer, or the calling one alone, if no more can be begun.
        name: of the threads.

    Raises:
        BaseException: the first that `work` raised; tasks that had not begun by then are left undone.
    """
    crew = _Crew(work, tasks)
    count = min(threads, len(tasks))
    if count == 1 or not crew.run_on(count, name):
        crew.run()
    if crew.failures:
        raise crew.failures[0]


@final
class _Crew(Generic[Task]):
    def __init__(self, work: Callable[[Task], None], tasks: Sequence[Task]) -> None:
        self._work = work
        self._tasks = iter(tasks)
        self._guard = threading.Lock()
        self._stopped = False
        self.failures: list[BaseException] = []

    def run_on(self, count: int, name: str) -> bool:
        """Whether it was done; False if not a single thread can be begun."""
        started: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(target=self.run, name=f"{name}-{number}")
                try:
                    thread.start()
                except RuntimeError:
                    break  # the interpreter is ending, or there are too many: those that run do it all
                started.append(thread)
            for thread in started:
                thread.join()
            return bool(started)
        finally:
            # Interrupted: nothing may write to live memory behind our back.
            self._stopped = bool(started)
            for thread in started:
                thread.join()

    def run(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._work(task)
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
                self.failures.append(error)
                self._stopped = True

    def _next(self) -> Task | None:
        with self._guard:
            return None if self._stopped else next(self._tasks, None)
