"""The interval between saves that loses the least time.

`docs/cadence.md` derives it.
"""

from __future__ import annotations

import math
from typing import Final

_ITERATIONS: Final = 64
"""More than Newton's method needs for any ratio of cost to time between failures."""


def optimal_interval(*, cost: float, durable: float, mtbf: float) -> float:
    """Return the seconds from one save to the next that lose the least time.

    It maximises `(interval - cost) / (exp(interval / mtbf) - 1)`, without any series. Neither the time until
    a save is durable nor that of a restart moves the maximum, as failures are memoryless; but no save begins
    before the last one is durable.

    Args:
        cost: seconds of training time that one save costs: its stall, and slower steps while it is in flight.
        durable: seconds from the start of a save until a failure can no longer take it.
        mtbf: mean seconds between failures.
    """
    ratio = cost / mtbf
    # x + exp(-x) - 1 = ratio is convex, and this start lies above its root: steps only go down.
    x = ratio + math.sqrt(2 * ratio)
    for _ in range(_ITERATIONS):
        slope = -math.expm1(-x)
        step = (x - slope - ratio) / slope if slope else 0.0
        x -= step
        if abs(step) <= 1e-12 * x:
            break
    return max(x * mtbf, durable)


def expected_overhead(
    interval: float, *, cost: float, durable: float, mtbf: float, restart: float = 0.0
) -> float:
    """Return the fraction of all time lost to saves, failures and restarts.

    Goodput is 1 minus it. Failures are exponential and may strike during a restart, too. Where a save blocks
    until it is durable, this is the complete model of Daly 2006.

    Args:
        interval: seconds from the start of one save to that of the next; below `durable` it counts as that.
        cost: see `optimal_interval`.
        durable: see `optimal_interval`.
        mtbf: mean seconds between failures.
        restart: seconds from a failure until training continues.
    """
    interval = max(interval, durable)
    if interval <= cost:
        return 1.0
    # With the longest argument first, no exponential overflows.
    kept = (interval - cost) / mtbf * math.exp(-(interval + durable - cost + restart) / mtbf)
    return 1 - kept / -math.expm1(-interval / mtbf)
