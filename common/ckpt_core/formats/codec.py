"""Strict JSON: portable when written, checked when read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, final

from ckpt_core.errors import ConfigError, CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.formats.checksums import checksum
from ckpt_core.names import FORMAT_VERSION, MANIFEST, MARKER

T = TypeVar("T")

# The largest integer that every JSON reader holds exactly; 8 PiB as a size in bytes.
MAX_COUNT: Final = 2**53

_CHECKSUM: Final = b',"checksum":"'
_MAX_PATH_BYTES: Final = 1024
_RESERVED: Final = frozenset({MANIFEST, MARKER})
_SEGMENT: Final = r"(?!\.{1,2}(?:/|\Z))[^\x00-\x1f\x7f\\/\ud800-\udfff]+"
_PATH: Final = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def encode(fields: Mapping[str, Any]) -> bytes:
    """Encode as compact JSON, the same bytes for the same fields."""
    try:
        return json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"annotations and metrics must be plain JSON values (and NaN only in metrics): {error}"
        ) from error


def add_checksum(content: bytes) -> bytes:
    """Add the checksum of an encoded object as its last field."""
    return b"".join((content[:-1], _CHECKSUM, checksum(content).encode(), b'"}'))


def has_checksum(content: bytes, *, source: str) -> bool:
    """Return whether the object holds its checksum; raise if it is wrong."""
    body, found, rest = content.rpartition(_CHECKSUM)
    if found and rest != checksum(body + b"}").encode() + b'"}':
        raise corrupt(source, "does not have the checksum that it names")
    return bool(found)


def corrupt(source: str, problem: str) -> CorruptCheckpointError:
    """Build the error for a file that differs from what was written."""
    return damage(source, problem).retold(f"{source} {problem}")


def damage(path: str, problem: str) -> CorruptCheckpointError:
    """Build the error for a file or entry that cannot be what was written."""
    failure = FileFailure(path=path, problem=problem)
    return CorruptCheckpointError(str(failure), failures=(failure,))


def numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Convert numbers for JSON; NaN and infinities become text.

    A loss that diverged must not keep a checkpoint from being written.
    """
    return {name: float(v) if math.isfinite(v) else str(float(v)) for name, v in values.items()}


@final
class Fields:
    """The fields of an untrusted JSON object; getters raise ValueError for bad values."""

    def __init__(self, fields: dict[str, Any]) -> None:
        if type(fields) is not dict:
            raise ValueError("not a JSON object")
        self._fields = fields

    @classmethod
    @contextmanager
    def parse(
        cls,
        content: bytes,
        *,
        source: str,
        oldest: int = 1,
        newest: int = FORMAT_VERSION,
        summed: bool = False,
    ) -> Generator[Fields]:
        """Read one object, with its checksum if `summed`; turn errors inside into ours.

        Raises:
            IncompatibleCheckpointError: it was written by a newer version, or is of a format before `oldest`.
            CorruptCheckpointError: it is malformed.
        """
        try:
            # First: a flipped bit in the version number must not pass for a newer format.
            is_right = not summed or has_checksum(content, source=source)
            fields = cls(json.loads(content))
            version = fields.format_version
            if not is_right and version <= newest:
                raise ValueError("it does not name its checksum")
            if version < oldest:
                raise IncompatibleCheckpointError(
                    f"{source} is of an older format ({version}), not readable by this version of ckpt-suite"
                )
            if version > newest:
                raise IncompatibleCheckpointError(
                    f"{source} was written by a newer ckpt-suite (format {version}), "
                    f"this one reads up to {newest}: upgrade ckpt-suite"
                )
            yield fields
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            raise corrupt(source, f"is malformed: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    @property
    def format_version(self) -> int:
        """The format version that the object states."""
        return self.count("format_version", least=1)

    def get(self, name: str, kind: type[T]) -> T:
        """Return a field of exactly that type."""
        value = self._fields.get(name)
        if type(value) is not kind:
            raise ValueError(f"{name!r} should be {kind.__name__}, not {type(value).__name__}")
        return value

    def optional(self, name: str) -> Fields | None:
        """Return a field that is a JSON object, None if absent."""
        return Fields(self.get(name, dict)) if name in self._fields else None

    def count(self, name: str, *, least: int = 0) -> int:
        """Return a field that is an integer of sane size."""
        return count(self._fields.get(name), name, least=least)

    def number(self, name: str) -> float:
        """Return a field that is a finite number."""
        value: Any = self._fields.get(name)
        if type(value) not in {int, float} or not math.isfinite(value):
            raise ValueError(f"{name!r} should be a finite number, not {value!r:.80}")
        return float(value)

    def objects(self, name: str) -> list[Fields]:
        """Return a field that is a list of JSON objects."""
        values = self.get(name, list)
        if not {dict}.issuperset(map(type, values)):
            raise ValueError(f"{name!r} should hold only objects")
        return [Fields(value) for value in values]

    def mapping(self, name: str, kind: type[T]) -> dict[str, T]:
        """Return a field that maps text to values of exactly that type."""
        values = self.get(name, dict)
        if any(type(value) is not kind for value in values.values()):
            raise ValueError(f"{name!r} should hold only {kind.__name__} values")
        return values

    def numbers(self, name: str) -> dict[str, float]:
        """Return a field that `numbers` encoded."""
        values = self.get(name, dict)
        if any(type(value) not in {int, float, str} for value in values.values()):
            raise ValueError(f"{name!r} should hold only numbers")
        return {key: float(value) for key, value in values.items()}


def count(value: object, name: str, *, least: int = 0) -> int:
    """Return `value` if it is an integer from `least` to `MAX_COUNT`, else ValueError."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise ValueError(f"{name!r} should be an integer from {least} to 2**53, not {value!r:.80}")
    return value


def file_paths(values: Sequence[Any]) -> None:
    """Raise ValueError unless all are relative paths, as below, each listed once."""
    if len(set(relative_paths(values))) != len(values):
        raise ValueError("a file is listed twice")


def relative_paths(values: Sequence[Any]) -> Sequence[str]:
    """Return `values` if all are safe relative paths on every platform and storage.

    They are checked together first: a checkpoint of a large run has tens of thousands of files.

    Raises:
        ValueError: one leads out of the checkpoint directory, or is the name of the manifest or the marker.
    """
    if {str}.issuperset(map(type, values)) and all(map(_PATH.fullmatch, values)):
        longest = max(map(len, map(str.encode, values)), default=0)
        if longest <= _MAX_PATH_BYTES and _RESERVED.isdisjoint(values):
            return values
    bad = next(
        value
        for value in values
        if type(value) is not str
        or not _PATH.fullmatch(value)
        or value in _RESERVED
        or len(value.encode()) > _MAX_PATH_BYTES
    )
    raise ValueError(f"file path {bad!r:.80} is not a relative path inside the checkpoint directory")
