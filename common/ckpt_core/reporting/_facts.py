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
_EARLIEST: Final = 946_684_800.0  # the year 2000: a clock before that was never set
_WORTH: Final = 0.001
"""A gain below a thousandth of the time is not worth a change."""
_UNEVEN: Final = 3.0
_MOST_STALL: Final = 0.01


@final
@dataclass(kw_only=True, slots=True)
class Report:
    """Everything known about a root; fields as in the schema of `ckpt report --json`."""

    root: str
    made: float
    runs: Sequence[dict[str, Any]]
    events: dict[str, list[Record]]
    checkpoints: Sequence[CheckpointInfo]
    unreadable: Sequence[str]
    spreads: dict[str, dict[str, float]]
    balance: dict[str, Any]
    goodput: float | None
    optimum: dict[str, Any] | None
    unknown: Sequence[str] = ()
    advice: Sequence[str] = ()


def report_of(storage: Storage, now: float) -> Report:
    """Report on a root, as its journal and manifests know it at Unix time `now`.

    Raises:
        OSError: storage failed.
    """
    found, survey = read_events(storage), Catalog(storage).survey()
    of_run = defaultdict[str, list[Record]](list)
    for each in found:
        of_run[each["run"]].append(each)
    runs = [_run(run, own, now) for run, own in of_run.items() if run]
    runs.sort(key=lambda run: (run["begin"] or 0.0, run["run"]))
    known = {name: _values(committed(found), name) for name in _MEASURES}
    balance = _balance(runs, of_run)
    parts = [seconds for _, seconds in parts_of(balance)]
    report = Report(
        root=public_url(storage.url),
        made=now,
        runs=runs,
        events={kind: _of_kind(kind, found) for kind in _KINDS},
        checkpoints=survey.everything,
        unreadable=sorted(survey.unreadable),
        spreads={name: _spread(values) for name, values in known.items() if values},
        balance=balance,
        goodput=parts[0] / sum(parts) if sum(parts) > 0 else None,
        optimum=_optimum(found, of_run, _rate(found, runs)),
    )
    report.unknown = list(_unknown(report))
    report.advice = list(_advice(report)) or [
        "Too little was measured for advice: let the job save a few times with its journal on."
    ]
    return report


def committed(records: Iterable[Record]) -> list[Record]:
    """Return the records of saves that are committed."""
    return [each for each in records if each["kind"] == "save" and each["outcome"] == "committed"]


def failed(events: Mapping[str, Sequence[Record]]) -> list[Record]:
    """Return records of saves, loads and uploads that failed, oldest first."""
    found = [each for kind in ("save", "load", "upload") for each in events[kind]]
    found = [each for each in found if each["outcome"] not in {"committed", "done"}]
    return sorted(found, key=lambda each: each["time"])


def timely(records: Iterable[Record], now: float) -> list[Record]:
    """Return the records whose clock can have been right."""
    return [each for each in records if _EARLIEST <= each["time"] <= now + _A_DAY]


