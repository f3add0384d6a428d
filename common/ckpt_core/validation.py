"""Checks of options and arguments of users.

Each check returns the problem as a phrase, or None, so that one error can list every offender.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any, TypeVar, cast

from ckpt_core.errors import ConfigError

T = TypeVar("T")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SMALLEST_PART = Fraction(1, 1_000_000)
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([smhd])\s*")

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), start=1)},
}
_WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*(/\s*s)?\s*")


def require(owner: str, *problems: str | None) -> None:
    """Raise one ConfigError that lists all problems, unless there are none."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError(f"{owner}: {'; '.join(found)}")


def integer(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> str | None:
    """Check a whole number, not a boolean, against a range."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        return (
            None if maximum is None or value <= maximum else f"{name} must be at most {maximum}, not {value}"
        )
    return f"{name} must be a whole number of at least {minimum}, not {value!r}"


def plain_integer(value: Any) -> Any:
    """Convert an integer of NumPy or in a tensor to an int; return others unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def mapping(name: str, value: Any) -> str | None:
    """Check that a value is a mapping."""
    return None if isinstance(value, Mapping) else f"{name} must be a mapping, not {value!r:.80}"


def integers(name: str, values: Any, *, minimum: int) -> str | None:
    """Check a non-empty collection of whole numbers."""
    if not isinstance(values, Collection) or isinstance(values, str | bytes) or not values:
        return f"{name} must be a non-empty list of whole numbers, not {values!r}"
    wrong = [value for value in values if integer(name, value, minimum=minimum)]
    return f"{name} must hold whole numbers of at least {minimum}, not {wrong!r}" if wrong else None


def positive(name: str, value: Any) -> str | None:
    """Check a finite number above zero, not a boolean."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return None
    return f"{name} must be a finite number above 0, not {value!r}"


def require_part(policy: str, fraction: Any, total_steps: Any) -> None:
    """Raise ConfigError unless they are a part of a training, and its length or None."""
    problem = positive("fraction", fraction)
    if problem is None and not _SMALLEST_PART <= fraction <= 1:
        problem = f"fraction must be between 0.000001 and 1, not {fraction!r}"
    require(policy, problem, None if total_steps is None else integer("total_steps", total_steps, minimum=1))


def seconds_of(value: Any) -> Any:
    """Convert "90s", "5m", "6h" or "2d" to seconds; return others unchanged."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else float(found[1]) * _SECONDS[found[2]]


def duration(name: str, value: Any, *, minimum: float | None = None) -> str | None:
    """Check finite seconds above 0 or of at least `minimum`, as a number or text."""
    plain = seconds_of(value)
    if positive(name, plain) is None or (minimum is not None and plain == minimum and plain is not False):
        return None
    least = "above 0" if minimum is None else f"of at least {minimum:g}"
    return f'{name} must be seconds {least}, as a number or as "90s", "5m", "6h" or "2d", not {value!r}'


def take_duration(owner: Any, name: str) -> None:
    """Replace a duration in a frozen value by its seconds: "15m" equals 900."""
    value = getattr(owner, name)
    require(type(owner).__name__, duration(name, value))
    object.__setattr__(owner, name, seconds_of(value))


def bytes_in(value: Any, *, rate: bool = False) -> float | None:
    """Return the bytes, or bytes per second, of a number or text; None of others."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    if found is None or (found[3] and not rate) or found[2].upper() not in _UNITS:
        return None
    number, unit = str(found[1]), str(found[2])
    return float(number) * _UNITS[unit.upper()]


def parse_size(name: str, value: Any, *, rate: bool = False) -> int | None:
    """Parse a number of bytes: a number, "512 MiB" or "1.5 GB"; None stays None."""
    if value is None:
        return None
    size = bytes_in(value, rate=rate)
    if size is None or not math.isfinite(size) or size < 1:
        example, unit = ("500 MB/s", "bytes per second") if rate else ("512 MiB", "bytes")
        raise ConfigError(
            f'{name} must be a number of {unit} above 0 or text like "{example}", not {value!r}'
        )
    return int(size)


def text(name: str, value: Any) -> str | None:
    """Check a non-empty string."""
    return None if isinstance(value, str) and value else f"{name} must be a non-empty string, not {value!r}"


def location(name: str, value: Any) -> str | None:
    """Check that a value is a path or URL."""
    plain = value.__fspath__() if hasattr(type(value), "__fspath__") else value
    if isinstance(plain, str) and plain:
        return None
    return f"{name} must be a path or URL, not {value!r:.80}"


def function(name: str, value: Any) -> str | None:
    """Check that a value is callable, or the name of a function to import."""
    module, _, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    if callable(value) or (module and attribute):
        return None
    # Anything but a name may be a secret that was meant for the function.
    shown = repr(value) if isinstance(value, str) else type(value).__name__
    return f'{name} must be a function or "package.module:function", not {shown}'


def imported(owner: str, named: Callable[..., T] | str) -> Callable[..., T]:
    """Import a function by its name, "package.module:function"; else ConfigError."""
    if not isinstance(named, str):
        return named
    module, _, attributes = named.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{owner}: cannot import {named!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{owner}: {named!r} is no function, but {type(found).__name__}")
    return cast("Callable[..., T]", found)


def boolean(name: str, value: Any) -> str | None:
    """Check that a value is True or False."""
    return None if isinstance(value, bool) else f"{name} must be true or false, not {value!r}"


def one_of(name: str, value: Any, allowed: Collection[str]) -> str | None:
    """Check that a value is one of a few words."""
    if isinstance(value, str) and value in allowed:
        return None
    return f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"


def instances(name: str, values: Any, kind: type) -> str | None:
    """Check a non-empty tuple of instances of `kind`."""
    if not isinstance(values, tuple) or not values:
        return f"{name} must be a non-empty tuple of {kind.__name__}, not {values!r}"
    wrong = [value for value in values if not isinstance(value, kind)]
    return f"{name} must hold {kind.__name__} objects, not {wrong!r}" if wrong else None
