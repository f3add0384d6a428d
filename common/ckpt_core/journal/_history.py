"""What the records of runs mean: which run died, and what it lost. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from ckpt_core.cadence import FailureRate
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


_HOUR: Final = 3600.0


class Prior(NamedTuple):
    """A Gamma distribution of failures per second of a device.

    Attributes:
        device_seconds: from one failure to the next, on one device.
        weight: how many failures it counts as, its shape; its rate is `weight * device_seconds`.
    """

    device_seconds: float
    weight: float


PRIOR: Final = Prior(device_seconds=50_700 * _HOUR, weight=0.02)
"""Llama 3: 419 interruptions in 54 days on 16,384 GPUs; see docs/journal.md for the weight."""


def failure_rate(history: Sequence[Record], devices: int, *, prior: Prior = PRIOR) -> FailureRate:
    """Estimate the mean time between failures of a job.

    The posterior mean of the rate is (weight + failures) / (weight * device_seconds + exposure), where the
    exposure is in seconds of training times devices. It minimises the expected cost of an interval, which is
    linear in the rate.

    Args:
        history: as `read_history` returns it.
        devices: of the job.
        prior: what is believed without a history.
    """
    seen = experience_of(history)
    rate = (prior.weight + seen.failures) / (prior.weight * prior.device_seconds + seen.device_seconds)
    devices = max(1, devices)
    return FailureRate(mtbf=1.0 / (rate * devices), source=_source(seen, devices, prior))


def _source(seen: Experience, devices: int, prior: Prior) -> str:
    failures = f"{seen.failures} failure{'' if seen.failures == 1 else 's'}"
    hours = math.floor(prior.device_seconds / _HOUR)
    many = f"{devices} device{'' if devices == 1 else 's'}"
    return f"{failures} in {_hours(seen.seconds)} h of this root, prior 1 in {hours:,} h of a GPU, {many}"


def _hours(seconds: float) -> str:
    hours = seconds / _HOUR
    return f"{hours:.0f}" if hours >= 10 or hours == 0 else f"{hours:.2g}"
