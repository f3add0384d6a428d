"""The meter of a running job: what saves cost, from its decisions and calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

from ckpt_core.cadence import SaveCosts
from ckpt_core.coordination import Coordinator
from ckpt_core.measuring._ledger import CostLedger
from ckpt_core.measuring._measured_save import MeasuredSave
from ckpt_core.measuring._slowdown import MOST_REFERENCES, Lap, typical
from ckpt_core.telemetry import Telemetry


class BackgroundWork(Protocol):
    """What the saves of a manager do beside the training: see `Saver`.

    Attributes:
        idle: whether nothing of any save is being done in the root, prunes included.
        waited_seconds: how long optimizer steps have waited for copies, in all.
        optimizers: of the last state saved.
    """

    @property
    def idle(self) -> bool: ...

    @property
    def waited_seconds(self) -> float: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...


@final
class CostMeter:
    """The costs of this run's saves, measured on this rank.

    The training's own calls are the clock: from one decision (`step`) to the next is a lap, less the time in
    `save`. Laps that begin while a save is being written, pruned after, or uploaded are compared with laps
    before and after them, see `slowdown`. Where a training never decides, the steps of its first optimizer
    take the place of decisions, from the first save on.

    Concurrency: the main thread; the futures of saves bring their times on any thread.

    Args:
        telemetry: receives `save.cost` once for each save, from the coordinator.
        coordinator: the ranks.
        work: what the saves do beside the training.
        clock: seconds.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        coordinator: Coordinator,
        work: BackgroundWork,
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
        self._idle: deque[Lap] = deque(maxlen=MOST_REFERENCES)
        self._idle_laps = 0
        self._waited = 0.0
        self._open: MeasuredSave | None = None  # the newest save, until its slowdown is known
        self._newest: MeasuredSave | None = None
        self._busy = False
        self._ledger = CostLedger()
        self._costs: SaveCosts | None = None

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
        if self._ledger.unsettled:
            self._report()

    def decided(self) -> None:
        """Note that the decision is made: the time since `step` is lost, too."""
        if self._since is not None:
            self._ledger.lost += self._clock() - self._since

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
                self._ledger.add(save)
                self._follow(save)
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
        newest = self._newest
        return newest is not None and newest.handle is not None and not newest.handle.committed.done()

    @property
    def costs(self) -> SaveCosts | None:
        """The costs so far; None until one save is committed and its slowdown known."""
        return self._costs

    def close(self) -> None:
        """Report what is not reported yet, when all saves and uploads have ended."""
        self._unhook()
        self._settle()
        self._report(closing=True)

    def _lose(self, began: float) -> float:
        """Count the time since `began` as lost; the next lap begins now."""
        self._since = now = self._clock()
        self._ledger.lost += now - began
        return now - began

    def _follow(self, save: MeasuredSave) -> None:
        """Measure what the save costs from now on."""
        if save.handle is None:
            return  # the save in flight, for which back-pressure left it out, goes on
        self._settle()
        save.before, save.fresh, self._idle_laps = tuple(self._idle), self._idle_laps > 0, 0
        save.follow(save.handle, self._clock)
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
        if self._ledger.unsettled:
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
            save.add_busy(seconds, steps, waited=waited)
            self._look()
            return
        self._idle.append((seconds, steps))
        self._idle_laps += 1
        if save is not None and save.add_after((seconds, steps)):
            self._settle()

    def _look(self) -> None:
        """See whether the save whose slowdown is being measured is still in flight."""
        if self._busy and self._open is not None:
            self._busy = not (self._open.done and self._work.idle)

    def _settle(self) -> None:
        """Conclude the slowdown of the newest save: another begins, or enough is known."""
        if self._open is not None:
            self._ledger.conclude(self._open)
            self._open = None
            self._sum_up()

    def _sum_up(self) -> None:
        step = typical(self._idle) if self._idle else 0.0
        self._costs = self._ledger.summary(expected=self._open is not None, step=step)

    def _report(self, *, closing: bool = False) -> None:
        for save in self._ledger.reportable(closing=closing):
            self._sum_up()
            if self._coordinator.is_coordinator:
                seconds = self._clock() - self._started
                overhead = max(0.0, self._ledger.lost) / seconds if seconds else 0.0
                self._telemetry.point("save.cost", overhead=overhead, **save.known())
