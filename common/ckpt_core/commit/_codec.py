"""Strict JSON in and out: what is written reads everywhere, what is read is believed only after a check."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, final

from ckpt_core.checksums import checksum
from ckpt_core.errors import ConfigError, CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.names import FORMAT_VERSION

T = TypeVar("T")

# The largest integer that every JSON reader holds exactly; 8 PiB as a size in bytes.
MAX_COUNT: Final = 2**53

_CHECKSUM: Final = b',"checksum":"'


def encode(fields: Mapping[str, Any]) -> bytes:
    """Compact JSON, the same bytes for the same fields.

    Raises:
        ConfigError: a value is not plain JSON.
    """
    try:
        text = json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"annotations and metrics must be plain JSON values (and NaN only in metrics): {error}"
        ) from error


def add_checksum(content: bytes) -> bytes:
    """An encoded object with one more field, last: the checksum of what it was without."""
    return b"".join((content[:-1], _CHECKSUM, checksum(content).encode(), b'"}'))


def has_checksum(content: bytes, *, source: str) -> bool:
    """Whether the object names its checksum; a wrong one is damage, whatever else the content says.

    Raises:
        CorruptCheckpointError: the content is not what `add_checksum` made.
    """
    body, found, rest = content.rpartition(_CHECKSUM)
    if found and rest != checksum(body + b"}").encode() + b'"}':
        raise corrupt(source, "does not have the checksum that it names")
    return bool(found)


def corrupt(source: str, problem: str) -> CorruptCheckpointError:
    """The error for a file that is not as it was written."""
    return CorruptCheckpointError(
        f"{source} {problem}", failures=(FileFailure(path=source, problem=problem),)
    )


def numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers as JSON knows them; NaN and infinities, which it does not know, become text.

    A loss that diverged must not keep a checkpoint from being written.
    """
    return {name: float(v) if math.isfinite(v) else str(float(v)) for name, v in values.items()}


@final
class Fields:
    """The fields of a JSON object of unknown origin; every getter raises ValueError for what is not right."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.format_version = self.count("format_version", least=1)

    @classmethod
    @contextmanager
    def parse(cls, content: bytes, *, source: str) -> Generator[Fields]:
        """Read one object; whatever turns out wrong with it inside the block becomes one of our errors.

        Raises:
            IncompatibleCheckpointError: it was written by a newer version.
            CorruptCheckpointError: it is malformed.
        """
        try:
            fields = cls(_object(content))
            fields._check_version(source)
            yield fields
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            raise corrupt(source, f"is malformed: {error}") from error

    def _check_version(self, source: str) -> None:
        if self.format_version > FORMAT_VERSION:
            raise IncompatibleCheckpointError(
                f"{source} was written by a newer ckpt-suite (format {self.format_version}), "
                f"this one reads up to {FORMAT_VERSION}: upgrade ckpt-suite"
            )

    def get(self, name: str, kind: type[T]) -> T:
        """A field of exactly that type."""
        value = self._fields.get(name)
        if type(value) is not kind:
            raise ValueError(f"{name!r} should be {kind.__name__}, not {type(value).__name__}")
        return value

    def count(self, name: str, *, least: int = 0) -> int:
        """A field that is an integer of sane size."""
        return count(self._fields.get(name), name, least=least)

    def number(self, name: str) -> float:
        """A field that is a finite number."""
        value: Any = self._fields.get(name)
        if type(value) not in {int, float} or not math.isfinite(value):
            raise ValueError(f"{name!r} should be a finite number, not {value!r:.80}")
        return float(value)

    def mapping(self, name: str, kind: type[T]) -> dict[str, T]:
        """A field that maps text to values of exactly that type."""
        values = self.get(name, dict)
        if any(type(value) is not kind for value in values.values()):
            raise ValueError(f"{name!r} should hold only {kind.__name__} values")
        return values

    def numbers(self, name: str) -> dict[str, float]:
        """A field as `numbers` encodes it."""
        values = self.get(name, dict)
        if any(type(value) not in {int, float, str} for value in values.values()):
            raise ValueError(f"{name!r} should hold only numbers")
        return {key: float(value) for key, value in values.items()}


def count(value: object, name: str, *, least: int = 0) -> int:
    """`value` if it is an integer between `least` and `MAX_COUNT`, else ValueError."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise ValueError(f"{name!r} should be an integer from {least} to 2**53, not {value!r:.80}")
    return value


def _object(content: bytes) -> dict[str, Any]:
    value = json.loads(content)
    if type(value) is not dict:
        raise ValueError("not a JSON object")
    return value
