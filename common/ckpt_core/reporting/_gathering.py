"""What a report knows about a root, from its journal and its manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Final, final

from ckpt_core.cadence import FailureRate, expected_overhead, optimal_interval
from ckpt_core.commit import Catalog
from ckpt_core.disclosure import public_url
from ckpt_core.journal import Record, failure_rate, read_events
from ckpt_core.options import bytes_text
from ckpt_core.reporting._texts import seconds_text, share_text
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_KINDS: Final = ("save", "load", "upload", "prune", "retention", "cadence")
_MEASURES: Final = ("stall_seconds", "slowdown_seconds", "durable_seconds", "uploaded_seconds", "size_bytes")
_ENDS: Final = frozenset({"end", "preempted", "unclean"})
A_DAY: Final = 86_400.0
"""By which a clock may be ahead of that of the report."""
_WORTH: Final = 0.001
"""A gain below a thousandth of the time is not worth a change."""
_UNEVEN: Final = 3.0
_MOST_STALL: Final = 0.01
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
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise values, of which there is at least one."""
        high = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
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
    checkpoints: Sequence[CheckpointInfo]
    unreadable: Sequence[str]
    spreads: dict[str, Spread]
    balance: Balance
    optimum: Optimum | None
    unknown: Sequence[str]
    advice: Sequence[str]


def report_of(storage: Storage, now: float) -> Report:
    """Report on a root, as far as its journal and its manifests know it.

    Args:
        storage: the root.
        now: Unix time, which the report bears.

    Raises:
        OSError: storage failed.
    """
    found = read_events(storage)
    history = [each for each in found if each["kind"] == "run"]
    survey = Catalog(storage).survey()
    events = {kind: [each for each in found if each["kind"] == kind] for kind in _KINDS}
    runs = _runs(found)
    done = [each for each in events["save"] if each.get("outcome") == "committed"]
    known = {name: _values(done, name) for name in _MEASURES}
    report = Report(
        root=public_url(storage.url),
        made=now,
        runs=runs,
        events=events,
        checkpoints=survey.everything,
        unreadable=sorted(survey.unreadable),
        spreads={name: Spread.of(values) for name, values in known.items() if values},
        balance=_balance(runs, events),
        optimum=_optimum(history, events, runs),
        unknown=(),
        advice=(),
    )
    report = replace(report, unknown=_unknown(report))
    return replace(report, advice=advice(report))


def _values(records: Iterable[Record], name: str) -> list[float]:
    return [float(each[name]) for each in records if each.get(name) is not None]


def _runs(records: Sequence[Record]) -> list[RunFacts]:
    """Return the runs, the earliest first."""
    of_run: dict[str, list[Record]] = {}
    for each in records:
        if each["run"]:
            of_run.setdefault(each["run"], []).append(each)
    runs = [_run(run, own) for run, own in of_run.items()]
    return sorted(runs, key=lambda run: (run.begin or 0.0, run.run))


def _run(run: str, records: Sequence[Record]) -> RunFacts:
    events = [each for each in records if each["kind"] == "run"]
    # The next run writes that one died: that is no sign of life.
    alive = [each for each in records if each.get("event") != "unclean"]
    times = sorted(t for each in alive if (t := clock_of(each)) is not None)
    ends = [each for each in events if each.get("event") in _ENDS]
    # A forced end and a record of it by the next run: what the run itself wrote counts.
    ends.sort(key=lambda each: each.get("event") == "unclean")
    end = ends[0] if ends else None
    progress = sorted(_values(records, "training_seconds"))
    known = [*progress, *_values(ends[:1], "seconds")]
    has_start = any(each.get("event") in {"start", "resume"} for each in events)
    steps = sorted(
        each["step"] for each in records if each["kind"] != "load" and each.get("step") is not None
    )
    devices = [each["devices"] for each in events if each.get("devices") is not None]
    losses = [*ends[:1], *(each for each in events if each.get("event") == "resume")]
    covered = max(known, default=0.0) - (0.0 if has_start else min(known, default=0.0))
    has_events = any(each["kind"] != "run" for each in records)
    return RunFacts(
        run=run,
        begin=times[0] if times else None,
        until=times[-1] if times else None,
        end="" if end is None else str(end["event"]),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        devices=max(devices, default=None),
        seconds=max(known, default=None),
        covered=max(0.0, covered) if has_events else 0.0,
        lost_steps=int(sum(_values(losses, "lost_steps"))),
        lost_seconds=sum(_values(losses, "lost_seconds")),
        exact=end is not None and end["event"] != "unclean",
    )


