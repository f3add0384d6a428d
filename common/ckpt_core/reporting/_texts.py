"""Figures as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

_DAYS: Final = 86_400.0
_HOURS: Final = 3_600.0
_MINUTES: Final = 60.0
_MONTHS: Final = 60
"""From so many days on, an axis shows dates."""


def seconds_text(seconds: float | None) -> str:
    """Format a duration: `340 ms`, `8.4 s`, `12 min`, `3.2 h`, `41 d`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 1:
        return f"{seconds * 1000:.3g} ms"
    for unit, scale in (("d", _DAYS), ("h", _HOURS), ("min", _MINUTES)):
        if size >= 2 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds)} s"


def at_least(text: str, *, exact: bool) -> str:
    """Return a figure, as a lower bound unless it is exact."""
    return text if exact else f"at least {text}"


def share_text(share: float | None) -> str:
    """Format a fraction: `0.24 %`, `97.3 %`."""
    return "?" if share is None or not math.isfinite(share) else f"{_digits(100 * share)} %"


def moment(time: float | None, span: float = 0.0) -> str:
    """Format a Unix time in UTC, as exactly as a time among others of that span needs.

    Args:
        time: to format; None if unknown.
        span: seconds from the earliest to the latest of them; 0 for a time of its own, to the second.
    """
    if time is None:
        return "?"
    try:
        found = datetime.fromtimestamp(time, UTC)
    except (ValueError, OverflowError, OSError):
        return "?"
    if 0 < span < _MINUTES:
        return f"{found:%Y-%m-%d %H:%M:%S}.{found.microsecond // 1000:03}"
    if span < _HOURS:
        return f"{found:%Y-%m-%d %H:%M:%S}"
    return f"{found:%Y-%m-%d %H:%M}" if span < _MONTHS * _DAYS else f"{found:%Y-%m-%d}"


def _digits(value: float) -> str:
    """Format with three digits, and without an exponent."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if size < 10 else 1}f}"
