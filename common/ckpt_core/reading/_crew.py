"""A few threads that share a list of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

Task = TypeVar("Task")


def run_all(work: Callable[[Task], None], tasks: Sequence[Task], threads: int) -> None:
    """Do `work` for every task, in order of their start; all threads have ended when this returns or raises.

    Raises:
        BaseException: the first that `work` raised; tasks that had not begun by then are left undone.
    """
    crew = _Crew(work, tasks)
    count = min(threads, len(tasks))
    if count == 1:
        crew.run()
    else:
        crew.run_on(count)
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

    def run_on(self, count: int) -> None:
        started: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(target=self.run, name=f"ckpt-read-{number}")
                thread.start()
                started.append(thread)
            for thread in started:
                thread.join()
        finally:
            # Interrupted, or no more threads to be had: nothing may write to live memory behind our back.
            self._stopped = True
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
