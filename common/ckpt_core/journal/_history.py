"""What the records of runs mean: which run died, and what it lost. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from ckpt_core.journal._records import Record, record

ENDINGS: Final = frozenset({"end", "preempted", "unclean"})

Trail: TypeAlias = Sequence[tuple[int, float]]
"""Steps of a run, with the seconds that it had been training by then; in order."""


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
    ends = [each for each in history if each["event"] in ENDINGS]
    seconds = [_positive(each["seconds"]) for each in ends]
    devices = [each["devices"] or 1 for each in ends]
    return Experience(sum(map(is_failure, ends)), sum(seconds), sum(map(mul, seconds, devices)))


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


def without_end(history: Sequence[Record]) -> list[Record]:
    """Return the start of every run of which no end is known, the oldest first."""
    ended = {each["run"] for each in history if each["event"] in ENDINGS}
    return [each for each in history if each["event"] == "start" and each["run"] not in ended]


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


def _positive(value: float | None) -> float:
    return max(0.0, value or 0.0)
