"""The meter of a running job: what saves cost, from its decisions and calls."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

from ckpt_core.coordination import Coordinator
from ckpt_core.policies import SaveCosts
from ckpt_core.saving import SaveHandle, Saver
from ckpt_core.telemetry import SAVE_COST, Telemetry
from ckpt_core.types import CheckpointInfo

_Lap: TypeAlias = tuple[float, int]
"""Seconds from one decision to the next, and the steps taken in them."""

_MOST_LAPS: Final = 4096
"""Laps with one save in flight that are looked at; a save that hangs must not fill the memory."""

_MOST_REFERENCES: Final = 256
_FEWEST_REFERENCES: Final = 8
_PAUSE: Final = 5.0
_PAUSE_SECONDS: Final = 0.02
_ENOUGH: Final = 5

_LAST_SAVES: Final = 16
_MOST_LATE: Final = 8
"""An upload that takes longer than so many more saves is not waited for."""


@final
@dataclass(kw_only=True, slots=True, eq=False)
class MeasuredSave:
    """The costs of one save, and what they are computed from.

    Attributes:
        handle: set by the caller; None if the save did not start.
        skipped: set by the caller if back-pressure left it out.
        waited: seconds for which optimizer steps have waited for its copies.
        slowdown: further seconds of training, `waited` included; None until it is known.
        before: laps without a save in flight before it; the last of them are not older than the last save
            if `fresh`.
        busy: laps that began while it was in flight, less the waits.
        after: laps that began after it.
    """

    step: int
    name: str
    reason: str
    began: float
    time: float
    handle: SaveHandle | None = None
    skipped: bool = False
    stall: float = 0.0
    waited: float = 0.0
    slowdown: float | None = None
    durable: float | None = None
    uploaded: float | None = None
    before: Sequence[_Lap] = ()
    fresh: bool = True
    busy: list[_Lap] = field(default_factory=list[_Lap])
    after: list[_Lap] = field(default_factory=list[_Lap])

    @property
    def outcome(self) -> Literal["committed", "failed", "skipped"]:
        """What has become of it, once it has ended."""
        if self.handle is None:
            return "skipped" if self.skipped else "failed"
        return "committed" if Future.exception(self.handle.committed) is None else "failed"

    @property
    def in_flight(self) -> bool:
        """Whether it is not durable in the root yet."""
        return self.handle is not None and not self.handle.committed.done()

    @property
    def done(self) -> bool:
        """Whether nothing of it is still to be committed or uploaded."""
        return self.handle is None or (self.handle.committed.done() and self.handle.uploaded.done())


@final
class CostMeter:
    """The costs of this run's saves, measured on this rank.

    The training's own calls are the clock: from one decision (`step`) to the next is a lap, less the time
    in `save`. Laps that begin while a save is being written, pruned after, or uploaded are compared with
    laps before and after them, see `_slowdown`. Where a training never decides, the steps of its first
    optimizer take the place of decisions, from the first save on. The coordinator reports each save to
    telemetry, once, as `save.cost`.

    Concurrency: the main thread; the futures of saves bring their times on any thread.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        coordinator: Coordinator,
        work: Saver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry = telemetry
        self._coordinator = coordinator
        self._work = work
        self._clock = clock
        self._started = clock()
        self._since: float | None = None
        self._step: int | None = None
        self._hook: Any = None
        self._idle: deque[_Lap] = deque(maxlen=_MOST_REFERENCES)
        self._idle_laps = 0
        self._waited = 0.0
        self._open: MeasuredSave | None = None  # the newest save, until its slowdown is known
        self._newest: MeasuredSave | None = None
        self._busy = False
        self._lost = 0.0  # seconds of training time that all saves have cost, as far as known
        self._uncounted: list[MeasuredSave] = []
        self._unreported: deque[MeasuredSave] = deque()
        self._last: deque[MeasuredSave] = deque(maxlen=_LAST_SAVES)
        self._saves = 0
        self._shares: deque[float] = deque(maxlen=_LAST_SAVES)
        self.costs: SaveCosts | None = None

    def step(self, step: int) -> None:
        """Note a decision: the steps up to this one are done."""
        now, since, last = self._clock(), self._since, self._step
        self._since, self._step = now, step
        if last is None:
            self._unhook()
        elif since is not None and step > last:  # else it is decided again, or has gone back
            self._lap(now - since, step - last)
        else:
            self._look()
        self._report()

    def decided(self) -> None:
        """Note that the decision is made: the time since `step` is lost, too."""
        if self._since is not None:
            self._lost += self._clock() - self._since

    def pause(self) -> None:
        """Leave out the present lap: the training does something else."""
        self._since = None

    @contextmanager
    def save(self, step: int, name: str, annotations: Mapping[str, Any]) -> Generator[MeasuredSave]:
        """Measure a call of save; its handle is set within the block."""
        began = self._clock()
        reason = str(annotations.get("reason", ""))
        save = MeasuredSave(step=step, name=name, reason=reason, began=began, time=time.time())
        try:
            yield save
        finally:
            save.stall = self._lose(began)
            newest = self._newest
            if newest is not None and save.handle is not None and save.handle is newest.handle:
                newest.stall += save.stall  # asked for twice
            else:
                self._unreported.append(save)
                if save.handle is None:  # the save in flight, for which it was left out, goes on
                    save.slowdown = 0.0
                else:
                    self._follow(save, save.handle)
            self._sum_up()

    @contextmanager
    def wait(self) -> Generator[None]:
        """Count the block as stall of the newest save, for which the caller waits."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._lose(began)
            if self._newest is not None:
                self._newest.stall += seconds
            self._sum_up()

    @property
    def in_flight(self) -> bool:
        """Whether the newest save is not durable in the root yet."""
        return self._newest is not None and self._newest.in_flight

    def close(self) -> None:
        """Report what is not reported yet, when all saves and uploads have ended."""
        self._unhook()
        self._settle()
        self._report(closing=True)

    def _lose(self, began: float) -> float:
        """Count the time since `began` as lost; the next lap begins now."""
        self._since = now = self._clock()
        self._lost += now - began
        return now - began

    def _follow(self, save: MeasuredSave, handle: SaveHandle) -> None:
        """Measure what the save costs from now on."""
        self._uncounted.append(save)
        self._settle()
        save.before, save.fresh, self._idle_laps = tuple(self._idle), self._idle_laps > 0, 0
        save.name = handle.name

        def durable(future: Future[CheckpointInfo]) -> None:
            if Future.exception(future) is None:  # looked at without taking it from the user
                save.durable = self._clock() - save.began

        def uploaded(future: Future[CheckpointInfo | None]) -> None:
            if future.exception() is None and future.result() is not None:
                save.uploaded = self._clock() - save.began

        handle.committed.add_done_callback(durable)
        if handle.uploaded is not handle.committed:
            handle.uploaded.add_done_callback(uploaded)
        self._open = self._newest = save
        self._busy, self._waited = True, self._work.waited_seconds
        if self._step is None and self._hook is None and self._work.optimizers:
            self._hook = self._work.optimizers[0].register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        """Note a step of the first optimizer, where nobody asks whether to save."""
        now, since = self._clock(), self._since
        self._since = now
        if since is not None:
            self._lap(now - since, 1)
        self._report()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _lap(self, seconds: float, steps: int) -> None:
        save = self._open
        if save is not None and self._busy:
            waited = self._work.waited_seconds - self._waited
            self._waited += waited
            save.waited += waited
            if len(save.busy) < _MOST_LAPS:
                save.busy.append((seconds - waited, steps))
            self._look()
            return
        self._idle.append((seconds, steps))
        self._idle_laps += 1
        if save is not None:
            save.after.append((seconds, steps))
            if len(save.after) >= _references_for(len(save.busy)):
                self._settle()

    def _look(self) -> None:
        """See whether the save whose slowdown is being measured is still in flight."""
        if self._busy and self._open is not None:
            self._busy = not (self._open.done and self._work.idle)

    def _settle(self) -> None:
        """Conclude the slowdown of the newest save: another begins, or enough is known."""
        save, self._open = self._open, None
        if save is None:
            return
        found = _slowdown(save.busy, save.before, save.after) if save.fresh or save.after else None
        seconds = sum(each for each, _ in save.busy)
        usual = statistics.median(self._shares) if self._shares else 0.0
        save.slowdown = save.waited + (usual * seconds if found is None else found)
        if found is not None and seconds:
            self._shares.append(found / seconds)
        save.busy, save.before = [], ()
        self._lost += save.slowdown
        self._sum_up()

    def _sum_up(self) -> None:
        """Bring `costs` up to date; one in flight will cost as much as is usual."""
        for save in [each for each in self._uncounted if each.slowdown is not None and not each.in_flight]:
            self._uncounted.remove(save)
            if save.durable is not None:
                self._last.append(save)
                self._saves += 1
        if not self._last:
            return
        slowdown = max(0.0, _median(save.slowdown for save in self._last) or 0.0)
        self.costs = SaveCosts(
            stall=_median(save.stall for save in self._last) or 0.0,
            slowdown=slowdown,
            durable=_median(save.durable for save in self._last) or 0.0,
            uploaded=_median(save.uploaded for save in self._last),
            saves=self._saves,
            lost=max(0.0, self._lost + (0.0 if self._open is None else slowdown)),
            step=_typical(self._idle) if self._idle else 0.0,
        )

    def _report(self, *, closing: bool = False) -> None:
        """Report each save once, in order, when everything about it is known."""
        while self._unreported:
            save = self._unreported[0]
            late = closing or len(self._unreported) > _MOST_LATE
            if save.slowdown is None or save.in_flight or not (late or save.done):
                return
            self._unreported.popleft()
            self._sum_up()
            if not self._coordinator.is_coordinator:
                continue
            seconds, outcome = self._clock() - self._started, save.outcome
            committed = save.handle if outcome == "committed" else None
            self._telemetry.point(
                SAVE_COST,
                overhead=max(0.0, self._lost) / seconds if seconds else 0.0,
                step=save.step,
                name=save.name,
                reason=save.reason,
                stall_seconds=save.stall,
                slowdown_seconds=save.slowdown,
                durable_seconds=save.durable,
                uploaded_seconds=save.uploaded,
                size_bytes=None if committed is None else committed.committed.result().size_bytes,
                outcome=outcome,
                began=save.time,
            )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _references_for(busy: int) -> int:
    """Return how many laps to compare with on each side of `busy` laps."""
    return max(_FEWEST_REFERENCES, min(busy, _MOST_REFERENCES))


def _slowdown(busy: Sequence[_Lap], before: Sequence[_Lap], after: Sequence[_Lap]) -> float | None:
    """Return the seconds that a save in flight has cost its steps; None if unknown.

    Means are compared, not medians: whatever makes single steps slow now and then is then on both sides, and
    the sums over many saves are right. Pauses are left out on both sides: laps of more than five times the
    median. As many laps count before as after, so that steps that become slower or faster do not matter.
    """
    idle = [*before[-max(_FEWEST_REFERENCES, len(after)) :], *after] if after else before
    idle = idle[-2 * _references_for(len(busy)) :]
    if not busy or not idle:
        return None
    usual = _typical(idle)
    # Where all laps with the save in flight are that slow, none of them is a pause.
    most = max(usual, _typical(busy) if len(busy) >= _ENOUGH else 0.0)
    limit = max(_PAUSE * most, usual + _PAUSE_SECONDS)
    kept = [lap for lap in idle if lap[0] <= limit * lap[1]]
    step = sum(seconds for seconds, _ in kept) / sum(steps for _, steps in kept)
    return sum(seconds - steps * step for seconds, steps in busy if seconds <= limit * steps)


def _typical(laps: Sequence[_Lap]) -> float:
    """Return the median seconds of a step."""
    return statistics.median(seconds / steps for seconds, steps in laps)
