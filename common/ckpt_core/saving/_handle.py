"""What the caller of a save holds while the save goes on."""

from __future__ import annotations

import os
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar, final

from ckpt_core.coordination import require_same_process
from ckpt_core.types import CheckpointInfo

T = TypeVar("T")


@final
class SaveHandle:
    """A save in flight.

    Attributes:
        step: the step saved.
        name: directory name of the checkpoint under its root.
        created: when it was agreed on, Unix seconds on the coordinator's clock.
        staged: resolves when training may change the state.
        committed: resolves when the checkpoint exists, or raises the `SaveError` that every rank gets.
        uploaded: resolves when the checkpoint is in its last tier; with a single tier, on commit.

    Concurrency: futures may be waited for on any thread of any rank; nothing here is collective.
    """

    def __init__(self, step: int, name: str, created: float) -> None:
        self.step = step
        self.name = name
        self.created = created
        self._pid = os.getpid()
        self.staged: Future[None] = Future()
        self.committed: Future[CheckpointInfo] = Future()
        self.uploaded: Future[CheckpointInfo] = self.committed
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # nobody who merely waits can cancel a save

    def done(self) -> bool:
        """Whether the save has ended, one way or the other."""
        return self.committed.done()

    def result(self, timeout_seconds: float | None = None) -> CheckpointInfo:
        """Wait for the commit.

        Raises:
            ConfigError: this process was forked from the one that saves.
            SaveError: the save failed on some rank.
            TimeoutError: it has not ended in time.
        """
        require_same_process(self._pid)
        return self.committed.result(timeout_seconds)


def fulfil(future: Future[T], value: T) -> bool:
    """Give a future its value, unless it has an outcome already; whether it is this one."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return False
    return True


def reject(future: Future[T], error: BaseException) -> bool:
    """Give a future its error, unless it has an outcome already; whether it is this one."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True
