"""Questions to storage that may not answer, which nobody has to wait for."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, Generic, TypeVar, final

from ckpt_core.disclosure import logger_of

T = TypeVar("T")

_logger = logger_of(__name__)

_SAID_AFTER: Final = 5.0


@final
class Asked(Generic[T]):
    """A question that was put to a tier.

    Attributes:
        answer: of the tier, to be.
        at: monotonic seconds.
    """

    def __init__(self) -> None:
        self.answer: Future[T] = Future()
        self.at = time.monotonic()

    def result(self, label: str, seconds: float) -> T:
        """Return the answer; say after a while what is waited for.

        Args:
            label: of the tier, for messages.
            seconds: the longest wait, from when it was asked.

        Raises:
            TimeoutError: there is none.
            BaseException: what the question raised.
        """
        soon = min(_SAID_AFTER, seconds)
        self._wait(soon)
        if not self.answer.done() and self._left(seconds):
            _logger.warning(
                "%s has not answered for %g s. It may hold the newest checkpoint, so it is waited for, "
                "%g s in all. To go on without it, stop, and load a checkpoint of another tier by its step "
                "or path",
                label,
                soon,
                seconds,
            )
            self._wait(seconds)
        if not self.answer.done():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer to a listing within {seconds:g} s", label)
        return self.answer.result()

    def _left(self, seconds: float) -> float:
        return max(0.0, self.at + seconds - time.monotonic())

    def _wait(self, seconds: float) -> None:
        wait([self.answer], self._left(seconds))


def ask(question: Callable[[], T]) -> Asked[T]:
    """Call a function on a thread of its own."""
    asked = Asked[T]()

    def run() -> None:
        try:
            asked.answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that awaits the answer
            asked.answer.set_exception(error)

    # A daemon: the process must be able to end while storage hangs.
    thread = threading.Thread(target=run, name="ckpt-tier", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        run()
    return asked
