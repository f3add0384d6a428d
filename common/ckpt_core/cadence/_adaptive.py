"""Save policies that follow what saves cost, as measured on the running job.

`docs/when-to-save.md` derives the interval that loses the least time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, cast, final, get_args

from ckpt_core.policies import CadenceContext, ChosenInterval, FailureRate, SaveCosts, SavePolicy
from ckpt_core.validation import duration, one_of, positive, require, seconds_of

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


SurvivingTier = Literal["root", "upload"]

_FIRST_SECONDS: Final = 60.0
_UNKNOWN_SECONDS: Final = 1800.0
_LONGEST_WAIT: Final = 2.0
"""How many times as far apart as its fraction allows `MaxOverhead` saves where too much is lost already."""
_MOST_CATCHING_UP: Final = 1.5
"""How much denser than its fraction `MaxOverhead` may save after a time in which it could not."""


@final
@dataclass(frozen=True, slots=True)
class Optimal(SavePolicy):
    """Saves at the interval that loses the least time to saves and failures.

    `docs/when-to-save.md` derives it. Until one save is measured and the rate of failures known, each wait is
    as long as the run before it, at least 60 s and at most 30 min. The second save comes after half the
    interval, as the first one of a run costs more than those after it.

    Args:
        mtbf: mean time between failures of the whole job, in seconds or as "6h"; None to learn it.
        min_seconds: the shortest interval, in seconds or as "5m".
        max_seconds: the longest one; None for no bound.
        tier: what a failure leaves behind: the `root`, or only the first `upload` tier, which must be given.
    """

    mtbf: float | str | None = None
    min_seconds: float | str = field(default=0.0, kw_only=True)
    max_seconds: float | str | None = field(default=None, kw_only=True)
    tier: SurvivingTier = field(default="root", kw_only=True)

    def __post_init__(self) -> None:
        require(
            "Optimal",
            None if self.mtbf is None else duration("mtbf", self.mtbf),
            duration("min_seconds", self.min_seconds, minimum=0),
            None if self.max_seconds is None else duration("max_seconds", self.max_seconds),
            one_of("tier", self.tier, get_args(SurvivingTier)),
        )
        for name in ("mtbf", "min_seconds", "max_seconds"):  # "6h" and 21600 make equal policies
            object.__setattr__(self, name, seconds_of(getattr(self, name)))
        least, most = self._bounds
        if most is not None and most < least:
            require("Optimal", f"max_seconds must be at least min_seconds, {least:g}, not {most:g}")

    def decide(self, context: CadenceContext) -> str | None:
        since = _since(context)
        least, most = self._bounds
        if context.in_flight or since < least:
            return None
        costs, rate = context.costs, self._rate(context)
        if costs is None or rate is None:
            wait = _bounded(_unknown(context), least, most)
            return (
                f"optimal: {_text(since)} since the last save, {_missing(costs)}" if since >= wait else None
            )
        optimum = _optimum(costs.stall + costs.slowdown, self._durable(costs), rate.mtbf)
        wait = _bounded(optimum / 2 if costs.saves == 1 else optimum, least, most)
        return self._reason(since, optimum, costs, rate) if since >= wait else None

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        costs, rate = context.costs, self._rate(context)
        if costs is None or rate is None:
            return None
        optimum = _optimum(costs.stall + costs.slowdown, self._durable(costs), rate.mtbf)
        return ChosenInterval(_bounded(optimum, *self._bounds), rate)

    @property
    def needs_costs(self) -> bool:
        return True

    @property
    def needs_failures(self) -> bool:
        return self.mtbf is None

    @property
    def needs_upload(self) -> bool:
        return self.tier == "upload"

    @property
    def _bounds(self) -> tuple[float, float | None]:
        return cast("float", self.min_seconds), cast("float | None", self.max_seconds)

    def _rate(self, context: CadenceContext) -> FailureRate | None:
        given = cast("float | None", self.mtbf)
        return context.failures if given is None else FailureRate(given, "given")

    def _durable(self, costs: SaveCosts) -> float:
        return costs.durable if self.tier == "root" or costs.uploaded is None else costs.uploaded

    def _reason(self, since: float, optimum: float, costs: SaveCosts, rate: FailureRate) -> str:
        where = "durable" if self._durable(costs) == costs.durable else "uploaded"
        known = f", mtbf {_text(rate.mtbf)} {rate.source}"
        least, most = self._bounds
        bounds = f"at least {_text(least)}" if most is None else f"{_text(least)} to {_text(most)}"
        bounds = "" if _bounded(optimum, least, most) == optimum else f" bounded to {bounds}"
        return (
            f"optimal: {_text(since)} since the last save, optimum {_text(optimum)}{bounds} (one save costs "
            f"{_text(costs.stall + costs.slowdown)}, is {where} after {_text(self._durable(costs))}{known})"
        )


@final
@dataclass(frozen=True, slots=True)
class MaxOverhead(SavePolicy):
    """Saves as often as this fraction of training time allows.

    All saves and decisions of the run and the next save together stay within the fraction of the time since
    its start. Time saved up earlier is spent at no more than 1.5 times the fraction; where more was lost than
    is allowed, saves are twice as far apart as they would be. The first save, which measures, is made as by
    `Optimal`.
    """

    fraction: float

    def __post_init__(self) -> None:
        problem = positive("fraction", self.fraction)
        if problem is None and self.fraction >= 1:
            problem = f"fraction must be below 1, 0.01 for 1 %, not {self.fraction!r}"
        require("MaxOverhead", problem)

    def decide(self, context: CadenceContext) -> str | None:
        if context.in_flight:
            return None
        since, costs = _since(context), context.costs
        if costs is None:
            late = since >= _unknown(context)
            return f"overhead: {_text(since)} since the last save, {_missing(costs)}" if late else None
        cost, elapsed = costs.stall + costs.slowdown, context.now - context.started
        # Holds also where the cost of the last save is not yet part of `lost`.
        too_soon = since * self.fraction * _MOST_CATCHING_UP < cost
        # Where decisions alone, or a first save, have cost too much, saves go on: a job needs checkpoints.
        in_debt = costs.lost + cost > self.fraction * elapsed and since * self.fraction < _LONGEST_WAIT * cost
        if too_soon or in_debt:
            return None
        allowed = f"{100 * self.fraction:.3g} % allowed"
        return (
            f"overhead: {_text(since)} since the last save, {allowed} (one save costs {_text(cost)}, "
            f"all so far {_text(costs.lost)} of {_text(elapsed)})"
        )

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        costs = context.costs
        return None if costs is None else ChosenInterval((costs.stall + costs.slowdown) / self.fraction)

    @property
    def needs_costs(self) -> bool:
        return True


@final
@dataclass(frozen=True, slots=True)
class Continuous(SavePolicy):
    """Saves again as soon as the last save is durable in the root.

    Args:
        min_seconds: the shortest interval, in seconds or as "5m".
    """

    min_seconds: float | str = 0.0

    def __post_init__(self) -> None:
        require("Continuous", duration("min_seconds", self.min_seconds, minimum=0))
        object.__setattr__(self, "min_seconds", seconds_of(self.min_seconds))

    def decide(self, context: CadenceContext) -> str | None:
        since = _since(context)
        if context.in_flight or since < cast("float", self.min_seconds):
            return None
        return f"continuous: the last save is durable, {_text(since)} after it began"

    @property
    def needs_costs(self) -> bool:
        return True


@lru_cache(maxsize=128)
def _optimum(cost: float, durable: float, mtbf: float) -> float:
    return optimal_interval(cost=cost, durable=durable, mtbf=mtbf)


def _since(context: CadenceContext) -> float:
    start = context.started if context.last_save_time is None else context.last_save_time
    return context.now - start


def _unknown(context: CadenceContext) -> float:
    """Return the wait while nothing is known: as long as the run before it, in bounds."""
    return _bounded(context.now - _since(context) - context.started, _FIRST_SECONDS, _UNKNOWN_SECONDS)


def _bounded(value: float, least: float, most: float | None) -> float:
    value = max(value, least)
    return value if most is None else min(value, most)


def _missing(costs: SaveCosts | None) -> str:
    return "to measure what a save costs" if costs is None else "as the rate of failures is not known yet"


def _text(seconds: float) -> str:
    """Format seconds for a reason: 0.31 s, 412 s, 6 h."""
    for unit, size in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
