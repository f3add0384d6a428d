"""The lines of the journal: JSON objects of few kinds, with checked fields.

The same check is made before a line is written and after it is read, so that nothing else gets in or out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from ckpt_core.disclosure import printable, public_url

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
    checks = _KINDS[kind]
    own = {name: check(fields.get(name)) for name, check in checks.items()}
    return {"v": VERSION, "kind": kind, "time": round(time, 3), "run": str(_text(run)), **own}


def encode(records: Iterable[Record]) -> bytes:
    """Encode records, a line each, without fields that are None."""
    # In ASCII: names of directories need not be valid Unicode.
    return b"".join(_line(each) for each in records)


def _line(each: Record) -> bytes:
    known = {name: value for name, value in each.items() if value is not None}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


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
