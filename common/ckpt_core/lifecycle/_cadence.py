"""Where the pure cadence meets clock and signals: gathers the facts, lets every rank decide the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from ckpt_core.cadence import PREEMPTION, CadenceContext, SavePolicy, decide
from ckpt_core.coordination import Coordinator
from ckpt_core.lifecycle._signals import SignalFlag

_MICROSECONDS = 1_000_000


@final
class CadenceKeeper:
    """Remembers what a save policy needs to know. Main thread; `due` is collective if the policy needs it.

    The coordinator's clock and every rank's signals are combined first; after that each rank evaluates the
    policy on the same facts, so that no decision has to be sent.
    """

    def __init__(
        self, policy: SavePolicy | None, coordinator: Coordinator, clock: Callable[[], float] = time.time
    ) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._clock = clock
        self._started = coordinator.agree(clock())
        self._previous_step: int | None = None
        self._last_save_step: int | None = None
        self._last_save_time: float | None = None
        self._signal = SignalFlag(policy.signal_names if policy is not None else ())
        self._pending_preemption = False
        self.preempted = False

    def due(self, step: int, total_steps: int | None = None) -> str | None:
        """The reason to save this step now, or None."""
        if self._policy is None:
            return None
        now = self._started
        if self._policy.needs_agreement:
            own_time = int(self._clock() * _MICROSECONDS) if self._coordinator.is_coordinator else 0
            preempted, microseconds = self._coordinator.combine(
                [int(bool(self._signal)), own_time], what="deciding whether to save"
            )
            if preempted and not self.preempted:
                self.preempted = self._pending_preemption = True
            now = microseconds / _MICROSECONDS
        context = CadenceContext(
            step=step,
            now=now,
            started=self._started,
            previous_step=self._previous_step,
            last_save_step=self._last_save_step,
            last_save_time=self._last_save_time,
            total_steps=total_steps,
            signals=frozenset({PREEMPTION}) if self._pending_preemption else frozenset(),
        )
        self._previous_step = step
        return decide(self._policy, context)

    def saved(self, step: int, created: float) -> None:
        """Note that a step was saved, or resumed from; `created` must be the same on all ranks."""
        self._last_save_step, self._last_save_time = step, created
        self._previous_step = step
        self._pending_preemption = False  # this was the save that it asked for

    def close(self) -> None:
        """Put signal handlers back."""
        self._signal.close()
