"""Questions to a torch.distributed Store, each with a deadline."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast, final

from ckpt_core.errors import CoordinationError, DeadlineError

T = TypeVar("T")

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.25
_PAUSE_GROWTH = 1.25
_ANSWER_SECONDS = 5.0
"""Time for an answer of a healthy store on a busy machine."""

_Asked: TypeAlias = tuple[Callable[[], Any], Future[Any]]


@final
class StoreThread:
    """Asks a store one question at a time, on a thread of its own.

    A TCPStore whose server hangs, is stopped or cut off lets its clients wait without end: its own time-out
    covers only keys that are not set yet. So the caller waits for the thread, with a deadline. While a
    question is unanswered, no other can be asked.

    Concurrency: one thread at a time; `close` on any thread when no other asks.
    """

    def __init__(self, store: Any, patience_seconds: float = 1800.0) -> None:
        self._store: Any = store
        self._patience_seconds = patience_seconds
        self._questions: SimpleQueue[_Asked | None] = SimpleQueue()
        self._pending: Future[Any] | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None
        # Also ends the thread of an object that is collected and was never closed.
        self._end = weakref.finalize(self, self._questions.put, None)
        # A save at the end of the process needs the thread for longer than finalizers wait.
        self._end.atexit = False

    def ask(self, question: Callable[[Any], T], deadline: float | None = None) -> T:
        """Return the outcome of a question to the store.

        `deadline` is until when the asker waits for ranks, on the monotonic clock; None for no limit.

        Raises:
            DeadlineError: no answer in time, or still none to the question before.
            CoordinationError: the store is gone, or the connection is closed.
        """
        store, now, patience = self._store, time.monotonic(), self._patience_seconds
        # Enough time for an answer even if the deadline has nearly passed: then it is the ranks who are late.
        latest = now + patience if deadline is None else max(deadline, now + min(_ANSWER_SECONDS, patience))
        if store is None:
            raise CoordinationError("this rank has closed its connection to the job's store")
        if self._pending is None or self._pending.done():
            self._pending, self._began = self._put(partial(question, store)), now
            futures.wait((self._pending,), latest - now)
            if self._pending.done():
                try:
                    return cast("T", self._pending.result())
                except RuntimeError as error:
                    raise CoordinationError(
                        f"the job's store is gone: {error}. The process that serves it (rank 0 or the "
                        "launcher) has died, or its file was removed"
                    ) from error
        raise DeadlineError(
            f"the job's store has not answered for {time.monotonic() - self._began:.3g} s: the process that "
            "serves it (rank 0 or the launcher) hangs, or cannot be reached"
        )

    def has(self, keys: Sequence[str], deadline: float | None = None) -> bool:
        """Return whether all of these keys are set."""
        return self.ask(lambda store: bool(store.check(list(keys))), deadline)

    def wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait for all of these keys; False at `deadline` (monotonic)."""
        # Polls, because a store that waits for us writes a line to stderr whenever its own time-out passes.
        # The longer the wait, the less a moment more matters.
        pause = _SHORTEST_PAUSE
        while not self.has(keys, deadline):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
        return True

    def close(self) -> None:
        """End the thread and drop the store; harmless when repeated.

        A thread that hangs in the store ends when that answers.
        """
        self._store = None
        self._end()
        if self._thread is not None and (self._pending is None or self._pending.done()):
            self._thread.join()
        self._pending = None

    def _put(self, question: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            # A daemon: a store that never answers must not keep the process from ending.
            thread = threading.Thread(target=_answer, args=(self._questions,), name="ckpt-store", daemon=True)
            thread.start()
            self._thread = thread
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer


def _answer(questions: SimpleQueue[_Asked | None]) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
            answer.set_exception(error)
        del asked, question, answer
