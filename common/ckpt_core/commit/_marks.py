"""Pins and damage marks: small files of the root, changed under a lock."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final
from weakref import WeakKeyDictionary

from ckpt_core.commit._manifest import Marker
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, CorruptCheckpointError, FileFailure
from ckpt_core.formats import codec
from ckpt_core.names import DAMAGED, FORMAT_VERSION, PINS
from ckpt_core.storage import Storage, read_small

_logger = logger_of(__name__)

MAX_PINS_BYTES: Final = 16 << 20
MAX_MARKS: Final = 1000
"""Of either kind; the latest stay."""
MAX_MARKS_BYTES: Final = 16 << 20
"""More than `MAX_MARKS` marks with names and problems of maximum length take."""
_MAX_PROBLEM: Final = 400
_MAX_ID: Final = 64
_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.01
_PINS_REMEDY: Final = "no checkpoint is pruned until the file is repaired or deleted"

_warned: Final[WeakKeyDictionary[Storage, dict[str, str]]] = WeakKeyDictionary()


def _note_read(storage: Storage, key: str, problem: str = "", *, so_that: str = "") -> None:
    """Log why a file of the root cannot be read, unless that was noted last."""
    noted = _warned.setdefault(storage, {})
    if problem and noted.get(key) != problem:
        _logger.warning("%s/%s cannot be read, so that %s: %s", storage.url, key, so_that, problem)
    noted[key] = problem


@contextmanager
def locked(storage: Storage, key: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> Generator[None]:
    """Exclude other processes and threads from changing `key` in this block.

    Where storage cannot lock (object stores, some network filesystems) nothing is excluded: of two concurrent
    changes one may be lost, but the file stays readable.

    Raises:
        TimeoutError: another process has held the lock for that long; a change takes milliseconds.
    """
    deadline = time.monotonic() + patience_seconds
    while (lock := storage.try_lock(key)) is None:
        if time.monotonic() >= deadline:
            pid = storage.lock_holder(key)
            holder = "another process" if pid is None else f"another process (pid {pid})"
            holder = "this very process" if pid == os.getpid() else holder
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"{holder} has held the lock for {patience_seconds:g} s; a change takes milliseconds. If it "
                "is stopped, end it, then try again",
                f"{storage.url}/{key}",
            )
        time.sleep(_PAUSE_SECONDS)
    try:
        yield
    finally:
        lock.release()


def read_pins(storage: Storage) -> dict[int, str]:
    """Return step -> reason; empty if nothing was ever pinned.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        content = read_small(storage, PINS, MAX_PINS_BYTES)
    except FileNotFoundError:
        return {}
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {_PINS_REMEDY}", failures=error.failures) from error
    try:
        return {int(step): str(reason) for step, reason in json.loads(content)["pins"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        failure = FileFailure(path=PINS, problem=f"malformed: {error}")
        raise CorruptCheckpointError(
            f"{storage.url}/{failure}; {_PINS_REMEDY}", failures=(failure,)
        ) from error


def known_pins(storage: Storage) -> dict[int, str] | None:
    """Read the pins for a listing; None, with a warning, if they cannot be read."""
    try:
        pins = read_pins(storage)
    except CorruptCheckpointError as error:
        problem = "; ".join(failure.problem for failure in error.failures)
        _note_read(storage, PINS, problem, so_that=_PINS_REMEDY)
        return None
    _note_read(storage, PINS)
    return pins


def replace_pins(storage: Storage, pins: Mapping[int, str]) -> None:
    """Write all pins; readers see the old ones or the new ones."""
    fields = {"pins": {str(step): pins[step] for step in sorted(pins)}}
    content = json.dumps(fields, indent=2).encode() + b"\n"
    if len(content) > MAX_PINS_BYTES:
        raise ConfigError(f"the reasons of {len(pins)} pins have {len(content)} bytes in all: shorten them")
    storage.replace(PINS, content)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The problem of the checkpoint that one save wrote, found at a Unix time.

    A later checkpoint of the same name is not marked.
    """

    save_id: str
    problem: str
    found: float

    @classmethod
    def of(cls, marker: Marker, problem: str) -> Mark:
        """Build the mark of the checkpoint with that marker, found now."""
        return cls(save_id=marker.save_id[:_MAX_ID], problem=problem[:_MAX_PROBLEM], found=time.time())

    def applies_to(self, save_id: str) -> bool:
        """Return whether the mark applies to the checkpoint that this save wrote."""
        return self.save_id == save_id[:_MAX_ID]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """All marks of a root, by name of the checkpoint."""

    damaged: Mapping[str, Mark] = field(default_factory=dict[str, Mark])
    bad: Mapping[str, Mark] = field(default_factory=dict[str, Mark])


def read_marks(storage: Storage) -> Marks:
    """Read the marks; none if nothing was ever marked.

    Raises:
        CorruptCheckpointError: the file is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
    """
    try:
        content = read_small(storage, DAMAGED, MAX_MARKS_BYTES)
    except FileNotFoundError:
        return Marks()
    has_checksum = codec.has_checksum(content, source=DAMAGED)
    with codec.Fields.parse(content, source=DAMAGED) as fields:
        if not has_checksum:
            raise ValueError("it does not name its checksum")
        return Marks(
            damaged=_read(fields, "checkpoints"), bad=_read(fields, "bad") if "bad" in fields else {}
        )


def _read(fields: codec.Fields, kind: str) -> dict[str, Mark]:
    found = {name: codec.Fields(mark) for name, mark in fields.mapping(kind, dict).items()}
    return {
        name: Mark(
            save_id=mark.get("save_id", str),
            problem=mark.get("problem", str)[:_MAX_PROBLEM],
            found=mark.number("found"),
        )
        for name, mark in found.items()
    }


def known_marks(storage: Storage) -> Marks:
    """Read the marks for a listing; none, with a warning, if they cannot be read."""
    try:
        marks = read_marks(storage)
    except (CheckpointError, OSError) as error:
        effect = "nothing counts as damaged before it is verified again, and nothing as bad"
        _note_read(storage, DAMAGED, str(error), so_that=effect)
        return Marks()
    _note_read(storage, DAMAGED)
    return marks


def marks_to_change(storage: Storage) -> Marks:
    """Read the marks before they are replaced; a malformed file counts as empty.

    Raises:
        IncompatibleCheckpointError: they were written by a newer version.
    """
    try:
        return read_marks(storage)
    except CorruptCheckpointError as error:
        _logger.warning("%s: the damage marks cannot be read and are discarded: %s", storage.url, error)
        return Marks()


def problem_of(marks: Mapping[str, Mark], name: str, save_id: str) -> str | None:
    """Return the problem recorded for that name and save, or None."""
    mark = marks.get(name)
    return mark.problem if mark is not None and mark.applies_to(save_id) else None


def replace_marks(storage: Storage, marks: Marks) -> None:
    """Write the latest `MAX_MARKS` marks; readers see the old ones or the new ones."""

    def latest(marks: Mapping[str, Mark]) -> dict[str, Any]:
        names = sorted(marks, key=lambda name: (marks[name].found, name))[-MAX_MARKS:]
        return {name: asdict(marks[name]) for name in names}

    fields = {"format_version": FORMAT_VERSION, "checkpoints": latest(marks.damaged)}
    if marks.bad:
        fields["bad"] = latest(marks.bad)
    # In ASCII: the name of a directory need not be valid Unicode.
    content = json.dumps(fields, separators=(",", ":")).encode()
    storage.replace(DAMAGED, codec.add_checksum(content))
