"""What a report knows about a root, from its journal and its manifests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Final, final

from ckpt_core.cadence import expected_overhead, optimal_interval
from ckpt_core.commit import Catalog
from ckpt_core.disclosure import public_url
from ckpt_core.journal import Record, failure_rate, read_events
from ckpt_core.options import bytes_text
from ckpt_core.policies import FailureRate
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_KINDS: Final = ("save", "load", "upload", "prune", "retention", "cadence")
_MEASURES: Final = ("stall_seconds", "slowdown_seconds", "durable_seconds", "uploaded_seconds", "size_bytes")
_A_DAY: Final = 86_400.0
"""By which a clock may be ahead of that of the report."""
_WORTH: Final = 0.001
"""A gain below a thousandth of the time is not worth a change."""
_UNEVEN: Final = 3.0
_MOST_STALL: Final = 0.01
_EARLIEST: Final = 946_684_800.0  # the year 2000: a clock before that was never set
_LATEST: Final = 7_258_118_400.0  # the year 2200


@final
@dataclass(kw_only=True, slots=True)
class Report:
    """Everything known about a root; fields as in the schema of `ckpt report --json`."""

    root: str
    made: float
    runs: Sequence[dict[str, Any]]
    events: dict[str, list[dict[str, Any]]]
    checkpoints: Sequence[CheckpointInfo]
    unreadable: Sequence[str]
    spreads: dict[str, dict[str, float]]
    balance: dict[str, Any]
    optimum: dict[str, Any] | None
    unknown: Sequence[str] = ()
    advice: Sequence[str] = ()


def report_of(storage: Storage, now: float) -> Report:
    """Report on a root at the Unix time `now`, as far as its journal and manifests know it.

    Raises:
        OSError: storage failed.
    """
    found, survey = read_events(storage), Catalog(storage).survey()
    events = {kind: [each for each in found if each["kind"] == kind] for kind in _KINDS}
    of_run = defaultdict[str, list[Record]](list)
    for each in found:
        of_run[each["run"]].append(each)
    runs = [_run(run, own) for run, own in of_run.items() if run]
    runs.sort(key=lambda run: (run["begin"] or 0.0, run["run"]))
    known = {name: _values(committed(events), name) for name in _MEASURES}
    history = [each for each in found if each["kind"] == "run"]
    report = Report(
        root=public_url(storage.url),
        made=now,
        runs=runs,
        events=events,
        checkpoints=survey.everything,
        unreadable=sorted(survey.unreadable),
        spreads={name: _spread(values) for name, values in known.items() if values},
        balance=_balance(runs, of_run, events),
        optimum=_optimum(events, _rate(history, events, runs)),
    )
    report.unknown = list(_unknown(report))
    report.advice = list(_advice(report)) or [
        "Too little was measured for advice: let the job save a few times with its journal on."
    ]
    return report


def committed(events: Mapping[str, Sequence[Record]]) -> list[Record]:
    """Return the records of saves that are committed."""
    return [each for each in events["save"] if each.get("outcome") == "committed"]


def times_in(report: Report, events: Iterable[Record]) -> list[float]:
    """Return the times of events whose clock can have been right."""
    return [
        each["time"] for each in events if _EARLIEST <= each["time"] <= min(_LATEST, report.made + _A_DAY)
    ]


def _values(records: Iterable[Record], name: str) -> list[float]:
    return [float(each[name]) for each in records if each.get(name) is not None]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(values),
        "least": min(values),
        "median": median(values),
        "p95": quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0],
        "most": max(values),
        "total": sum(values),
    }


def _run(run: str, records: Sequence[Record]) -> dict[str, Any]:
    ends, losses = _ends_and_losses(records)
    # The next run writes that one died: that is no sign of life.
    alive = [each["time"] for each in records if each.get("event") != "unclean"]
    times = sorted(time for time in alive if _EARLIEST <= time <= _LATEST)
    known = [*_values(records, "training_seconds"), *_values(ends, "seconds")]
    events = [each for each in records if each["kind"] == "run"]
    has_start = any(each["event"] in {"start", "resume"} for each in events)
    steps = [each["step"] for each in records if each["kind"] != "load" and each.get("step") is not None]
    covered = max(known, default=0.0) - (0.0 if has_start else min(known, default=0.0))
    end = str(ends[0]["event"]) if ends else ""
    return {
        "run": run,
        "begin": times[0] if times else None,
        "until": times[-1] if times else None,
        "end": end,
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "devices": max((each["devices"] for each in events if each["devices"]), default=None),
        "seconds": max(known, default=None),
        "covered": max(0.0, covered) if len(events) < len(records) else 0.0,
        "lost_steps": int(sum(_values(losses, "lost_steps"))),
        "lost_seconds": sum(_values(losses, "lost_seconds")),
        "exact": end not in {"", "unclean"},
    }


def _ends_and_losses(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Return how a run ended, if that is known, and all after which steps were done again.

    Of two ends, one of them found by the next run, what the run itself wrote counts.
    """
    ends = [each for each in records if each.get("event") in {"end", "preempted", "unclean"}]
    ends = sorted(ends, key=lambda each: each["event"] == "unclean")[:1]
    return ends, [*(each for each in records if each.get("event") == "resume"), *ends]


