"""The costs of one save, as they become known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final

from ckpt_core.measuring._slowdown import MOST_LAPS, Lap, references_for, slowdown
from ckpt_core.types import CheckpointInfo


class MeteredHandle(Protocol):
    """A save in flight: see `SaveHandle`."""

    name: str
    committed: Future[CheckpointInfo]
    uploaded: Future[CheckpointInfo | None]


@final
@dataclass(kw_only=True, slots=True, eq=False)
class MeasuredSave:
    """The costs of one save, and what they are computed from.

    Attributes:
        step: that it is of.
        name: directory name.
        reason: why it was made; "" if nobody said.
        began: time of the call.
        time: the same as Unix time.
        handle: set by the caller; None if the save did not start.
        skipped: set by the caller if back-pressure left it out.
        stall: seconds for which calls have blocked training.
        waited: seconds for which optimizer steps have waited for its copies.
        slowdown: further seconds of training, `waited` included; None until it is known.
        durable: seconds until the commit.
        uploaded: seconds until every further tier that it was due for had it.
        before: laps without a save in flight before it; the last of them are not older than the last save
            if `fresh`.
    """

    step: int
    name: str
    reason: str
    began: float
    time: float
    handle: MeteredHandle | None = None
    skipped: bool = False
    stall: float = 0.0
    waited: float = 0.0
    slowdown: float | None = None
    durable: float | None = None
    uploaded: float | None = None
    before: Sequence[Lap] = ()
    fresh: bool = True
    after: list[Lap] = field(default_factory=list[Lap])
    _busy: list[Lap] = field(default_factory=list[Lap])

    def follow(self, handle: MeteredHandle, clock: Callable[[], float]) -> None:
        """Note the times at which the save is durable and uploaded."""
        self.name = handle.name

        def durable(future: Future[CheckpointInfo]) -> None:
            if Future.exception(future) is None:  # looked at without taking it from the user
                self.durable = clock() - self.began

        def uploaded(future: Future[CheckpointInfo | None]) -> None:
            if future.exception() is None and future.result() is not None:
                self.uploaded = clock() - self.began

        handle.committed.add_done_callback(durable)
        if handle.uploaded is not handle.committed:
            handle.uploaded.add_done_callback(uploaded)

    def add_busy(self, seconds: float, steps: int, *, waited: float) -> None:
        """Add a lap that began while the save was in flight."""
        self.waited += waited
        if len(self._busy) < MOST_LAPS:
            self._busy.append((seconds - waited, steps))

    def add_after(self, lap: Lap) -> bool:
        """Add a lap that began after it; return whether there are enough."""
        self.after.append(lap)
        return len(self.after) >= references_for(len(self._busy))

    def conclude(self, usual_share: float) -> float | None:
        """Fix the slowdown.

        Args:
            usual_share: of a lap with a save in flight, for saves with nothing to compare with.

        Returns:
            The share of the laps that the save has cost; None if there was nothing to compare with.
        """
        found = slowdown(self._busy, self.before, self.after) if self.fresh or self.after else None
        seconds = sum(each for each, _ in self._busy)
        self.slowdown = self.waited + (usual_share * seconds if found is None else found)
        self._busy, self.before = [], ()
        return None if found is None or not seconds else found / seconds

    def known(self) -> dict[str, Any]:
        """Return what is reported of it."""
        committed = self.handle if self.handle is not None and self.outcome == "committed" else None
        return {
            "step": self.step,
            "name": self.name,
            "reason": self.reason,
            "stall_seconds": self.stall,
            "slowdown_seconds": self.slowdown,
            "durable_seconds": self.durable,
            "uploaded_seconds": self.uploaded,
            "size_bytes": None if committed is None else committed.committed.result().size_bytes,
            "outcome": self.outcome,
            "began": self.time,
        }

    @property
    def outcome(self) -> Literal["committed", "failed", "skipped"]:
        """What has become of it, once it has ended."""
        if self.handle is None:
            return "skipped" if self.skipped else "failed"
        return "committed" if Future.exception(self.handle.committed) is None else "failed"

    @property
    def ended(self) -> bool:
        """Whether its outcome and its slowdown are known."""
        return self.slowdown is not None and (self.handle is None or self.handle.committed.done())

    @property
    def done(self) -> bool:
        """Whether nothing of it is still to be committed or uploaded."""
        return self.handle is None or (self.handle.committed.done() and self.handle.uploaded.done())
