"""Which checkpoints there are: read from the markers alone, so that nothing else can be mistaken for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.commit._locked import locked
from ckpt_core.commit._manifest import MAX_MARKER_BYTES, Manifest, Marker
from ckpt_core.commit._marks import Mark, known_marks, marks_to_change, problem_of, replace_marks
from ckpt_core.commit._occupant import holds_torn_save
from ckpt_core.commit._pins import read_pins, replace_pins
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
)
from ckpt_core.names import (
    DAMAGED,
    MANIFEST,
    MARKER,
    PINS,
    is_corrupt,
    is_incomplete,
    is_replaced,
    is_trash,
    parse_step_name,
    set_aside,
    step_name,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logging.getLogger(__name__)

_MOST_LISTINGS: Final = 8
_PINS_UNREADABLE: Final = f"{PINS} cannot be read, so every checkpoint is kept"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What is in a root. A marker that cannot be read says that something was committed, but not what."""

    committed: list[CheckpointInfo]
    unreadable: dict[str, CheckpointError | OSError]


@final
class Catalog:
    """The checkpoints of one root.

    Holds no state of its own: every call reads the storage anew, from any thread of any process. Pins and
    marks are read, changed and replaced under a lock, so that processes that change them at the same moment
    lose nothing of each other's; where storage cannot lock, such as object stores, the last one wins.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def committed(self) -> list[CheckpointInfo]:
        """Every committed checkpoint, oldest step first.

        Any directory with a readable marker counts, whatever its name; the step is what the marker says.
        A directory whose marker cannot be read is left out, with a warning in the log.
        """
        survey = self.survey()
        for name, error in survey.unreadable.items():
            _logger.warning("%s/%s is left out: %s", self._storage.url, name, error)
        return survey.committed

    def survey(self) -> Survey:
        """Every committed checkpoint, oldest step first, and every directory whose marker cannot be read.

        The job that owns the root may commit and prune meanwhile; then it is listed again, lest the old one
        be gone and the new one not be seen.
        """
        for _ in range(_MOST_LISTINGS - 1):
            listed = _countable(self._storage)
            survey, missing = _survey(self, self._storage, listed)
            if not missing or _countable(self._storage) == listed:
                return survey
        return _survey(self, self._storage, _countable(self._storage))[0]

    def latest(self) -> CheckpointInfo | None:
        """The committed checkpoint with the highest step, or None."""
        infos = self.committed()
        return infos[-1] if infos else None

    def find(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """The newest committed checkpoint of that step, or the one of that name.

        Raises:
            CheckpointNotFoundError: there is none; the message names those that are there.
            CorruptCheckpointError: its marker is damaged.
            IncompatibleCheckpointError: it was written by a newer version.
        """
        survey = self.survey()
        for info in reversed(survey.committed):
            if step in {None, info.step} and name in {None, info.name, set_aside(info.name)}:
                return info
        expected = step_name(step or 0) if name is None else name
        if expected in survey.unreadable:
            raise _placed(f"{self._storage.url}/{expected}", survey.unreadable[expected])
        wanted = f"step {step}" if name is None else f"checkpoint {name!r}"
        there = ", ".join(str(info.step) for info in survey.committed) or "none"
        raise CheckpointNotFoundError(
            f"no committed {wanted} in {self._storage.url}; committed steps there: {there}"
        )

    def marker(self, name: str) -> Marker:
        """The commit marker of directory `name`; under the name of a torn or damaged directory, none counts.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: the marker is malformed.
            IncompatibleCheckpointError: the marker was written by a newer version.
        """
        try:
            if not can_count(name):
                raise FileNotFoundError
            with self._storage.open(f"{name}/{MARKER}") as stream:
                content = stream.read(MAX_MARKER_BYTES + 1)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{self._storage.url}/{name} holds no committed checkpoint: there is no {MARKER}"
            ) from None
        if len(content) > MAX_MARKER_BYTES:
            raise _corrupt(f"{self._storage.url}/{name}", MARKER, "too large to be a commit marker")
        return Marker.from_bytes(content)

    def manifest(self, name: str) -> Manifest:
        """The manifest of directory `name`, the one that was committed.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: marker or manifest are malformed, or do not belong together.
            IncompatibleCheckpointError: they were written by a newer version.
        """
        marker, place = self.marker(name), f"{self._storage.url}/{name}"
        try:
            content = self._storage.read_bytes(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise _corrupt(place, MANIFEST, "missing") from None
        if not marker.matches(content):
            problem = f"not the file that was committed: its digest differs from {MARKER}'s"
            raise _corrupt(place, MANIFEST, problem)
        return Manifest.from_bytes(content)

    def torn(self) -> list[str]:
        """Directories of saves and prunes that did not end: being written just now, or left by a crash."""
        in_place = not self._storage.supports_rename
        return [
            name
            for name in _directories(self._storage)
            if is_incomplete(name) or is_trash(name) or (in_place and _is_torn_step(self._storage, name))
        ]

    def quarantined(self) -> list[str]:
        """Directories of damaged checkpoints that were moved aside; nobody but a person deletes them."""
        return [name for name in _directories(self._storage) if is_corrupt(name)]

    def replaced(self) -> list[str]:
        """What was not ours and had the name of a checkpoint: moved aside, and left for a person."""
        return [entry.name for entry in self._storage.list("") if is_replaced(entry.name)]

    def pins(self) -> dict[int, str]:
        """Step -> reason, for every step protected from pruning.

        Raises:
            CorruptCheckpointError: the file of pins cannot be read.
        """
        return read_pins(self._storage)

    def pin(self, step: int, reason: str) -> None:
        """Protect a committed step from pruning.

        Raises:
            CheckpointNotFoundError: the step is not committed.
            CorruptCheckpointError: the file of pins cannot be read.
            OSError: the pin could not be written.
        """
        self.find(step=step)
        with locked(self._storage, PINS):
            replace_pins(self._storage, self.pins() | {step: reason})

    def unpin(self, step: int) -> None:
        """Take a pin away; harmless where there is none.

        Raises:
            CorruptCheckpointError: the file of pins cannot be read.
            OSError: the pins could not be written.
        """
        if step not in self.pins():
            return
        with locked(self._storage, PINS):
            pins = self.pins()
            if pins.pop(step, None) is not None:
                replace_pins(self._storage, pins)

    def known_damage(self, name: str) -> str | None:
        """What a mark says is wrong with checkpoint `name`; None if it is not marked.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: its marker is malformed.
            IncompatibleCheckpointError: its marker was written by a newer version.
        """
        return problem_of(known_marks(self._storage), name, self.marker(name))

    def mark_damaged(self, name: str, problem: str) -> None:
        """Tell everyone to come that checkpoint `name` did not verify, and why, in words.

        The mark is of the checkpoint that has the name now: one that takes its place is not marked. The
        caller owns the root (see `Lease`). Marks of checkpoints that are gone are dropped on the way.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: its marker is malformed; it counts for nobody, so no mark is needed.
            IncompatibleCheckpointError: its marker, or the file of marks, was written by a newer version.
            OSError: the mark could not be written.
        """
        marker = self.marker(name)
        mark = Mark.of(marker, problem, found=time.time())
        if mark.says_as_much_as(marks_to_change(self._storage).get(name)):
            return
        with locked(self._storage, DAMAGED):
            marks = marks_to_change(self._storage)
            replace_marks(self._storage, _in_force(self, marks) | {name: mark})

    def unmark(self, name: str) -> None:
        """Take a mark away, because the checkpoint is whole, or gone; harmless where there is none.

        Raises:
            IncompatibleCheckpointError: the file of marks was written by a newer version.
            OSError: the marks could not be written.
        """
        if name not in marks_to_change(self._storage):
            return
        with locked(self._storage, DAMAGED):
            marks = marks_to_change(self._storage)
            if marks.pop(name, None) is not None:
                replace_marks(self._storage, _in_force(self, marks))


def _directories(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.list("") if entry.is_directory]


def _countable(storage: Storage) -> list[str]:
    return [name for name in _directories(storage) if can_count(name)]


def _survey(catalog: Catalog, storage: Storage, names: Sequence[str]) -> tuple[Survey, bool]:
    """The survey of these directories, and whether any of them has no marker."""
    pins, marks = _pins_or_none(storage), known_marks(storage)
    committed: list[CheckpointInfo] = []
    unreadable: dict[str, CheckpointError | OSError] = {}
    for name in names:
        try:
            marker = catalog.marker(name)
        except CheckpointNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            unreadable[name] = error
        else:
            pinned = _PINS_UNREADABLE if pins is None else pins.get(marker.step)
            committed.append(marker.info(name, pinned, damaged=problem_of(marks, name, marker)))
    missing = len(committed) + len(unreadable) < len(names)
    committed = _without_replaced(committed)
    committed.sort(key=lambda info: (info.step, info.created))
    return Survey(committed=committed, unreadable=unreadable), missing


def _without_replaced(committed: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Leave out what was set aside for a checkpoint that has its name by now."""
    names = {info.name for info in committed}
    return [info for info in committed if set_aside(info.name) not in names]


