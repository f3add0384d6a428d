"""Which checkpoints there are: read from the markers alone, so that nothing else can be mistaken for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from ckpt_core.commit._lineage import on_present_line, present_lineage
from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, MAX_MARKER_BYTES, Manifest, Marker
from ckpt_core.commit._marks import (
    Mark,
    Marks,
    is_well,
    known_marks,
    locked,
    marks_to_change,
    problem_of,
    read_pins,
    replace_marks,
    replace_pins,
    warn_once,
)
from ckpt_core.commit._occupant import holds_torn_save
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
)
from ckpt_core.messages import message
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
from ckpt_core.storage import Storage, read_small
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)

_MOST_LISTINGS: Final = 8
_PINS_UNREADABLE: Final = f"{PINS} cannot be read, so every checkpoint is kept"


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What is in a root.

    Attributes:
        committed: what is committed and of the present lineage, oldest step first.
        unreadable: name -> error; a marker that cannot be read says that something was committed, not what.
        abandoned: what is committed and not of the present lineage, oldest step first.
        lineage: the present one.
        size: how many directories hold a marker.
    """

    committed: list[CheckpointInfo]
    unreadable: dict[str, CheckpointError | OSError]
    abandoned: list[CheckpointInfo] = field(default_factory=list[CheckpointInfo])
    lineage: Lineage = field(default_factory=Lineage)
    size: int = 0

    @property
    def everything(self) -> list[CheckpointInfo]:
        """What is committed, whatever its lineage, oldest step first."""
        if not self.abandoned:
            return list(self.committed)
        return on_present_line([*self.committed, *self.abandoned], self.lineage)