def _balance(runs: Sequence[RunFacts], events: Mapping[str, Sequence[Record]]) -> Balance:
    covered = {run.run for run in runs if run.covered}
    saves = [each for each in events["save"] if each["run"] in covered]
    loads = [each for each in events["load"] if each["run"] in covered]
    down = sum(
        max(0.0, later.begin - run.until)
        for run, later in pairwise(run for run in runs if run.begin is not None)
        if run.end == "unclean" and run.until is not None and later.begin is not None
    )
    return Balance(
        covered=sum(run.covered for run in runs),
        stall=sum(_values(saves, "stall_seconds")),
        slowdown=sum(_values(saves, "slowdown_seconds")),
        lost=sum(run.lost_seconds for run in runs if run.run in covered),
        loading=sum(_values(loads, "seconds")),
        down=down,
        exact=all(run.exact for run in runs if run.covered),
    )


def _unknown(report: Report) -> list[str]:
    """Say what this report cannot know, and why."""
    found: list[str] = []
    known = {each.get("name") for each in report.events["save"]}
    earlier = [each.name for each in report.checkpoints if each.name not in known]
    if not report.runs:
        found.append(
            "This root has no journal: it was written with journal=False, or by an older version. What saves "
            "cost, what was lost and what retention deleted is not known; only what is in the root now."
        )
    elif earlier:
        found.append(
            f"{len(earlier):,} of {len(report.checkpoints):,} checkpoints are not in the journal: they are "
            "older than its oldest part, copied, or of a killed run. Their times and costs are not known."
        )
    if (bare := [run for run in report.runs if not run.covered]) and report.runs:
        found.append(
            f"{len(bare):,} of {len(report.runs):,} runs have no measured time of training in the events "
            "that are left. The goodput is that of the others."
        )
    times = [clock_of(each) for kind in report.events.values() for each in kind]
    if any(time is None or time > report.made + A_DAY for time in times):
        found.append("Some records have no credible time; they are counted, but not on the time line.")
    if report.unreadable:
        found.append(f"The markers of {len(report.unreadable):,} directories cannot be read: see `ckpt ls`.")
    return found


def _optimum(
    history: Sequence[Record], events: Mapping[str, Sequence[Record]], runs: Sequence[RunFacts]
) -> Optimum | None:
    """Compare the interval of a root with the best one; None if that is unknown."""
    saves = [each for each in events["save"] if each.get("outcome") == "committed"]
    gaps, steps = _gaps(saves)
    stalls, durable, slower = (
        _values(saves, name) for name in ("stall_seconds", "durable_seconds", "slowdown_seconds")
    )
    loads = _values(events["load"], "seconds")
    rate = _rate(history, events, runs)
    if not gaps or not stalls or rate is None or rate.mtbf <= 0:
        return None
    cost = median(stalls) + (median(slower) if slower else 0.0)
    known = {"cost": cost, "durable": median(durable) if durable else cost, "mtbf": rate.mtbf}
    restart = median(loads) if loads else 0.0
    interval, per_step = median(gaps), median(steps) if steps else None
    best = optimal_interval(**known)
    return Optimum(
        mtbf=rate.mtbf,
        mtbf_source=rate.source,
        cost=cost,
        durable=known["durable"],
        restart=restart,
        interval=interval,
        interval_steps=None if not per_step else interval / per_step,
        overhead=expected_overhead(interval, **known, restart=restart),
        best_interval=best,
        best_steps=None if not per_step else best / per_step,
        best_overhead=expected_overhead(best, **known, restart=restart),
    )


