"""Questions to a store that may never answer, asked on a thread of their own.

A TCPStore whose server stands still, stopped or cut off, lets its clients wait without end: its time-out
covers only keys that are not there yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, cast, final

from ckpt_core.errors import DeadlineError

T = TypeVar("T")


@final
class Line:
    """Asks one question at a time, for one thread; while one is not answered, there is no other."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._pending: Future[Any] | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], deadline: float) -> T:
        """What the question gave, or raised.

        Args:
            question: asks the store.
            deadline: until when to wait for its answer, on the monotonic clock.

        Raises:
            DeadlineError: there was no answer by then, or there still is none to a question before.
        """
        if self._pending is None or self._pending.done():
            self._pending, self._began = self._put(question), time.monotonic()
            futures.wait((self._pending,), max(0.0, deadline - self._began))
            if self._pending.done():
                return cast("T", self._pending.result())
        raise DeadlineError(
            f"the job's store has not answered for {time.monotonic() - self._began:.3g} s: the process that "
            "serves it (rank 0 or the launcher) stands still, or cannot be reached"
        )

    def _put(self, question: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            # A daemon: what never answers must not keep the process from ending.
            self._thread = threading.Thread(target=self._answer, name="ckpt-store", daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer

    def _answer(self) -> None:
        while True:
            question, answer = self._questions.get()
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
                answer.set_exception(error)
            del question, answer
