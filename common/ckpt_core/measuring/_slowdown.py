"""How much longer steps take while a save is in flight; without a clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, TypeAlias

Lap: TypeAlias = tuple[float, int]
"""Seconds from one decision to the next, and the steps taken in them."""

MOST_LAPS: Final = 4096
"""Laps with one save in flight that are looked at; a save that hangs must not fill the memory."""

MOST_REFERENCES: Final = 256
_FEWEST_REFERENCES: Final = 8
_PAUSE: Final = 5.0
_PAUSE_SECONDS: Final = 0.02
_ENOUGH: Final = 5


def references_for(busy: int) -> int:
    """Return how many laps to compare with on each side of `busy` laps."""
    return max(_FEWEST_REFERENCES, min(busy, MOST_REFERENCES))


def slowdown(busy: Sequence[Lap], before: Sequence[Lap], after: Sequence[Lap]) -> float | None:
    """Return the seconds that a save in flight has cost its steps; None if unknown.

    Means are compared, not medians: whatever makes single steps slow now and then is then on both sides, and
    the sums over many saves are right. Pauses are left out on both sides: laps of more than five times the
    median. As many laps count before as after, so that steps that become slower or faster do not matter.

    Args:
        busy: laps that began with the save in flight.
        before: laps that ended before it, the last at the end.
        after: laps that began after it.
    """
    idle = [*before[-max(_FEWEST_REFERENCES, len(after)) :], *after] if after else before
    idle = idle[-2 * references_for(len(busy)) :]
    if not busy or not idle:
        return None
    usual = typical(idle)
    # Where all laps with the save in flight are that slow, none of them is a pause.
    most = max(usual, typical(busy) if len(busy) >= _ENOUGH else 0.0)
    limit = max(_PAUSE * most, usual + _PAUSE_SECONDS)
    step = _mean([lap for lap in idle if lap[0] <= limit * lap[1]])
    return sum(seconds - steps * step for seconds, steps in busy if seconds <= limit * steps)


def typical(laps: Sequence[Lap]) -> float:
    """Return the median seconds of a step."""
    return statistics.median(seconds / steps for seconds, steps in laps)


def _mean(laps: Sequence[Lap]) -> float:
    return sum(seconds for seconds, _ in laps) / sum(steps for _, steps in laps)
