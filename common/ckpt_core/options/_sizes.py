"""Amounts of memory and rates as people write them."""

from __future__ import annotations

import math
import re
from typing import Any

from ckpt_core.errors import ConfigError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), start=1)},
}
_WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*(/\s*s)?\s*")


def parse_size(name: str, value: Any, *, rate: bool = False) -> int | None:
    """A number of bytes from a number, or from text such as "512 MiB" or "1.5 GB"; None stays None.

    Args:
        name: of the option, for messages.
        value: what was written; KB, MB, GB and TB are powers of 1000, KiB and so on of 1024.
        rate: whether it is bytes per second; "/s" may then follow the unit.

    Raises:
        ConfigError: it is none of these, or not above 0.
    """
    if value is None:
        return None
    size = _number(value, rate=rate)
    if size is None or not math.isfinite(size) or size < 1:
        example, unit = ("500 MB/s", "bytes per second") if rate else ("512 MiB", "bytes")
        raise ConfigError(
            f'{name} must be a number of {unit} above 0 or text like "{example}", not {value!r}'
        )
    return int(size)


def _number(value: Any, *, rate: bool) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    if found is None or (found[3] and not rate) or found[2].upper() not in _UNITS:
        return None
    number, unit = str(found[1]), str(found[2])
    return float(number) * _UNITS[unit.upper()]