def _balance(
    runs: Sequence[Record], of_run: Mapping[str, Sequence[Record]], events: Mapping[str, Sequence[Record]]
) -> dict[str, Any]:
    """Say where time went, each second once; a run without an end of its own may have lost more."""
    covered = [run for run in runs if run["covered"]]
    names = {run["run"] for run in covered}
    saves, loads = ([each for each in events[kind] if each["run"] in names] for kind in ("save", "load"))
    found = {
        "covered": sum(max(0.0, run["covered"] - _loads_within(of_run[run["run"]])) for run in covered),
        "stall": sum(_values(saves, "stall_seconds")),
        # Of a few saves the noise of steps may outweigh it: that is no time gained.
        "slowdown": max(0.0, sum(_values(saves, "slowdown_seconds"))),
        "lost": sum(max(0.0, run["lost_seconds"] - _cost_within_lost(of_run[run["run"]])) for run in covered),
        "loading": sum(_values(loads, "seconds")),
    }
    # From the last sign of a run that failed to the next start; in no other figure.
    down = [
        max(0.0, later["begin"] - run["until"])
        for run, later in pairwise(run for run in runs if run["begin"] is not None)
        if run["end"] == "unclean" and run["until"] is not None
    ]
    return found | {"down": sum(down), "exact": all(run["exact"] for run in covered)}


def _cost_within_lost(records: Sequence[Record]) -> float:
    """Return the seconds of saves that lie within the work that a run lost."""
    found, since = 0.0, -math.inf
    for each in sorted(_ends_and_losses(records)[1], key=lambda loss: loss["time"]):
        step, until = each["step"] or 0, each["time"]
        kept = step if each["event"] == "resume" else step - (each["lost_steps"] or 0)
        saves = [save for save in records if save["kind"] == "save" and since < save["time"] <= until]
        lost = [save for save in saves if (save["step"] or 0) > kept]
        found += sum(_values(lost, "stall_seconds")) + max(0.0, sum(_values(lost, "slowdown_seconds")))
        since = until
    return found


def _loads_within(records: Sequence[Record]) -> float:
    """Return the seconds of loads between the first step of a run and its last."""
    times = [each["time"] for each in records if each["kind"] == "progress" or each.get("event") == "start"]
    first, last = min(times, default=0.0), max(times, default=0.0)
    loads = [each for each in records if each["kind"] == "load" and first < each["time"] < last]
    return sum(_values(loads, "seconds"))


def goodput(balance: Mapping[str, Any]) -> float | None:
    """Return what counts, as a fraction of training and loads; None if unknown."""
    whole = balance["covered"] + balance["loading"]
    useful = balance["covered"] - balance["stall"] - balance["slowdown"] - balance["lost"]
    return min(1.0, max(0.0, useful / whole)) if whole > 0 else None


def _optimum(events: Mapping[str, Sequence[Record]], rate: FailureRate | None) -> dict[str, Any] | None:
    """Compare the interval of a root with the best one; None if that is unknown."""
    saves = committed(events)
    stalls, durable, slower = (
        _values(saves, name) for name in ("stall_seconds", "durable_seconds", "slowdown_seconds")
    )
    gaps: list[float] = []
    steps: list[float] = []  # the seconds of one
    last: dict[str, Record] = {}
    for each in saves:
        before = last.get(each["run"], each)
        last[each["run"]] = each
        if each["time"] > before["time"]:  # else the first of its run, or a clock that went back
            gaps.append(each["time"] - before["time"])
            if each.get("step") is not None and (before.get("step") or 0) < each["step"]:
                steps.append(gaps[-1] / (each["step"] - (before.get("step") or 0)))
    if not gaps or not stalls or rate is None or rate.mtbf <= 0:
        return None
    cost = median(stalls) + max(0.0, median(slower or [0.0]))
    known = {"cost": cost, "durable": median(durable or [cost]), "mtbf": rate.mtbf}
    restart = median(_values(events["load"], "seconds") or [0.0])
    interval, per_step, best = median(gaps), median(steps or [0.0]), optimal_interval(**known)
    return {
        **known,
        "mtbf_source": rate.source,
        "restart": restart,
        "interval": interval,
        "interval_steps": interval / per_step if per_step else None,
        "overhead": expected_overhead(interval, **known, restart=restart),
        "best_interval": best,
        "best_steps": best / per_step if per_step else None,
        "best_overhead": expected_overhead(best, **known, restart=restart),
    }


def _rate(
    history: Sequence[Record], events: Mapping[str, Sequence[Record]], runs: Sequence[Record]
) -> FailureRate | None:
    """Return how often the job fails, as given to its policy or as learned."""
    for each in reversed(events["cadence"]):
        if each.get("mtbf_source") == "given" and each.get("mtbf_seconds"):
            return FailureRate(mtbf=each["mtbf_seconds"], source="given")
    devices = next((run["devices"] for run in reversed(runs) if run["devices"]), None)
    return None if devices is None else failure_rate(history, devices)


