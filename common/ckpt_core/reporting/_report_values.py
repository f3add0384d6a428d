"""What a report knows about a root, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final, final

from ckpt_core.types import CheckpointInfo

_FEW: Final = 2
A_DAY: Final = 86_400.0
"""By which a clock may be ahead of that of the report."""
_EARLIEST: Final = 946_684_800.0  # the year 2000: a clock before that was never set
_LATEST: Final = 7_258_118_400.0  # the year 2200


def clock_of(each: Mapping[str, Any]) -> float | None:
    """Return the time of a record; None if its clock cannot have been right."""
    time = each.get("time")
    return float(time) if isinstance(time, int | float) and _EARLIEST <= time <= _LATEST else None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One start of the job.

    Attributes:
        run: its id.
        begin: Unix time of its first record; None if no clock was right.
        until: Unix time of the last sign of it.
        end: `end`, `preempted`, `unclean`; "" if it has none: it trains, or nobody knows.
        seconds: of training; None if unknown.
        covered: those seconds of training for which the events are there.
        lost_seconds: of training that its end, or going back in it, took.
        exact: whether it wrote its own end: else its seconds and what it lost are at least these.
    """

    run: str
    begin: float | None
    until: float | None
    end: str
    first_step: int | None
    last_step: int | None
    devices: int | None
    seconds: float | None
    covered: float
    lost_steps: int
    lost_seconds: float
    exact: bool


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The distribution of one measure."""

    count: int
    least: float
    median: float
    p95: float
    most: float
    total: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarise values; None without any."""
        if not values:
            return None
        high = quantiles(values, n=20, method="inclusive")[-1] if len(values) >= _FEW else values[0]
        return cls(
            count=len(values),
            least=min(values),
            median=median(values),
            p95=high,
            most=max(values),
            total=sum(values),
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Where the time of training went, in seconds, as far as it was measured.

    Attributes:
        covered: all time of training for which the events are there.
        stall: saves that blocked.
        slowdown: slower steps while a save was in flight.
        lost: training that was done again, or given up.
        loading: loads, which come before training.
        down: between the last sign of a run that failed and the next start; in no other figure.
        exact: whether every run wrote its own end: else `lost` is at least, and the goodput at most, this.
    """

    covered: float
    stall: float
    slowdown: float
    lost: float
    loading: float
    down: float
    exact: bool

    @property
    def goodput(self) -> float | None:
        """Training that counts, as a fraction of training and loads; None if unknown."""
        whole = self.covered + self.loading
        if whole <= 0:
            return None
        return min(1.0, max(0.0, (self.covered - self.stall - self.slowdown - self.lost) / whole))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """What another interval would have cost, by the formulas of `ckpt_core.cadence`.

    Attributes:
        cost: median seconds of training that a save takes.
        durable: median seconds until a save is durable.
        restart: median seconds of a load.
        interval: median seconds between saves.
        interval_steps: the same in steps; None if unknown.
        overhead: expected fraction of time lost at that interval.
        best_interval, best_steps, best_overhead: the same at the optimum.
    """

    mtbf: float
    mtbf_source: str
    cost: float
    durable: float
    restart: float
    interval: float
    interval_steps: float | None
    overhead: float
    best_interval: float
    best_steps: float | None
    best_overhead: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything known about a root.

    Attributes:
        root: its place, without secrets.
        made: Unix time of the report.
        events: the records of the journal by kind: save, load, upload, prune, retention and cadence.
        older: the record that sums up runs too old to be listed; None without one.
        checkpoints: those in the root now, the marked and abandoned ones, too.
        unreadable: names of what may be checkpoints.
        spreads: measure -> distribution over all saves.
        unknown: sentences on what is not known, and why.
        advice: sentences with numbers.
    """

    root: str
    made: float
    runs: Sequence[RunFacts]
    events: dict[str, list[dict[str, Any]]]
    older: dict[str, Any] | None
    checkpoints: Sequence[CheckpointInfo]
    unreadable: Sequence[str]
    spreads: dict[str, Spread]
    balance: Balance
    optimum: Optimum | None
    unknown: Sequence[str]
    advice: Sequence[str]
