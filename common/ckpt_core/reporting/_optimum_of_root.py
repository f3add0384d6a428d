"""The interval that would have cost least, from what saves have cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ckpt_core.cadence import FailureRate, expected_overhead, optimal_interval
from ckpt_core.journal import Record, failure_rate
from ckpt_core.reporting._report_values import Optimum, RunFacts


def optimum_of(
    history: Sequence[Record], events: Mapping[str, Sequence[Record]], runs: Sequence[RunFacts]
) -> Optimum | None:
    """Compare the interval of a root with the best one; None if that is unknown."""
    saves = [each for each in events["save"] if each.get("outcome") == "committed"]
    gaps, steps = _gaps(saves)
    stalls = [each["stall_seconds"] for each in saves if each.get("stall_seconds") is not None]
    durable = [each["durable_seconds"] for each in saves if each.get("durable_seconds") is not None]
    rate = _rate(history, events, runs)
    if not gaps or not stalls or rate is None or rate.mtbf <= 0:
        return None
    slower = [each["slowdown_seconds"] for each in saves if each.get("slowdown_seconds") is not None]
    loads = [each["seconds"] for each in events["load"] if each.get("seconds") is not None]
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
