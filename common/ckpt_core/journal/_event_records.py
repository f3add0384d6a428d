"""Telemetry of a manager, translated into records of the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckpt_core.disclosure import public_url
from ckpt_core.telemetry import Event

Fields: TypeAlias = Mapping[str, Any]


ROOT: Final = "root"


def _as_given(event: Event) -> Fields:
    return event.attributes


def _span(event: Event) -> Fields:
    return {
        **event.attributes,
        "seconds": event.duration_seconds,
        "outcome": "failed" if event.phase == "failed" or event.name == "upload.failed" else "done",
    }


_KINDS: Final[Mapping[str, tuple[str, Callable[[Event], Fields]]]] = {
    "save.cost": ("save", _as_given),
    "load": ("load", _span),
    "upload": ("upload", _span),
    "upload.failed": ("upload", _span),
    "prune": ("prune", _as_given),
    "retention": ("retention", _as_given),
    "cadence": ("cadence", _as_given),
}
"""Name of the event -> kind of the record, and what makes its fields."""


def is_wanted(event: Event) -> bool:
    """Return whether an event becomes a record, or says that a save was committed."""
    return event.phase != "started" and (event.name in _KINDS or event.name == "save.commit")


def translate(event: Event, root: str) -> tuple[str, Fields] | None:
    """Return kind and fields of the record of an event; None if it has none.

    The place of the root is not written into it: it may be copied elsewhere.
    """
    if event.name not in _KINDS:
        return None
    kind, fields_of = _KINDS[event.name]
    fields = fields_of(event)
    place, error = str(fields.get("tier", fields.get("to", ROOT))), fields.get("error")
    tier = ROOT if place == root else public_url(place)
    return kind, {**fields, "tier": tier, "error": None if error is None else str(error).replace(root, ROOT)}