def _gaps(saves: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return the seconds between saves of one run, and the seconds of a step."""
    gaps: list[float] = []
    steps: list[float] = []
    last: dict[str, Record] = {}
    for each in saves:
        before = last.get(each["run"])
        last[each["run"]] = each
        if before is None or each["time"] <= before["time"]:
            continue  # the first of its run, or a clock that went back
        gaps.append(each["time"] - before["time"])
        if each.get("step") is not None and (before.get("step") or 0) < each["step"]:
            steps.append(gaps[-1] / (each["step"] - (before.get("step") or 0)))
    return gaps, steps


def _rate(
    history: Sequence[Record], events: Mapping[str, Sequence[Record]], runs: Sequence[RunFacts]
) -> FailureRate | None:
    """Return how often the job fails, as given to its policy or as learned."""
    for each in reversed(events["cadence"]):
        if each.get("mtbf_source") == "given" and each.get("mtbf_seconds"):
            return FailureRate(mtbf=each["mtbf_seconds"], source="given")
    devices = next((run.devices for run in reversed(runs) if run.devices), None)
    return None if devices is None else failure_rate(history, devices)


def advice(report: Report) -> list[str]:
    """Return what would save time or space, and what is well as it is."""
    found = [*_on_interval(report.optimum), *_on_stalls(report), *_on_failures(report), *_on_space(report)]
    return found or ["Too little was measured for advice: let the job save a few times with its journal on."]


def _every(seconds: float, steps: float | None) -> str:
    return (
        seconds_text(seconds)
        if steps is None
        else f"{max(1, round(steps)):,} steps ({seconds_text(seconds)})"
    )


def _on_interval(found: Optimum | None) -> Iterator[str]:
    if found is None:
        return
    now, best = _every(found.interval, found.interval_steps), _every(found.best_interval, found.best_steps)
    basis = f"a save takes {seconds_text(found.cost)} of training, one failure in {seconds_text(found.mtbf)}"
    gain = found.overhead - found.best_overhead
    if gain < _WORTH:
        yield (
            f"Saves every {now} lose {share_text(found.overhead)} of the time, expected; the optimum, every "
            f"{best}, {share_text(found.best_overhead)}: {basis}. There is nothing to gain."
        )
        return
    yield (
        f"Saves every {now} lose {share_text(found.overhead)} of the time, expected; the optimum is every "
        f"{best}, with {share_text(found.best_overhead)}: {basis}. Use save=Optimal(), which finds it on the "
        f"running job: it gains {share_text(gain)}."
    )


def _on_stalls(report: Report) -> Iterator[str]:
    stall, durable = report.spreads.get("stall_seconds"), report.spreads.get("durable_seconds")
    if stall is not None and stall.p95 > _UNEVEN * stall.median and stall.p95 > 1:
        yield (
            f"Stalls are uneven: {seconds_text(stall.median)} in the median, {seconds_text(stall.p95)} in "
            "one of twenty. A save waits where an earlier one is still in flight: save less often, or use "
            "faster storage."
        )
    covered = report.balance.covered
    if stall is not None and covered and report.balance.stall / covered > _MOST_STALL:
        yield (
            f"Saves that block take {share_text(report.balance.stall / covered)} of training: "
            'staging="overlapped" copies the state while training continues.'
        )
    if durable is not None and report.optimum is not None and durable.median > report.optimum.interval:
        yield (
            f"A save is durable after {seconds_text(durable.median)}, longer than the "
            f"{seconds_text(report.optimum.interval)} between saves: storage limits how often to save."
        )


def _on_failures(report: Report) -> Iterator[str]:
    dead = [run for run in report.runs if run.end == "unclean"]
    if dead:
        yield (
            f"{len(dead):,} of {len(report.runs):,} runs ended unclean and lost at least "
            f"{seconds_text(sum(run.lost_seconds for run in dead))} of training "
            f"({sum(run.lost_steps for run in dead):,} steps)."
        )
    failed = [each for each in report.events["save"] if each.get("outcome") == "failed"]
    if failed:
        yield (
            f"{len(failed):,} of {len(report.events['save']):,} saves failed; the last one at step "
            f"{failed[-1].get('step')}: {failed[-1].get('error') or 'no reason is known'}."
        )


def _on_space(report: Report) -> Iterator[str]:
    idle = [each for each in report.checkpoints if each.abandoned or not each.usable]
    idle = [each for each in idle if each.pinned is None]
    if idle:
        size = bytes_text(sum(each.size_bytes for each in idle))
        yield (
            f"{len(idle):,} checkpoints that no resume takes hold {size}: "
            "`ckpt prune` deletes them with --abandoned, --bad or --damaged."
        )
