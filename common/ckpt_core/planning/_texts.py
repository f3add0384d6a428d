"""Sizes, times, rates and money as users write and read them."""

from __future__ import annotations

from typing import Any, Final

from ckpt_core.errors import ConfigError
from ckpt_core.options import parse_size
from ckpt_core.validation import duration, require, seconds_of

_GB: Final = 1e9
_ALMOST_ALL: Final = 0.9


def seconds_from(name: str, text: str) -> float:
    """Parse a time above 0: "90", "30m", "6h", "2d".

    Raises:
        ConfigError: it is none.
    """
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    require("time", duration(name, value))
    return float(seconds_of(value))


def rate_of(name: str, text: str) -> float:
    """Parse bytes per second: a number is GB/s; or text such as "500 MB/s".

    Raises:
        ConfigError: it is none, or not above 0.
    """
    try:
        number = float(text)
    except ValueError:
        return float(parse_size(name, text, rate=True) or 0)
    if 0 < number < float("inf"):
        return number * _GB
    raise ConfigError(f'{name} must be above 0, in GB/s or as text such as "500 MB/s", not {text!r}')


def size_text(size: float) -> str:
    """Format bytes in powers of 1000, as prices and rates are: `140.0 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} PB"


def seconds_text(seconds: float) -> str:
    """Format a time: `0.57 s`, `2.6 min`, `5.1 h`, `3.0 days`."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} s"


def share_text(share: float) -> str:
    """Format a share: `1.25 %`."""
    return f"{100 * share:.4g} %" if share > _ALMOST_ALL else f"{100 * share:.3g} %"


def dollars_text(dollars: float) -> str:
    """Format money: `$2,202`, and small sums with cents."""
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"
