"""A digest of the configuration, equal for equal values, and without secrets.

They are left out before it is made, since a short one could be guessed and compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from typing import Any, Final, final

from ckpt_core.disclosure import logger_of, public_url

MAX_VALUES: Final = 10_000
"""Of further values only the types count: a configuration is small, but may refer to data."""

_DEEPEST: Final = 20
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|\W+")
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|passcode|credential|(?:private|access|api)_?key|conn(?:ection)?_?str|bearer|web_?hook"
    r"|(?:^|_)(?:auth|creds?|dsn|jwt|pwd|psk|sas|cookies?|(?:db|database|sas|(?:pre)?signed)_?ur[il]s?)(?:_|$)"
    r"|(?:^|_)(?:pins?|pass|pat|otp|sig)$|(?:token|key|auth|pwd)s?$"
)
_COUNT: Final = re.compile(
    r"(?:^|_)(?:max|min|num|n|total|new|train|eval|context|batch|warmup|per)_.*(?:tokens|keys)$"
)
"""How many there are, which counts, unlike what they are."""
_NAMED: Final = frozenset({"dtype", "device"})
_logger = logger_of(__name__)


def configuration_digest(configure: Callable[[], Any]) -> str:
    """Return the SHA-256 of the canonical form of a configuration; "" if it has none.

    Mappings count without order and without names of secrets, dataclasses by type and fields, functions and
    classes by name, other objects by type.

    Args:
        configure: returns nested values; it may call code of a host.
    """
    try:
        form = _Canonical().form(configure())
        text = json.dumps(form, sort_keys=True, separators=(",", ":"))
    except Exception as error:  # noqa: BLE001 - a save must not fail for it; the log has it
        _logger.debug("the configuration has no digest: %s", error)
        return ""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


@final
class _Canonical:
    def __init__(self) -> None:
        self._left = MAX_VALUES

    def form(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            return _type_of(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float | str | Enum | PathLike | bytes):
            return _plain(value)
        return self._nested(value, depth + 1)

    def _nested(self, value: Any, depth: int) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            found = {field.name: getattr(value, field.name, None) for field in fields(value)}
            return {"$type": _type_of(value), **self._mapping(found, depth)}
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, Set):
            return sorted((self.form(each, depth) for each in value), key=repr)
        if isinstance(value, Sequence):
            return [self.form(each, depth) for each in value]
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        kind = type(value)
        return str(value) if kind.__module__ == "torch" and kind.__name__ in _NAMED else _type_of(value)

    def _mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        named = {str(key): value for key, value in values.items()}
        return {key: self.form(value, depth) for key, value in named.items() if not _is_secret(key)}


def _is_secret(name: str) -> bool:
    words = _HUMP.sub("_", name).lower()
    return _SECRET.search(words) is not None and _COUNT.search(words) is None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return f"{_type_of(value)}.{value.name}"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        return int(value)
    text = value if isinstance(value, str) else fspath(value) if isinstance(value, PathLike) else value.hex()
    return public_url(text) if isinstance(text, str) else text.hex()


def _type_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
