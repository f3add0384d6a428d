"""The checkpoints that are due for one further tier: running, waiting, overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    report: Callable[[Outcome], None] = lambda _: None


@final
class UploadLine:
    """The line of due checkpoints, first come, first served.

    Concurrency: `next` and `done` on the thread that uploads, or hears of uploads; the others on any.

    Attributes:
        closed: whether it takes no more.

    Args:
        when_busy: what happens to those that wait when another becomes due.
    """

    def __init__(self, when_busy: WhenBusy) -> None:
        self._when_busy = when_busy
        self._waiting: list[DueCheckpoint] = []
        self._running: list[DueCheckpoint] = []
        self._left: list[CheckpointInfo] = []
        self.closed = False
        self._changed = threading.Condition()

    def add(self, due: DueCheckpoint) -> None:
        """Add a checkpoint, unless it is there; in a closed line it is left."""
        with self._changed:
            if self.find(due.info.save_id) is not None:
                return
            if not self.closed:
                self._waiting.append(due)
                self._changed.notify_all()
                return
            self._left.append(due.info)
        due.report(None)  # nobody serves it any more

    def next(self) -> DueCheckpoint | None:
        """Wait for the next checkpoint; None once the line is closed and empty."""
        with self._changed:
            self.await_any()
            self._running = self._waiting[:1]
            del self._waiting[:1]
            self._changed.notify_all()
            return next(iter(self._running), None)

    def await_any(self) -> None:
        """Wait until something is in the line, or it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.closed)

    def find(self, save_id: str) -> DueCheckpoint | None:
        """Return the checkpoint of a save, if it is in the line."""
        with self._changed:
            present = [*self._running, *self._waiting]
            return next((each for each in present if each.info.save_id == save_id), None)

    def done(self, due: DueCheckpoint, *, left: bool = False) -> None:
        """Note that a checkpoint has ended, or was left to the next run."""
        with self._changed:
            if left:
                self._left.append(due.info)
            (self._running if due in self._running else self._waiting).remove(due)
            self._changed.notify_all()

    @property
    def is_waited_for(self) -> bool:
        """Whether another one waits for its turn."""
        return bool(self._waiting)

    @property
    def overtakes(self) -> bool:
        """Whether the running one must give way, if it has not begun."""
        return self._when_busy == "overtake" and bool(self._waiting)

    @property
    def needed(self) -> Sequence[CheckpointInfo]:
        """What runs, and what waits and is not overtaken."""
        with self._changed:
            waiting = self._waiting[-1:] if self._when_busy == "overtake" else self._waiting
            return [each.info for each in (*self._running, *waiting)]

    @property
    def unfinished(self) -> Sequence[CheckpointInfo]:
        """What is needed, or was left to the next run."""
        with self._changed:
            return list({info.save_id: info for info in (*self._left, *self.needed)}.values())

    def wait_for_turn(self, seconds: float) -> None:
        """Block until at most one is in line, where a save must wait for that."""
        if self._when_busy == "wait":
            with self._changed:
                few = lambda: len(self._running) + len(self._waiting) <= 1 or self.closed  # noqa: E731
                self._changed.wait_for(few, seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing runs or waits; False if `seconds` pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._waiting, seconds)

    def close(self) -> None:
        """Take no more checkpoints; those in the line are still served."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