@final
class Catalog:
    """The checkpoints of one root.

    Holds no state of its own: every call reads the storage anew, from any thread of any process. Pins and
    marks are read, changed and replaced under a lock, so that processes that change them at the same moment
    lose nothing of each other's; where storage cannot lock, such as object stores, the last one wins.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def committed(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """The committed checkpoints of the present lineage, or `abandoned` ones, too; oldest step first.

        Any directory with a readable marker counts, whatever its name; the step is what the marker says.
        A directory whose marker cannot be read is left out, with a warning in the log.
        """
        survey = self.survey()
        for name, error in survey.unreadable.items():
            _logger.warning("%s/%s is left out: %s", self._storage.url, name, error)
        return survey.everything if abandoned else survey.committed

    def survey(self) -> Survey:
        """Every committed checkpoint, and every directory whose marker cannot be read.

        The job that owns the root may commit and prune meanwhile; then it is listed again, lest the old one
        be gone and the new one not be seen.
        """

        def read(name: str) -> CheckpointInfo:
            return self.marker(name).info(name)

        for _ in range(_MOST_LISTINGS - 1):
            listed = countable_names(self._storage)
            survey = survey_of(self._storage, listed, read)
            if survey.size == len(listed) or countable_names(self._storage) == listed:
                return survey
        return survey_of(self._storage, countable_names(self._storage), read)

    def latest(self) -> CheckpointInfo | None:
        """The committed checkpoint with the highest step of the present lineage that is not marked, or None.

        If all are marked, it is the highest that is damaged, not bad: such a mark may be wrong.
        """
        infos = [info for info in self.committed() if info.bad is None]
        usable = [info for info in infos if info.damaged is None]
        return max(usable or infos[-1:], key=lambda info: info.step, default=None)

    def find(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """The committed checkpoint of that step, or the one of that name.

        Of several of one step it is the newest of the present lineage that is not marked, else the newest of
        the present lineage, and an abandoned one only if the present lineage does not have that step.
        By its name, a link to one is found, too.

        Raises:
            CheckpointNotFoundError: there is none; the message names those that are there.
            CorruptCheckpointError: its marker is damaged.
            IncompatibleCheckpointError: it was written by a newer version.
        """
        survey = self.survey()
        found = [
            info
            for info in survey.everything
            if step in {None, info.step} and name in {None, info.name, set_aside(info.name)}
        ]
        if found:
            return max(found, key=_preferred)
        if name is not None and _leads_elsewhere(self._storage, name):
            return self.marker(name).info(name)
        expected = step_name(step or 0) if name is None else name
        if expected in survey.unreadable:
            raise _placed(f"{self._storage.url}/{expected}", survey.unreadable[expected])
        wanted = f"step {step}" if name is None else f"checkpoint {name!r}"
        if None not in {step, name}:
            wanted += f" of step {step}"
        there = ", ".join(str(info.step) for info in survey.committed) or "none"
        left = ", ".join(str(info.step) for info in survey.abandoned)
        raise CheckpointNotFoundError(
            f"no committed {wanted} in {self._storage.url}; committed steps there: {there}"
            + (f"; abandoned: {left}" if left else "")
        )

    def marker(self, name: str) -> Marker:
        """The commit marker of directory `name`; under the name of a torn or damaged directory, none counts.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: the marker is malformed, or that of another step than the name says.
            IncompatibleCheckpointError: the marker was written by a newer version.
        """
        try:
            if not can_count(name):
                raise FileNotFoundError
            content = read_small(self._storage, f"{name}/{MARKER}", MAX_MARKER_BYTES)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{self._storage.url}/{name} holds no committed checkpoint: there is no {MARKER}"
            ) from None
        marker, step = Marker.from_bytes(content), parse_step_name(name)
        if step not in {None, marker.step}:
            problem = (
                f"is of step {marker.step}, under the name of another step: a copy, or it was renamed; if it "
                f"is wanted, call the directory {step_name(marker.step)}, where nothing has that name"
            )
            raise _corrupt(f"{self._storage.url}/{name}", MARKER, problem)
        return marker

    def manifest(self, name: str, *, sha256: str | None = None) -> Manifest:
        """The manifest of directory `name`, the one that was committed; errors as by `read_manifest`."""
        return _committed_manifest(self._storage, name, sha256)[1]

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
        return problem_of(known_marks(self._storage).damaged, name, self.marker(name).save_id)

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
        _mark(self._storage, self, name, problem, bad=False)

    def mark_bad(self, name: str, reason: str) -> None:
        """Tell everyone to come that checkpoint `name` is whole but must not be trained on, and why.

        Errors and the rest as by `mark_damaged`.
        """
        _mark(self._storage, self, name, reason, bad=True)

    def unmark(self, name: str, *, bad: bool = False) -> None:
        """Take a mark of damage away, or that of a `bad` one; harmless where there is none.

        Raises:
            IncompatibleCheckpointError: the file of marks was written by a newer version.
            OSError: the marks could not be written.
        """
        if name not in _of_kind(marks_to_change(self._storage), bad=bad):
            return
        with locked(self._storage, DAMAGED):
            marks = marks_to_change(self._storage)
            rest = {other: mark for other, mark in _of_kind(marks, bad=bad).items() if other != name}
            replace_marks(self._storage, _in_force(self, _with_kind(marks, rest, bad=bad)))


def read_manifest(storage: Storage, name: str, *, sha256: str | None = None) -> bytes:
    """Read the manifest of a committed checkpoint, the bytes that were committed.

    Args:
        storage: the root.
        name: of the checkpoint's directory.
        sha256: its digest, if only one manifest will do.

    Raises:
        CheckpointNotFoundError: `name` is not committed.
        CorruptCheckpointError: marker or manifest are malformed, or do not belong together.
        IncompatibleCheckpointError: they were written by a newer version.
    """
    return _committed_manifest(storage, name, sha256)[0]


def _committed_manifest(storage: Storage, name: str, sha256: str | None) -> tuple[bytes, Manifest]:
    marker, place = Catalog(storage).marker(name), f"{storage.url}/{name}"
    try:
        content = read_small(storage, f"{name}/{MANIFEST}", min(marker.manifest_bytes, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise _corrupt(place, MANIFEST, "missing") from None
    if not marker.matches(content):
        problem = f"not the file that was committed: its digest differs from {MARKER}'s"
        raise _corrupt(place, MANIFEST, problem)
    if sha256 is not None and marker.manifest_sha256 != sha256:
        raise _corrupt(place, MANIFEST, f"its SHA-256 is {marker.manifest_sha256}, not {sha256}")
    manifest = Manifest.from_bytes(content)
    if not marker.is_of(manifest):
        raise _corrupt(place, MARKER, f"says what {MANIFEST} does not: it is the marker of another save")
    return content, manifest


def _mark(storage: Storage, catalog: Catalog, name: str, problem: str, *, bad: bool) -> None:
    mark = Mark.of(catalog.marker(name), problem, found=time.time())
    if mark.says_as_much_as(_of_kind(marks_to_change(storage), bad=bad).get(name)):
        return
    with locked(storage, DAMAGED):
        marks = _in_force(catalog, marks_to_change(storage))
        of_kind = {**_of_kind(marks, bad=bad), name: mark}
        replace_marks(storage, _with_kind(marks, of_kind, bad=bad))


def _of_kind(marks: Marks, *, bad: bool) -> Mapping[str, Mark]:
    return marks.bad if bad else marks.damaged


def _with_kind(marks: Marks, of_kind: Mapping[str, Mark], *, bad: bool) -> Marks:
    return replace(marks, bad=of_kind) if bad else replace(marks, damaged=of_kind)


def _preferred(info: CheckpointInfo) -> tuple[bool, bool, int, float, str]:
    return not info.abandoned, info.usable, info.lineage.number, info.created, info.name


def _directories(storage: Storage) -> list[str]:
    """The directories of the root; a link is the user's other name for something, and never counts."""
    return [entry.name for entry in storage.list("") if entry.is_directory and not entry.is_link]