def _unknown(report: Report) -> Iterator[str]:
    """Say what this report cannot know, and why."""
    known = {each.get("name") for each in report.events["save"]}
    earlier = [each for each in report.checkpoints if (each.weights_of or each).name not in known]
    if not report.runs:
        yield (
            "This root has no journal: it was written with journal=False, or by an older version. What saves "
            "cost, what was lost and what retention deleted is not known; only what is in the root now."
        )
    elif earlier:
        yield (
            f"{len(earlier):,} of {len(report.checkpoints):,} checkpoints are not in the journal: they are "
            "older than its oldest part, copied, or of a killed run. Their times and costs are not known."
        )
    if bare := [run for run in report.runs if not run["covered"]]:
        yield (
            f"{len(bare):,} of {len(report.runs):,} runs have no measured time of training in the events "
            "that are left. The goodput is that of the others."
        )
    if any(len(times_in(report, of_kind)) < len(of_kind) for of_kind in report.events.values()):
        yield "Some records have no credible time; they are counted, but not on the time line."
    if report.unreadable:
        yield f"The markers of {len(report.unreadable):,} directories cannot be read: see `ckpt ls`."


def _advice(report: Report) -> Iterator[str]:
    """Return what would save time or space, and what is well as it is."""
    if (found := report.optimum) is not None:
        yield _on_interval(found)
    stall, durable = report.spreads.get("stall_seconds"), report.spreads.get("durable_seconds")
    covered, saves = report.balance["covered"], report.events["save"]
    if stall is not None and stall["p95"] > _UNEVEN * stall["median"] and stall["p95"] > 1:
        yield (
            f"Stalls are uneven: {seconds_text(stall['median'])} in the median, {seconds_text(stall['p95'])} "
            "in one of twenty. A save waits where an earlier one is still in flight: save less often, or use "
            "faster storage."
        )
    if stall is not None and covered and report.balance["stall"] / covered > _MOST_STALL:
        yield (
            f"Saves that block take {share_text(report.balance['stall'] / covered)} of training: "
            'staging="overlapped" copies the state while training continues.'
        )
    if durable is not None and found is not None and durable["median"] > found["interval"]:
        yield (
            f"A save is durable after {seconds_text(durable['median'])}, longer than the "
            f"{seconds_text(found['interval'])} between saves: storage limits how often to save."
        )
    if dead := [run for run in report.runs if run["end"] == "unclean"]:
        yield (
            f"{len(dead):,} of {len(report.runs):,} runs ended unclean and lost at least "
            f"{seconds_text(sum(run['lost_seconds'] for run in dead))} of training "
            f"({sum(run['lost_steps'] for run in dead):,} steps)."
        )
    if failed := [each for each in saves if each.get("outcome") == "failed"]:
        yield (
            f"{len(failed):,} of {len(saves):,} saves failed; the last one at step {failed[-1].get('step')}: "
            f"{failed[-1].get('error') or 'no reason is known'}."
        )
    idle = [each for each in report.checkpoints if each.abandoned or each.marked]
    if idle := [each for each in idle if each.pinned is None]:
        yield (
            f"{len(idle):,} checkpoints that no resume takes hold "
            f"{bytes_text(sum(each.size_bytes for each in idle))}: "
            "`ckpt prune` deletes them with --abandoned, --bad or --damaged."
        )


def _on_interval(found: Mapping[str, Any]) -> str:
    def every(seconds: float, steps: float | None) -> str:
        text = seconds_text(seconds)
        return text if steps is None else f"{max(1, round(steps)):,} steps ({text})"

    now = every(found["interval"], found["interval_steps"])
    best = every(found["best_interval"], found["best_steps"])
    cost, mtbf = seconds_text(found["cost"]), seconds_text(found["mtbf"])
    basis = f"a save takes {cost} of training, one failure in {mtbf}"
    begin = f"Saves every {now} lose {share_text(found['overhead'])} of the time, expected; the optimum"
    least, gain = share_text(found["best_overhead"]), found["overhead"] - found["best_overhead"]
    if gain < _WORTH:
        return f"{begin}, every {best}, {least}: {basis}. There is nothing to gain."
    return (
        f"{begin} is every {best}, with {least}: {basis}. Use save=Optimal(), which finds it on the running "
        f"job: it gains {share_text(gain)}."
    )


def seconds_text(seconds: float | None) -> str:
    """Format a duration: `340 ms`, `8.4 s`, `12 min`, `3.2 h`, `41 d`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if 0 < abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms"
    for unit, scale in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds)} s"


def share_text(share: float | None) -> str:
    """Format a fraction: `0.24 %`, `97.3 %`."""
    return "?" if share is None or not math.isfinite(share) else f"{_digits(100 * share)} %"


def moment(time: float | None) -> str:
    """Format a Unix time in UTC, to the second."""
    try:
        return "?" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def _digits(value: float) -> str:
    """Format with three digits, and without an exponent."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if size < 10 else 1}f}"
