"""Telemetry of a manager, translated into records of the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckpt_core.disclosure import public_url
from ckpt_core.telemetry import Event

Fields: TypeAlias = Mapping[str, Any]


def _as_given(event: Event) -> Fields:
    return event.attributes


def _span(event: Event) -> Fields:
    own = event.attributes
    tier = own.get("tier", own.get("to"))
    return {
        **own,
        "tier": None if tier is None else public_url(str(tier)),
        "seconds": event.duration_seconds,
        "outcome": "failed" if event.phase == "failed" or event.name == "upload.failed" else "done",
    }


_KINDS: Final[Mapping[str, tuple[str, Callable[[Event], Fields]]]] = {
    "save.cost": ("save", _as_given),
    "load": ("load", _span),
    "upload": ("upload", _span),
    "upload.failed": ("upload", _span),
    "prune": ("prune", _as_given),
    "cadence": ("cadence", _as_given),
}
"""Name of the event -> kind of the record, and what makes its fields."""


def is_wanted(event: Event) -> bool:
    """Return whether an event becomes a record, or says that a save was committed."""
    return event.phase != "started" and (event.name in _KINDS or event.name == "save.commit")


def translate(event: Event) -> tuple[str, Fields] | None:
    """Return kind and fields of the record of an event; None if it has none."""
    found = _KINDS.get(event.name)
    return None if found is None else (found[0], found[1](event))