def parts_of(balance: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return where all known time went, in seconds; what counts comes first."""
    useful = balance["covered"] - balance["stall"] - balance["slowdown"] - balance["lost"]
    return [
        ("training that counts", max(0.0, useful)),
        ("stall", balance["stall"]),
        ("slowdown", balance["slowdown"]),
        ("lost work" if balance["exact"] else "lost work, at least", balance["lost"]),
        ("loads", balance["loading"]),
    ]


def _of_kind(kind: str, records: Iterable[Record]) -> list[Record]:
    return [each for each in records if each["kind"] == kind]


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


def _run(run: str, records: Sequence[Record], now: float) -> dict[str, Any]:
    ends, losses = _ends_and_losses(records)
    # The next run writes that one died: that is no sign of life.
    times = sorted(each["time"] for each in timely(records, now) if each.get("event") != "unclean")
    known = [*_values(records, "training_seconds"), *_values(ends, "seconds")]
    events = _of_kind("run", records)
    has_start = any(each["event"] in {"start", "resume"} for each in events)
    steps = [each["step"] for each in records if each["kind"] != "load" and each.get("step") is not None]
    covered = max(known, default=0.0) - (0.0 if has_start else min(known, default=0.0))
    end = ends[0]["event"] if ends else ""
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
    """Return how a run ended, if known, and all after which steps were repeated.

    Of two ends, one of them found by the next run, what the run itself wrote counts.
    """
    ends = [each for each in records if each.get("event") in {"end", "preempted", "unclean"}]
    ends = sorted(ends, key=lambda each: each["event"] == "unclean")[:1]
    return ends, [*(each for each in records if each.get("event") == "resume"), *ends]


def _balance(runs: Sequence[Record], of_run: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Say where time went; a run without an end of its own may have lost more."""
    covered = [(run, of_run[run["run"]]) for run in runs if run["covered"]]
    saves, loads = ([e for _, own in covered for e in _of_kind(kind, own)] for kind in ("save", "load"))
    # From the last sign of a run that failed to the next start; in no other figure.
    down = [
        max(0.0, later["begin"] - run["until"])
        for run, later in pairwise(run for run in runs if run["begin"] is not None)
        if run["end"] == "unclean"
    ]
    return {
        "covered": sum(max(0.0, run["covered"] - _loads_within(own)) for run, own in covered),
        "stall": sum(_values(saves, "stall_seconds")),
        # Of a few saves the noise of steps may outweigh it: that is no time gained.
        "slowdown": max(0.0, sum(_values(saves, "slowdown_seconds"))),
        "lost": sum(max(0.0, run["lost_seconds"] - _cost_within_lost(own)) for run, own in covered),
        "loading": sum(_values(loads, "seconds")),
        "down": sum(down),
        "exact": all(run["exact"] for run, _ in covered),
    }


def _cost_within_lost(records: Sequence[Record]) -> float:
    """Return the seconds of saves that lie within the work that a run lost."""
    kept = [
        (each["time"], (each["step"] or 0) - (0 if each["event"] == "resume" else each["lost_steps"] or 0))
        for each in _ends_and_losses(records)[1]
    ]
    lost = [
        save
        for save in _of_kind("save", records)
        if any(save["time"] <= time and (save["step"] or 0) > step for time, step in kept)
    ]
    return sum(_values(lost, "stall_seconds")) + max(0.0, sum(_values(lost, "slowdown_seconds")))


def _loads_within(records: Sequence[Record]) -> float:
    """Return the seconds of loads between the first step of a run and its last."""
    times = [each["time"] for each in records if each["kind"] == "progress" or each.get("event") == "start"]
    first, last = min(times, default=0.0), max(times, default=0.0)
    loads = [each for each in _of_kind("load", records) if first < each["time"] < last]
    return sum(_values(loads, "seconds"))


def _optimum(
    found: Sequence[Record], of_run: Mapping[str, Sequence[Record]], rate: FailureRate | None
) -> dict[str, Any] | None:
    """Compare the interval of a root with the best one; None if that is unknown."""
    stalls, durable, slower = (
        _values(committed(found), f"{name}_seconds") for name in ("stall", "durable", "slowdown")
    )
    gaps: list[float] = []
    steps: list[float] = []  # the seconds of one
    for own in of_run.values():
        for before, each in pairwise(committed(own)):
            gap, done = each["time"] - before["time"], (each["step"] or 0) - (before["step"] or 0)
            gaps += [gap] if gap > 0 else []  # else a clock went back
            steps += [gap / done] if gap > 0 and done > 0 else []
    if not gaps or not stalls or rate is None or rate.mtbf <= 0:
        return None
    cost = median(stalls) + max(0.0, median(slower or [0.0]))
    known = {"cost": cost, "durable": median(durable or [cost]), "mtbf": rate.mtbf}
    restart = median(_values(_of_kind("load", found), "seconds") or [0.0])
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


def _rate(found: Sequence[Record], runs: Sequence[Record]) -> FailureRate | None:
    """Return how often the job fails, as given to its policy or as learned."""
    for each in reversed(_of_kind("cadence", found)):
        if each["mtbf_source"] == "given" and each["mtbf_seconds"]:
            return FailureRate(mtbf=each["mtbf_seconds"], source="given")
    devices = next((run["devices"] for run in reversed(runs) if run["devices"]), None)
    return None if devices is None else failure_rate(_of_kind("run", found), devices)


def _unknown(report: Report) -> Iterator[str]:
    """Say what this report cannot know, and why."""
    known, whole = {each["name"] for each in report.events["save"]}, len(report.checkpoints)
    earlier = [each for each in report.checkpoints if (each.weights_of or each).name not in known]
    if not report.runs:
        yield (
            "This root has no journal: it was written with journal=False, or by an older version. What saves "
            "cost, what was lost and what retention deleted is not known; only what is in the root now."
        )
    elif earlier:
        yield (
            f"{len(earlier):,} of {whole:,} checkpoints are not in the journal: they are older than its "
            "oldest part, copied, or of a killed run. Their times and costs are not known."
        )
    if bare := [run for run in report.runs if not run["covered"]]:
        yield f"{len(bare):,} of {len(report.runs):,} runs have no known training: the goodput lacks them."
    if any(len(timely(each, report.made)) < len(each) for each in report.events.values()):
        yield "Some records have no credible time; they are counted, but not on the time line."
    if report.unreadable:
        yield f"The markers of {len(report.unreadable):,} directories cannot be read: see `ckpt ls`."


def _advice(report: Report) -> Iterator[str]:
    """Return what would save time or space, and what is well as it is."""
    found, saves, covered = report.optimum, report.events["save"], report.balance["covered"]
    stall, durable = (report.spreads.get(name, {}) for name in ("stall_seconds", "durable_seconds"))
    if found is not None:
        yield _on_interval(found)
    if stall and stall["p95"] > max(_UNEVEN * stall["median"], 1):
        yield (
            f"Stalls are uneven: {seconds_text(stall['median'])} in the median, {seconds_text(stall['p95'])} "
            "in one of twenty. A save waits where an earlier one is still in flight: save less often, or use "
            "faster storage."
        )
    if covered and (share := report.balance["stall"] / covered) > _MOST_STALL:
        yield (
            f"Saves that block take {share_text(share)} of training: "
            'staging="overlapped" copies the state while training continues.'
        )
    if durable and found is not None and durable["median"] > found["interval"]:
        yield (
            f"A save is durable after {seconds_text(durable['median'])}, longer than the "
            f"{seconds_text(found['interval'])} between saves: storage limits how often to save."
        )
    if dead := [run for run in report.runs if run["end"] == "unclean"]:
        lost = seconds_text(sum(run["lost_seconds"] for run in dead))
        yield (
            f"{len(dead):,} of {len(report.runs):,} runs ended unclean and lost at least {lost} of training "
            f"({sum(run['lost_steps'] for run in dead):,} steps)."
        )
    if failed := [each for each in saves if each["outcome"] == "failed"]:
        why = failed[-1]["error"] or "no reason is known"
        yield f"{len(failed):,} of {len(saves):,} saves failed; the last at step {failed[-1]['step']}: {why}."
    idle = [each for each in report.checkpoints if (each.abandoned or each.marked) and each.pinned is None]
    if idle:
        size = bytes_text(sum(each.size_bytes for each in idle))
        yield (
            f"{len(idle):,} checkpoints that no resume takes hold {size}: "
            "`ckpt prune` deletes them with --abandoned, --bad or --damaged."
        )


def _on_interval(found: Mapping[str, Any]) -> str:
    times = {name: seconds_text(found[name]) for name in ("cost", "durable", "restart", "mtbf")}
    now, best = (
        (f"{max(1, round(steps)):,} steps ({seconds_text(seconds)})" if steps else seconds_text(seconds))
        for seconds, steps in (
            (found["interval"], found["interval_steps"]),
            (found["best_interval"], found["best_steps"]),
        )
    )
    gain = found["overhead"] - found["best_overhead"]
    use = f"Use save=Optimal(), which finds it on the running job: it gains {share_text(gain)}."
    return (
        f"Saves every {now} lose {share_text(found['overhead'])} of the time, expected; the optimum is every "
        f"{best}, with {share_text(found['best_overhead'])}: a save takes {times['cost']} of training and is "
        f"durable after {times['durable']}, a load takes {times['restart']}, one failure in {times['mtbf']} "
        f"({found['mtbf_source']}). {use if gain >= _WORTH else 'There is nothing to gain.'}"
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