def _is_torn_step(storage: Storage, name: str) -> bool:
    return (
        parse_step_name(name) is not None
        and not storage.exists(f"{name}/{MARKER}")
        and holds_torn_save(storage, name)
    )


def _corrupt(place: str, path: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=path, problem=problem)
    return CorruptCheckpointError(f"{place}/{failure}", failures=(failure,))


def _pins_or_none(storage: Storage) -> dict[int, str] | None:
    try:
        return read_pins(storage)
    except CorruptCheckpointError as error:
        _logger.warning("%s", error)
        return None


def _in_force(catalog: Catalog, marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """The marks whose checkpoints are still there, as far as that can be told."""
    return {name: mark for name, mark in marks.items() if _may_mean(catalog, name, mark)}


def _may_mean(catalog: Catalog, name: str, mark: Mark) -> bool:
    try:
        return mark.means(catalog.marker(name))
    except CheckpointNotFoundError:
        return False
    except (CheckpointError, OSError):
        return True


def _placed(place: str, error: CheckpointError | OSError) -> CheckpointError | OSError:
    """The error, saying where it was met."""
    if isinstance(error, CorruptCheckpointError):
        return CorruptCheckpointError(f"{place}: {error}", failures=error.failures)
    if isinstance(error, IncompatibleCheckpointError):
        return IncompatibleCheckpointError(f"{place}: {error}")
    return error


def can_count(name: str) -> bool:
    """Whether a directory of that name is a checkpoint if it holds a marker: not one on its way in or out."""
    return not (is_incomplete(name) or is_trash(name) or is_corrupt(name) or is_replaced(name))