def _leads_elsewhere(storage: Storage, name: str) -> bool:
    entry = storage.entry(name)
    return entry is not None and entry.is_link


def countable_names(storage: Storage) -> list[str]:
    """The directories of a root that are checkpoints if they hold a marker."""
    return [name for name in _directories(storage) if can_count(name)]


def survey_of(storage: Storage, names: Sequence[str], read: Callable[[str], CheckpointInfo]) -> Survey:
    """The survey of these directories.

    Args:
        storage: the root.
        names: of directories.
        read: tells what the marker in a directory says; errors as by `Catalog.marker`.
    """
    pins, marks = _pins_or_none(storage), known_marks(storage)
    said = pins != {} or bool(marks.damaged or marks.bad)
    committed: list[CheckpointInfo] = []
    unreadable: dict[str, CheckpointError | OSError] = {}
    for name in names:
        try:
            info = read(name)
        except CheckpointNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            unreadable[name] = error
        else:
            if not said:
                committed.append(info)
                continue
            pinned = _PINS_UNREADABLE if pins is None else pins.get(info.step)
            damaged, bad = (problem_of(kind, name, info.save_id) for kind in (marks.damaged, marks.bad))
            plain = pinned is None and damaged is None and bad is None
            committed.append(info if plain else replace(info, pinned=pinned, damaged=damaged, bad=bad))
    others = [lineage for name in unreadable if (lineage := _told_by_manifest(storage, name)) is not None]
    present = present_lineage(committed, others)
    judged = on_present_line(_without_replaced(committed), present)
    return Survey(
        lineage=present,
        committed=[info for info in judged if not info.abandoned],
        unreadable=unreadable,
        abandoned=[info for info in judged if info.abandoned],
        size=len(committed) + len(unreadable),
    )


def _told_by_manifest(storage: Storage, name: str) -> Lineage | None:
    """The lineage of a checkpoint whose marker cannot be read, if its manifest can be."""
    try:
        return Manifest.from_bytes(read_small(storage, f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)).lineage
    except (CheckpointError, OSError):
        return None


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
        pins = read_pins(storage)
    except CorruptCheckpointError as error:
        problem = "; ".join(failure.problem for failure in error.failures)
        warn_once(storage, PINS, problem, so_that="no checkpoint is pruned until it is repaired or deleted")
        return None
    is_well(storage, PINS)
    return pins


def _in_force(catalog: Catalog, marks: Marks) -> Marks:
    """The marks whose checkpoints are still there, as far as that can be told."""
    damaged, bad = (
        {name: mark for name, mark in of_kind.items() if _may_mean(catalog, name, mark)}
        for of_kind in (marks.damaged, marks.bad)
    )
    return Marks(damaged=damaged, bad=bad)


def _may_mean(catalog: Catalog, name: str, mark: Mark) -> bool:
    try:
        return mark.means(catalog.marker(name).save_id)
    except CheckpointNotFoundError:
        return False
    except (CheckpointError, OSError):
        return True


def _placed(place: str, error: CheckpointError | OSError) -> CheckpointError | OSError:
    """The error, saying where it was met."""
    if isinstance(error, CorruptCheckpointError):
        return CorruptCheckpointError(f"{place}: {error}", failures=error.failures)
    if isinstance(error, IncompatibleCheckpointError | ArchivedError):
        return error.retold(f"{place}: {error}")
    return error


def can_count(name: str) -> bool:
    """Whether a directory of that name is a checkpoint if it holds a marker: not one on its way in or out."""
    return not (is_incomplete(name) or is_trash(name) or is_corrupt(name) or is_replaced(name))
