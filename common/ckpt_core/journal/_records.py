"""The lines of the journal, JSON objects of few kinds, and what they mean.

The same check of fields is made before a line is written and after it is read, so that nothing else gets in
or out. Which run died, and what it lost, are pure functions of records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from ckpt_core.disclosure import printable, public_url
from ckpt_core.policies import FailureRate

Record: TypeAlias = dict[str, Any]

VERSION: Final = 1
_START: Final = b'{"v":'

MOST_STEPS: Final = 100
"""Of those that one rule of retention keeps, the newest are noted."""
_LONGEST_TEXT: Final = 300
_MOST_TEXTS: Final = 100
_LONGEST_LINE: Final = 1 << 16
_MOST_COUNT: Final = 2**53
_WORD: Final = re.compile(r"\S*://\S*")


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None


def _number(value: Any) -> float | None:
    return round(value, 6) if type(value) in {int, float} and abs(value) < math.inf else None


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    # An escaped half of a surrogate pair is valid JSON, and no text.
    plain = value[: 2 * _LONGEST_TEXT].encode(errors="replace").decode()
    shown = printable(_WORD.sub(lambda found: public_url(found[0]), plain))
    return shown if len(shown) <= _LONGEST_TEXT else shown[: _LONGEST_TEXT - 1] + "…"


def _texts(value: Any) -> list[str] | None:
    if not isinstance(value, list | tuple):
        return None
    return [text for text in map(_text, value[:_MOST_TEXTS]) if text is not None]


def _numbers(value: Any) -> dict[str, float | None] | None:
    if not isinstance(value, Mapping):
        return None
    return {str(_text(name)): _number(each) for name, each in list(value.items())[:_MOST_TEXTS]}


def _steps_by_text(value: Any) -> dict[str, list[int]] | None:
    """Check which steps go by which text: the newest of many."""
    if not isinstance(value, Mapping):
        return None
    return {
        str(_text(text)): [step for step in steps if _count(step) is not None][-MOST_STEPS:]
        for text, steps in list(value.items())[:_MOST_TEXTS]
        if isinstance(steps, list | tuple)
    }


Check: TypeAlias = Callable[[Any], Any]

_TRANSFER: Final[Mapping[str, Check]] = {
    "step": _count,
    "name": _text,
    "tier": _text,
    "seconds": _number,
    "size_bytes": _count,
    "outcome": _text,
    "error": _text,
}
_KINDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "run": {
        "event": _text,
        "step": _count,
        "world_size": _count,
        "devices": _count,
        "seconds": _number,
        "lost_steps": _count,
        "lost_seconds": _number,
        "found_by": _text,
    },
    "save": {
        "step": _count,
        "name": _text,
        "reason": _text,
        "stall_seconds": _number,
        "slowdown_seconds": _number,
        "durable_seconds": _number,
        "uploaded_seconds": _number,
        "size_bytes": _count,
        "overhead": _number,
        "outcome": _text,
        "error": _text,
    },
    "load": _TRANSFER,
    "upload": _TRANSFER,
    "export": _TRANSFER,
    "retention": {"kept": _steps_by_text, "tier": _text},
    "prune": {"names": _texts, "size_bytes": _count, "why": _text, "tier": _text},
    "cadence": {
        "rule": _text,
        "interval_seconds": _number,
        "costs": _numbers,
        "mtbf_seconds": _number,
        "mtbf_source": _text,
    },
    "progress": {"step": _count, "training_seconds": _number},
}
"""Kind -> its fields. What does not pass the check is None."""


def record(kind: str, time: float, run: str, fields: Mapping[str, Any]) -> Record:
    """Make a record of known fields; those not given, and wrong values, are None."""
    own = {name: check(fields.get(name)) for name, check in _KINDS[kind].items()}
    return {"v": VERSION, "kind": kind, "time": round(time, 3), "run": str(_text(run)), **own}


def encode(records: Iterable[Record]) -> bytes:
    """Encode records, a line each, without fields that are None."""
    # In ASCII: names of directories need not be valid Unicode.
    known = ({name: value for name, value in each.items() if value is not None} for each in records)
    return b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in known)


def decode(content: bytes) -> list[Record]:
    """Read the lines that are records of a known kind; skip all others."""
    return [found for line in content.splitlines() if (found := _decoded(line)) is not None]


def _decoded(line: bytes) -> Record | None:
    if not line.startswith(_START) or len(line) > _LONGEST_LINE:
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("kind") not in list(_KINDS) or fields.get("v") != VERSION:
        return None
    time, run = _number(fields.get("time")), _text(fields.get("run"))
    if time is None or run is None:
        return None
    return record(fields["kind"], time, run, fields)


ENDINGS: Final = frozenset({"end", "preempted", "unclean"})

Trail: TypeAlias = Sequence[tuple[int, float]]
"""Steps of a run, with the seconds that it had been training by then; in order."""


class Experience(NamedTuple):
    """What the runs of a root have seen: failures, and seconds of training.

    Failures are unclean ends of runs that had trained, and preemptions that lost work. `device_seconds` are
    those of training, times devices.
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
    return [(start, 0.0), *((each["step"] or 0, _positive(each["training_seconds"])) for each in own)]


def seconds_at(step: int, trail: Trail) -> float:
    """Return the seconds of training at which a run came to a step, the last time."""
    for (low, began), (high, ended) in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
        if low <= step < high:
            return began + (ended - began) * (step - low) / (high - low)
    return trail[-1][1] if step >= trail[-1][0] else 0.0


def loss(trail: Trail, resumed: int | None) -> dict[str, float]:
    """Return steps and seconds after the checkpoint from which training goes on.

    `trail` is that of the run that ended, `resumed` the step of the checkpoint, if there was one.
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
    """A Gamma distribution of failures per second of a device: shape `weight`."""

    device_seconds: float
    weight: float


PRIOR: Final = Prior(device_seconds=50_700 * _HOUR, weight=0.02)
"""Llama 3: 419 interruptions in 54 days on 16,384 GPUs; docs/measurements.md has the weight."""


def failure_rate(history: Sequence[Record], devices: int, *, prior: Prior = PRIOR) -> FailureRate:
    """Estimate the mean time between failures of a job, of `read_history`.

    The posterior mean of the rate is (weight + failures) / (weight * device_seconds + exposure), where the
    exposure is in seconds of training times devices. It minimises the expected cost of an interval, which is
    linear in the rate.
    """
    seen = experience_of(history)
    rate = (prior.weight + seen.failures) / (prior.weight * prior.device_seconds + seen.device_seconds)
    devices, hours = max(1, devices), seen.seconds / _HOUR
    time = f"{hours:.0f}" if hours >= 10 or hours == 0 else f"{hours:.2g}"
    failures = f"{seen.failures} failure{'' if seen.failures == 1 else 's'} in {time} h of this root"
    known = f"prior 1 in {math.floor(prior.device_seconds / _HOUR):,} h of a GPU"
    source = f"{failures}, {known}, {devices} device{'' if devices == 1 else 's'}"
    return FailureRate(mtbf=1.0 / (rate * devices), source=source)
