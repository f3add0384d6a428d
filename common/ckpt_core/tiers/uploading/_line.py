"""The checkpoints that are due for one further tier: running, waiting, overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, final

from ckpt_core.errors import UploadError
from ckpt_core.options import WhenBusy
from ckpt_core.types import CheckpointInfo

Outcome: TypeAlias = CheckpointInfo | UploadError | None
"""A checkpoint that is in the tier; why it is not; or None if it was overtaken, or left."""


@final
@dataclass(frozen=True, eq=False, slots=True)
class DueCheckpoint:
    """A checkpoint that is due for a tier.

    Attributes:
        info: of the checkpoint, in the root.
        report: called with the outcome, perhaps with an error first.
    """

    info: CheckpointInfo
    report: Callable[[Outcome], None] = field(default=lambda _: None)


@final
class UploadLine:
    """The line of due checkpoints, first come, first served.

    Concurrency: `next` and `done` on the thread that uploads, or hears of uploads; the others on any.

    Args:
        when_busy: what happens to those that wait when another becomes due.
    """

    def __init__(self, when_busy: WhenBusy) -> None:
        self._when_busy = when_busy
        self._waiting: list[DueCheckpoint] = []
        self._running: DueCheckpoint | None = None
        self._left: list[CheckpointInfo] = []
        self._closed = False
        self._changed = threading.Condition()

    def add(self, due: DueCheckpoint) -> None:
        """Add a checkpoint, unless it is there; in a closed line it is left."""
        with self._changed:
            if any(each.info.save_id == due.info.save_id for each in self._present()):
                return
            if not self._closed:
                self._waiting.append(due)
                self._changed.notify_all()
                return
            self._left.append(due.info)
        due.report(None)  # nobody serves it any more

    def next(self) -> DueCheckpoint | None:
        """Wait for the next checkpoint; None once the line is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._running = self._waiting.pop(0) if self._waiting else None
            self._changed.notify_all()
            return self._running

    def await_any(self) -> None:
        """Wait until something is in the line, or it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)

    def find(self, save_id: str) -> DueCheckpoint | None:
        """Return the checkpoint of a save, if it is in the line."""
        with self._changed:
            return next((each for each in self._present() if each.info.save_id == save_id), None)

    def done(self, due: DueCheckpoint, *, left: bool = False) -> None:
        """Note that a checkpoint has ended, or was left to the next run."""
        with self._changed:
            if left:
                self._left.append(due.info)
            if due is self._running:
                self._running = None
            else:
                self._waiting.remove(due)
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    @property
    def is_waited_for(self) -> bool:
        """Whether another one waits for its turn."""
        return bool(self._waiting)

    @property
    def overtakes(self) -> bool:
        """Whether the running one must give way, if it has not begun."""
        return self._when_busy == "overtake" and bool(self._waiting)

    @property
    def held(self) -> Collection[str]:
        """The names of checkpoints that are still needed in the root."""
        with self._changed:
            return {info.name for info in self._needed()}

    @property
    def unfinished(self) -> list[CheckpointInfo]:
        """The checkpoints that run, wait, or were left to the next run."""
        with self._changed:
            return list({info.save_id: info for info in (*self._left, *self._needed())}.values())

    def wait_for_turn(self, seconds: float) -> None:
        """Block until at most one is in line, where a save must wait for that."""
        if self._when_busy == "wait":
            with self._changed:
                self._changed.wait_for(lambda: len(self._present()) <= 1 or self._closed, seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing runs or waits; False if `seconds` pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._present(), seconds)

    def close(self) -> None:
        """Take no more checkpoints; those in the line are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _present(self) -> list[DueCheckpoint]:
        return [*filter(None, (self._running,)), *self._waiting]

    def _needed(self) -> list[CheckpointInfo]:
        """Return what runs, and what waits and is not overtaken."""
        waiting = self._waiting[-1:] if self._when_busy == "overtake" else self._waiting
        return [each.info for each in (*filter(None, (self._running,)), *waiting)]


class AllTiers:
    """The outcome of one save in all tiers that it is due for."""

    def __init__(self, future: Future[CheckpointInfo | None], tiers: int) -> None:
        self._future = future
        self._awaited = tiers
        self._guard = threading.Lock()
        self._there: CheckpointInfo | None = None
        self._missing = False

    def report(self, outcome: Outcome) -> None:
        """Note the outcome in one tier; the last, or the first error, resolves the future."""
        with self._guard:
            self._awaited -= 1
            if isinstance(outcome, UploadError):
                settle(self._future, outcome)
                return
            self._missing |= outcome is None
            self._there = self._there or outcome
            if self._awaited <= 0:
                settle(self._future, None if self._missing else self._there)


def settle(future: Future[CheckpointInfo | None], outcome: CheckpointInfo | BaseException | None) -> None:
    """Resolve a future, unless it is resolved."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
