"""What the records of runs mean: which run died, and what it lost. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ckpt_core.journal._records import Record, record

ENDINGS: Final = frozenset({"end", "preempted", "unclean"})

Trail: TypeAlias = Sequence[tuple[int, float]]
"""Steps of a run, with the seconds that it had been training by then; in order."""

MOST_RECORDS: Final = 400
LEFT_RECORDS: Final = 200


class Experience(NamedTuple):
    """What the runs of a root have seen.

    Attributes:
        failures: unclean ends of runs that had trained, and preemptions that lost work.
        seconds: of training.
        device_seconds: of training, times devices.
    """

    failures: int
    seconds: float
    device_seconds: float


def experience_of(history: Iterable[Record]) -> Experience:
    """Sum up failures and exposure; runs without an end count by nothing yet."""
    failures, seconds, device_seconds = 0, 0.0, 0.0
    for each in history:
        if each["kind"] == "summary":
            failures += each["failures"] or 0
            seconds += _positive(each["seconds"])
            device_seconds += _positive(each["device_seconds"])
        elif each["event"] in ENDINGS:
            failures += is_failure(each)
            seconds += _positive(each["seconds"])
            device_seconds += _positive(each["seconds"]) * (each["devices"] or 1)
    return Experience(failures, seconds, device_seconds)


def is_failure(end: Record) -> bool:
    """Return whether an end is a failure, against which checkpoints are kept.

    Work was lost, or could have been. An unclean end is one, even if the newest checkpoint happened to be of
    its last step, but not that of a run that never trained: a mistake in a script, not the machine. A
    preemption is one only if its last save failed: else it has lost nothing, and no other interval would have
    changed that.
    """
    if end["event"] == "unclean":
        return _positive(end["seconds"]) > 0
    return end["event"] == "preempted" and bool(end["lost_steps"])


def without_end(history: Iterable[Record]) -> list[Record]:
    """Return the start of every run of which no end is known, the oldest first."""
    open_runs: dict[str, Record] = {}
    for each in history:
        if each["kind"] == "run" and each["event"] == "start":
            open_runs[each["run"]] = each
        elif each["kind"] == "run" and each["event"] in ENDINGS:
            open_runs.pop(each["run"], None)
    return list(open_runs.values())


def trail_of(run: str, start: int, events: Iterable[Record]) -> list[tuple[int, float]]:
    """Return the trail of a run, from its start on."""
    own = [each for each in events if each["kind"] == "progress" and each["run"] == run]
    points = ((each["step"] or 0, _positive(each["training_seconds"])) for each in own)
    return [(start, 0.0), *points]


def seconds_at(step: int, trail: Trail) -> float:
    """Return the seconds of training at which a run came to a step, the last time."""
    for (low, began), (high, ended) in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
        if low <= step < high:
            return began + (ended - began) * (step - low) / (high - low)
    return trail[-1][1] if step >= trail[-1][0] else 0.0


def loss(trail: Trail, resumed: int | None) -> dict[str, float]:
    """Return steps and seconds after the checkpoint from which training goes on.

    Args:
        trail: of the run that ended.
        resumed: the step of the checkpoint; None if there was none.
    """
    last, seconds = trail[-1]
    kept = trail[0][0] if resumed is None else resumed
    return {
        "lost_steps": max(0, last - kept),
        "lost_seconds": round(max(0.0, seconds - seconds_at(kept, trail)), 3),
    }


def unclean(start: Record, trail: Trail, resumed: int | None, *, time: float, found_by: str) -> Record:
    """Make the record of the end of a run that could not write one."""
    fields: Mapping[str, Any] = {
        **start,
        "event": "unclean",
        "step": trail[-1][0],
        "seconds": round(trail[-1][1], 3),
        "found_by": found_by,
        **loss(trail, resumed),
    }
    return record("run", time, start["run"], fields)


def merge(histories: Iterable[Sequence[Record]]) -> list[Record]:
    """Join copies of a history, of which each may lack what the others have.

    The newest summary counts: every record that is not newer is in it.
    """
    found = {json.dumps(each): each for history in histories for each in history}
    summaries = [each for each in found.values() if each["kind"] == "summary"]
    newest = max(summaries, key=lambda each: float(each["time"]), default=None)
    rest = [each for each in found.values() if each["kind"] == "run"]
    if newest is None:
        return sorted(rest, key=_time)
    return [newest, *sorted((each for each in rest if _time(each) > newest["time"]), key=_time)]


def compact(history: Sequence[Record], *, most: int = MOST_RECORDS, left: int = LEFT_RECORDS) -> list[Record]:
    """Sum up the oldest runs of a history that has become long; no count is lost.

    Runs are summed up as a whole, and everything summed up is older than the rest: see `merge`.
    """
    cut = len(history) - left if len(history) > most else 0
    while cut > 0:
        parted = {each["run"] for each in without_end(history[:cut])}
        first = next((at for at, each in enumerate(history[:cut]) if each["run"] in parted), cut)
        if first == cut and min(map(_time, history[cut:])) > max(map(_time, history[:cut])):
            return [_summary(history[:cut]), *history[cut:]]
        cut = min(first, cut - 1)
    return list(history)


def _summary(old: Sequence[Record]) -> Record:
    seen, runs = experience_of(old), [each for each in old if each["kind"] == "run"]
    before = [each for each in old if each["kind"] == "summary"]

    def total(name: str) -> float:
        return sum(_positive(each[name]) for each in before)

    def count(event: str) -> int:
        return sum(each["event"] == event for each in runs)

    ends = [each for each in runs if each["event"] in ENDINGS]
    fields = {
        "runs": int(total("runs")) + len({each["run"] for each in ends}),
        "ends": int(total("ends")) + count("end"),
        "preempted": int(total("preempted")) + count("preempted"),
        "unclean": int(total("unclean")) + count("unclean"),
        "failures": seen.failures,
        "seconds": round(seen.seconds, 3),
        "device_seconds": round(seen.device_seconds, 3),
        "lost_steps": int(total("lost_steps")) + sum(each["lost_steps"] or 0 for each in ends),
        "lost_seconds": round(total("lost_seconds") + sum(_positive(e["lost_seconds"]) for e in ends), 3),
        "since": min([*(_time(each) for each in runs), *(_positive(each["since"]) for each in before)]),
    }
    return record("summary", max(map(_time, old)), "", fields)


def _time(each: Record) -> float:
    return float(each["time"])


def _positive(value: float | None) -> float:
    return max(0.0, value or 0.0)
