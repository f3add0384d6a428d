"""Where the pure cadence meets clock and signals: gathers the facts, lets every rank decide the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import final

from ckpt_core.cadence import PREEMPTION, CadenceContext, SavePolicy, decide
from ckpt_core.coordination import Coordinator
from ckpt_core.lifecycle._announcements import Announcements

_MICROSECONDS = 1_000_000
_SAME_SECONDS = 30.0
_SAVE, _STOP = 1, 2


@final
class CadenceKeeper:
    """Remembers what a save policy needs to know. Main thread; `due` is collective if the policy needs it.

    The coordinator's clock and what was announced to any rank are combined first; after that each rank
    evaluates the policy on the same facts, so that no decision has to be sent. Schedulers reach one rank
    after another: what is announced, to save and go on, within 30 s of what has been agreed is the same.

    Args:
        policy: when to save.
        coordinator: the ranks.
        clock: seconds.
        listen: whether signals are heard from now on; else from the first look on, so that none is swallowed
            where nobody ever looks.

    Attributes:
        preempted: whether the training is to stop, as of the last look.
        pending: whether a save for a preemption is still to be made.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        coordinator: Coordinator,
        # Not the time of day, which may be put forward or back in the middle of a run.
        clock: Callable[[], float] = time.monotonic,
        *,
        listen: bool = True,
    ) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._clock = clock
        self._started = clock()
        self._previous_step: int | None = None
        self._last_save_step: int | None = None
        self._last_save_time: float | None = None
        self._timed = True
        self._announcements = self._listening() if listen else None
        self._known = 0
        self._now = self._announced_at = -math.inf
        self.pending = False
        self.preempted = False

    def look(self) -> str | None:
        """Whether a preemption calls for a save or for an end; collective if one may be announced."""
        if self._policy is not None and self._policy.preemptions:
            self._agree()
        return PREEMPTION if self.preempted or self.pending else None

    def due(self, step: int, total_steps: int | None = None) -> str | None:
        """The reason to save this step now, or None."""
        if self._policy is None:
            return None
        if self._policy.needs_agreement:
            self._agree()
        if step == self._last_save_step:
            self.pending = False  # what is asked for is there
        context = CadenceContext(
            step=step,
            now=self._now if self._policy.needs_agreement else self._started,
            started=self._started,
            previous_step=self._previous_step,
            last_save_step=self._last_save_step,
            last_save_time=self._last_save_time,
            total_steps=total_steps,
            signals=frozenset({PREEMPTION}) if self.pending else frozenset(),
        )
        self._previous_step = step
        return decide(self._policy, context)

    def saved(self, step: int) -> None:
        """Note that a step was saved, or resumed from."""
        # If nobody asked at this step what is due, the next look tells the time for all ranks.
        self._timed = step == self._previous_step
        self._last_save_time = self._now if self._timed else None
        self._last_save_step = self._previous_step = step
        self.pending = False  # this was the save that it asked for

    def close(self) -> None:
        """Put signal handlers back and stop looking."""
        if self._announcements is not None:
            self._announcements.close()

    def _listening(self) -> Announcements:
        return Announcements(self._policy.preemptions if self._policy is not None else ())

    def _agree(self) -> None:
        announcements = self._announcements = self._announcements or self._listening()
        self._coordinator.check()  # before anything depends on which rank this is
        own = (self._clock(), self._started) if self._coordinator.is_coordinator else (0.0, 0.0)
        announced, *microseconds = self._coordinator.all_reduce_max(
            [self._announced(announcements), *(round(each * _MICROSECONDS) for each in own)],
            what="deciding whether to save",
        )
        self._now, self._started = (each / _MICROSECONDS for each in microseconds)
        if not self._timed:
            self._last_save_time, self._timed = self._now, True
        if not announced or self.preempted:
            return
        self._known, self._announced_at = announcements.count, self._now
        self.preempted = announced == _STOP
        self.pending = True

    def _announced(self, announcements: Announcements) -> int:
        if announcements.stop:
            return _STOP
        if 0 <= self._now - self._announced_at < _SAME_SECONDS:
            self._known = announcements.count
        return _SAVE if announcements.count > self._known else 0
