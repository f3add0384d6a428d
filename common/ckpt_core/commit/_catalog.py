"""The checkpoints of a root by their markers; pins, marks, notes, signatures."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeAlias, final
from weakref import WeakKeyDictionary

from ckpt_core.commit._manifest import (
    Manifest,
    Marker,
    by_step,
    lineage_in_manifest,
    on_present_line,
    present_lineage,
    read_committed,
    whole_info,
)
from ckpt_core.commit._occupant import is_link, is_torn_step
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    LoadError,
    PartialCheckpointError,
    SaveError,
    UntrustedCheckpointError,
    damaged,
    unreadable,
)
from ckpt_core.formats import codec
from ckpt_core.formats.checksums import checksum
from ckpt_core.formats.frames import PlainFiles
from ckpt_core.messages import message
from ckpt_core.names import (
    DAMAGED,
    FORMAT_VERSION,
    MANIFEST,
    MARKER,
    NOTES,
    PINS,
    PLAIN,
    SIGNATURE,
    TWIN_SUFFIX,
    can_count,
    is_incomplete,
    is_own_file,
    is_trash,
    original_name,
    parse_step_name,
    set_aside,
    step_name,
    twin_name,
)
from ckpt_core.options import VerifyManifest
from ckpt_core.storage import BIGGEST_SMALL_FILE, FramedStorage, Storage, read_intact, read_small
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage

_logger = logger_of(__name__)

LEASE_SECONDS: Final = 900
"""How long a pin outlives its process, and how far clocks may be apart."""
_RENEW_SECONDS: Final = LEASE_SECONDS / 5
_IN_USE: Final = re.compile(r"in-use-(?P<step>[0-9]{9,18})-(?P<until>[0-9]{1,12})-[0-9a-f]{16}")
_MEASURED: Final = re.compile(r"measured-(?P<of>[0-9a-f]{32})-[0-9a-f]{16}-(?P<name>[0-9a-f]+)=(?P<value>.+)")
_LONGEST_NAME: Final = 80
"""In bytes: a file has at most 255."""


@final
@dataclass(frozen=True, slots=True)
class Notes:
    """What others note of checkpoints; `in_use` is step -> until when, in words.

    Each note is a file that says everything by its name: it appears as a whole, is read by a listing, and
    belongs to its writer alone. So nobody needs the root, or a lock.
    """

    in_use: Mapping[int, str]
    _measured: Mapping[str, Mapping[str, float]]

    def measured(self, save_id: str) -> Mapping[str, float]:
        """Return the numbers written back last of the checkpoint that a save wrote."""
        return self._measured.get(_key(save_id), {})


def read_notes(storage: Storage) -> Notes:
    """Read all notes, by one listing."""
    now, in_use, measured = time.time(), dict[int, str](), dict[str, dict[str, float]]()
    for name in sorted(entry.name for entry in storage.list(NOTES)):  # later ones last
        if (pin := _IN_USE.fullmatch(name)) is not None and now < int(pin["until"]):
            words = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(int(pin["until"])))
            in_use[int(pin["step"])] = f"in use, at least until {words}"
        with suppress(ValueError):
            if (found := _MEASURED.fullmatch(name)) is not None and math.isfinite(float(found["value"])):
                of_save = measured.setdefault(found["of"], {})
                of_save[bytes.fromhex(found["name"]).decode()] = float(found["value"])
    return Notes(in_use, measured)


def note_measured(storage: Storage, save_id: str, metrics: Mapping[str, float]) -> None:
    """Write finite numbers of the checkpoint of a save; ConfigError for long names."""
    names = {name: name.encode().hex() for name in metrics}
    if long := [name for name, digits in names.items() if len(digits) > 2 * _LONGEST_NAME]:
        raise ConfigError(f"the name of a metric has at most {_LONGEST_NAME} bytes: {long[0]!r:.100}")
    for name, value in metrics.items():
        moment = int(time.time() * 1e6)
        with suppress(FileExistsError):  # the same number at the same moment
            key = f"{NOTES}/measured-{_key(save_id)}-{moment:016x}-{names[name]}={float(value)!r}"
            storage.write_bytes(key, _who())


def forget_notes(storage: Storage, save_id: str) -> None:
    """Delete what was measured of a checkpoint, and pins that have ended."""
    for name in [entry.name for entry in storage.list(NOTES)]:
        pin = _IN_USE.fullmatch(name)
        if name.startswith(f"measured-{_key(save_id)}-") or (pin and int(pin["until"]) < time.time()):
            storage.delete(f"{NOTES}/{name}")


@contextmanager
def in_use(storage: Storage, step: int) -> Generator[None]:
    """Protect a step from pruning in this block, by a pin that ends with the process.

    A thread renews it; after a crash it counts for `LEASE_SECONDS` at most. A removal that was decided before
    may still come: look for the checkpoint in this block. OSError if nothing can be written there.
    """
    over, keys = threading.Event(), list[str]()

    def renew() -> None:
        until = int(time.time()) + LEASE_SECONDS
        keys.append(f"{NOTES}/in-use-{step:09d}-{until}-{secrets.token_hex(8)}")
        storage.write_bytes(keys[-1], _who())
        while len(keys) > 1:
            storage.delete(keys.pop(0))

    def keep() -> None:
        while not over.wait(_RENEW_SECONDS):
            try:
                renew()
            except OSError as error:  # there is time for another try
                _logger.warning("the pin of step %d in %s was not renewed: %s", step, storage.url, error)

    renew()
    # A daemon: a process that ends need not wait for storage.
    thread = threading.Thread(target=keep, name="ckpt-pin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):  # it ends by itself
            for key in keys:
                storage.delete(key)


def _key(save_id: str) -> str:
    return hashlib.sha256(save_id.encode(errors="replace")).hexdigest()[:32]


def _who() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()


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
    changes one may be lost, but the file stays readable. TimeoutError if another process has held the lock
    for that long.
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
    """Return step -> reason; empty if nothing was ever pinned."""
    try:
        content = read_small(storage, PINS, MAX_PINS_BYTES)
    except FileNotFoundError:
        return {}
    except CorruptCheckpointError as error:
        raise error.retold(f"{error}; {_PINS_REMEDY}") from error
    try:
        return {int(step): str(reason) for step, reason in json.loads(content)["pins"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = damaged(storage.url, PINS, f"malformed: {error}")
        raise problem.retold(f"{problem}; {_PINS_REMEDY}") from error


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
    fields = {"pins": {str(step): pins[step] for step in sorted(pins)}}
    content = json.dumps(fields, indent=2).encode() + b"\n"
    if len(content) > MAX_PINS_BYTES:
        raise ConfigError(f"the reasons of {len(pins)} pins have {len(content)} bytes in all: shorten them")
    storage.replace(PINS, content)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The problem of the checkpoint of one save, not of a later one of its name."""

    save_id: str
    problem: str
    found: float

    @classmethod
    def of(cls, marker: Marker, problem: str) -> Mark:
        return cls(save_id=marker.save_id[:_MAX_ID], problem=problem[:_MAX_PROBLEM], found=time.time())

    def applies_to(self, save_id: str) -> bool:
        return self.save_id == save_id[:_MAX_ID]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """All marks of a root, by name of the checkpoint."""

    damaged: Mapping[str, Mark] = field(default_factory=dict[str, Mark])
    bad: Mapping[str, Mark] = field(default_factory=dict[str, Mark])


def read_marks(storage: Storage) -> Marks:
    """Read the marks; none if nothing was ever marked."""
    try:
        content = read_small(storage, DAMAGED, MAX_MARKS_BYTES)
    except FileNotFoundError:
        return Marks()
    with codec.Fields.parse(content, source=DAMAGED, summed=True) as fields:
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
    """Read the marks before they are replaced; a malformed file counts as empty."""
    try:
        return read_marks(storage)
    except CorruptCheckpointError as error:
        _logger.warning("%s: the damage marks cannot be read and are discarded: %s", storage.url, error)
        return Marks()


def problem_of(marks: Mapping[str, Mark], name: str, save_id: str) -> str | None:
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
    storage.replace(DAMAGED, codec.add_checksum(json.dumps(fields, separators=(",", ":")).encode()))


_MOST_LISTINGS: Final = 8
_PINS_UNREADABLE: Final = f"{PINS} cannot be read, so every checkpoint is kept"


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The result of one listing of a root.

    Attributes:
        committed: committed checkpoints of the present lineage, whole states, oldest step first.
        unreadable: name -> error of each directory whose marker cannot be read: something was committed, its
            step is unknown.
        abandoned: committed checkpoints of other lineages, oldest step first.
        weights: what holds only weights, of any lineage, likewise.
        lineage: the present lineage.
        parts: committed checkpoints of which this root has only a part; `unreadable` says what is lacking.
    """

    committed: list[CheckpointInfo]
    unreadable: dict[str, CheckpointError | OSError]
    abandoned: list[CheckpointInfo] = field(default_factory=list[CheckpointInfo])
    weights: list[CheckpointInfo] = field(default_factory=list[CheckpointInfo])
    parts: list[CheckpointInfo] = field(default_factory=list[CheckpointInfo])
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def everything(self) -> list[CheckpointInfo]:
        """All committed checkpoints, abandoned ones and weights included, oldest first."""
        return sorted([*self.committed, *self.abandoned, *self.weights], key=by_step)

    def log_unreadable(self, url: str) -> None:
        """Warn of every directory in a root whose marker cannot be read."""
        for name, error in self.unreadable.items():
            _logger.warning("%s/%s is left out: %s", url, name, error)


@final
class Catalog:
    """The checkpoints of one root.

    Stateless: every call reads the storage again, from any thread of any process. Pins and marks are read,
    changed and replaced under a lock, so that concurrent changes of several processes lose nothing. Where
    storage cannot lock, such as object stores, the last writer wins.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def committed(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """List the committed checkpoints of the present lineage, oldest step first.

        With `abandoned`, those of other lineages, and mere weights, too. Any directory with a readable marker
        counts, whatever its name; its step is that in the marker. A directory with an unreadable marker is
        left out, and a warning is logged.
        """
        survey = self.survey()
        survey.log_unreadable(self._storage.url)
        return survey.everything if abandoned else survey.committed

    def survey(self, read: Callable[[str], CheckpointInfo] | None = None, *, noted: bool = True) -> Survey:
        """List every committed checkpoint and every directory with an unreadable marker.

        The job that owns the root may commit and prune meanwhile. Then the root is listed again: one listing
        could miss both the pruned checkpoint and the new one. `read` is `info`, or remembers its results.
        Without `noted`, the notes of others, which cost one more listing, are left out.
        """
        infos, unreadable = list[CheckpointInfo](), dict[str, CheckpointError | OSError]()
        listed: list[str] | None = None
        for _ in range(_MOST_LISTINGS):
            before, listed = listed, [n for n in sorted(self._storage.directories("")) if can_count(n)]
            if before == listed:
                break
            infos, unreadable = read_all(listed, read or self.info)
            if len(infos) + len(unreadable) == len(listed):
                break
        return arranged(self._storage, infos, unreadable, noted=noted)

    def latest(self) -> CheckpointInfo | None:
        """Return the newest unmarked checkpoint of the present lineage, or None.

        If all are marked, return the newest that is damaged but not bad: a mark of damage may be wrong. If
        there are only weights, return the newest of these.
        """
        survey = self.survey()
        survey.log_unreadable(self._storage.url)
        infos = [info for info in survey.committed if info.bad is None]
        weights = [info for info in survey.weights if not info.abandoned and not info.marked]
        usable = [info for info in infos if info.damaged is None]
        return max(usable or infos[-1:] or weights, key=lambda info: info.step, default=None)

    def find(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """Return the committed checkpoint of a step, or of a name.

        If several have the step, the newest unmarked one of the present lineage is preferred, then the newest
        of the present lineage. An abandoned one is returned only if the present lineage lacks the step. A
        name may also be that of a link to a checkpoint.

        Raises:
            CheckpointNotFoundError: there is none; the message lists the existing steps.
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
            return max(found, key=lambda i: (not i.abandoned, i.usable, i.lineage.number, i.created, i.name))
        if name is not None and is_link(self._storage, name):
            return self.marker(name).info(name)
        expected = step_name(step or 0) if name is None else name
        if expected in survey.unreadable:
            error = survey.unreadable[expected]
            if isinstance(error, CorruptCheckpointError | IncompatibleCheckpointError | ArchivedError):
                raise error.retold(f"{self._storage.url}/{expected}: {error}")
            raise error
        wanted = f"step {step}" if name is None else f"checkpoint {name!r}"
        if None not in {step, name}:
            wanted += f" of step {step}"
        there = ", ".join(str(info.step) for info in survey.committed) or "none"
        abandoned = ", ".join(str(info.step) for info in survey.abandoned)
        raise CheckpointNotFoundError(
            f"no committed {wanted} in {self._storage.url}; committed steps there: {there}"
            + (f"; abandoned: {abandoned}" if abandoned else "")
        )

    def name_of(self, step: int) -> str:
        """Return the name of the committed checkpoint of a step; errors as by `find`.

        Other markers are read only where a name does not tell whose step it is.
        """
        names = [name for name in self._storage.directories("") if can_count(name)]
        named = [name for name in names if parse_step_name(original_name(name)) in {None, step}]
        there = [name for name in named if self._storage.exists(f"{name}/{MARKER}")]
        return there[0] if there == [step_name(step)] else self.find(step=step).name

    def info(self, name: str) -> CheckpointInfo:
        """Return the checkpoint in directory `name`, without pins and marks.

        Errors as by `marker`, and PartialCheckpointError if only a part of it is here.
        """
        return whole_info(self._storage, name, self.marker(name))

    def marker(self, name: str) -> Marker:
        """Read the commit marker of directory `name`.

        Directories with the name of a torn or damaged save never count as committed.

        Raises:
            CheckpointNotFoundError: `name` is not committed.
            CorruptCheckpointError: the marker is malformed, or its step differs from that in the name.
            IncompatibleCheckpointError: the marker was written by a newer version.
        """
        try:
            if not can_count(name):
                raise FileNotFoundError
            marker = Marker.read(self._storage, name)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{self._storage.url}/{name} holds no committed checkpoint: there is no {MARKER}"
            ) from None
        if parse_step_name(name) not in {None, marker.step}:
            problem = (
                f"is of step {marker.step}, under the name of another step: a copy or a renamed directory; "
                f"to use it, rename the directory to {step_name(marker.step)} if that name is free"
            )
            raise damaged(f"{self._storage.url}/{name}", MARKER, problem)
        return marker

    def manifest(self, name: str, *, sha256: str | None = None) -> Manifest:
        """Read the manifest of directory `name`; errors as by `read_manifest`."""
        return _committed_manifest(self._storage, name, sha256)[1]

    def torn(self) -> list[str]:
        """List directories of unfinished saves and prunes: running, or left by a crash."""
        in_place = not self._storage.supports_rename
        return [
            name
            for name in sorted(self._storage.directories(""))
            if is_incomplete(name) or is_trash(name) or (in_place and is_torn_step(self._storage, name))
        ]

    def pins(self) -> dict[int, str]:
        return read_pins(self._storage)

    def pin(self, step: int, reason: str, *, ahead: bool = False) -> None:
        """Protect a committed step from pruning; `ahead` also one not committed yet."""
        if not ahead:
            self.find(step=step)
        with locked(self._storage, PINS):
            replace_pins(self._storage, self.pins() | {step: reason})

    def unpin(self, step: int) -> None:
        """Remove a pin, harmless where there is none; errors as by `pin`."""
        if step not in self.pins():
            return
        with locked(self._storage, PINS):
            pins = self.pins()
            if pins.pop(step, None) is not None:
                replace_pins(self._storage, pins)

    def known_damage(self, name: str) -> str | None:
        """Return the recorded damage of `name`, or None; errors as by `marker`."""
        return problem_of(known_marks(self._storage).damaged, name, self.marker(name).save_id)

    def mark_damaged(self, name: str, problem: str) -> None:
        """Record for all later readers that checkpoint `name` did not verify, and why.

        The mark applies to the checkpoint that has the name now, not to a later one of the same name. The
        caller owns the root (see `Lease`). Marks of deleted checkpoints are dropped.
        """
        self._change_mark(name, "damaged", Mark.of(self.marker(name), problem))

    def mark_bad(self, name: str, reason: str) -> None:
        """Record that `name` must not be trained on; the rest as by `mark_damaged`."""
        self._change_mark(name, "bad", Mark.of(self.marker(name), reason))

    def unmark(self, name: str, *, bad: bool = False) -> None:
        """Remove a mark of damage, or a `bad` one; harmless where there is none."""
        self._change_mark(name, "bad" if bad else "damaged", None)

    def remark(
        self, name: str, problem: str, *, bad: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        """Mark a checkpoint as damaged or `bad`, or with "" no more; failing warns."""
        kind = "bad" if bad else "damaged"
        try:
            check()
            self._change_mark(name, kind, Mark.of(self.marker(name), problem) if problem else None)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return  # then it does not count anyway
        except (CheckpointError, OSError) as error:
            failed = f"is {kind}, but could not be marked so"
            failed = failed if problem else f"verifies, but is still marked as {kind}"
            _logger.warning("%s/%s %s: %s", self._storage.url, name, failed, error)

    def _change_mark(self, name: str, kind: str, mark: Mark | None) -> None:
        present: Mark | None = getattr(marks_to_change(self._storage), kind).get(name)
        if present == mark or (present and mark and replace(present, found=mark.found) == mark):
            return
        with locked(self._storage, DAMAGED):
            marks = marks_to_change(self._storage)
            kinds = {"damaged": dict(marks.damaged), "bad": dict(marks.bad)}
            kinds[kind].pop(name, None)
            if mark is not None:
                kinds[kind][name] = mark
            current = {
                each: {other: of[other] for other in of if self._may_apply(other, of[other])}
                for each, of in kinds.items()
            }
            replace_marks(self._storage, Marks(**current))

    def _may_apply(self, name: str, mark: Mark) -> bool:
        """Return whether the marked checkpoint exists, or its marker cannot be read."""
        try:
            return mark.applies_to(self.marker(name).save_id)
        except CheckpointNotFoundError:
            return False
        except (CheckpointError, OSError):
            return True


def read_manifest(storage: Storage, name: str) -> bytes:
    """Read the manifest of a committed checkpoint, exactly as committed.

    Raises:
        CheckpointNotFoundError: `name` is not committed.
        CorruptCheckpointError: marker or manifest are malformed, or do not belong together.
        IncompatibleCheckpointError: they were written by a newer version.
    """
    return _committed_manifest(storage, name, None)[0]


def plain_storage(storage: Storage, name: str, manifest: Manifest | None = None) -> Storage:
    """Return a storage in which a checkpoint is plain: itself, or a view of it.

    It is committed; its `manifest` is read if not given.

    Raises:
        CorruptCheckpointError: what it consists of contradicts itself; also as by `read_manifest`.
        IncompatibleCheckpointError: it was written by a newer version.
    """
    manifest = Catalog(storage).manifest(name) if manifest is None else manifest
    if not manifest.plain_sha256:
        return storage
    found = plain_files(storage, name, manifest)
    plain = Manifest.from_bytes(found.manifest)
    return FramedStorage(
        storage,
        name,
        small={MARKER: Marker.of(plain, found.manifest).to_bytes(), MANIFEST: found.manifest, **found.small},
        files=found.files,
        twin_suffix=TWIN_SUFFIX if plain.replicas > 1 else "",
    )


def plain_files(storage: Storage, name: str, manifest: Manifest) -> PlainFiles:
    """Read how the files of the plain checkpoint come of those of a compressed one.

    Raises:
        CorruptCheckpointError: it is damaged, or contradicts the manifest.
        IncompatibleCheckpointError: it was written by a newer version.
    """
    place, sizes = f"{storage.url}/{name}", {entry.path: entry.size_bytes for entry in manifest.files}
    entry = next((each for each in manifest.files if each.path == PLAIN), None)
    if entry is None:
        raise damaged(place, PLAIN, f"not among the files that {MANIFEST} lists")
    found = PlainFiles.from_bytes(read_entry(storage, name, entry), source=f"{place}/{PLAIN}")
    plain = Manifest.from_bytes(found.manifest)
    plain_sizes = {each.path: each.size_bytes for each in plain.files}
    if hashlib.sha256(found.manifest).hexdigest() != manifest.plain_sha256 or plain.plain_sha256:
        raise damaged(place, PLAIN, f"is not of the checkpoint that {MANIFEST} names")
    for path, frames in found.files.items():
        if (frames.plain_starts[-1], frames.stored_starts[-1]) != (plain_sizes.get(path), sizes.get(path)):
            raise damaged(place, PLAIN, f"says other sizes of {path!r:.200} than the manifests")
    return found


def read_entry(storage: Storage, name: str, entry: FileEntry) -> bytes:
    """Read a small file of a checkpoint, and compare it with what was committed.

    Raises:
        CorruptCheckpointError: it is missing or damaged.
    """
    key, size = f"{name}/{entry.path}", entry.size_bytes
    most = size if entry.checksum and not is_own_file(entry.path) else BIGGEST_SMALL_FILE

    def problem(content: bytes) -> str:
        found = checksum(content, entry.checksum.partition(":")[0]) if entry.checksum else ""
        return "" if found == entry.checksum else f"checksum is {found}, {entry.checksum} was committed"

    try:
        content, wrong = read_intact(
            storage, key, lambda each: read_small(each, key, most, committed_bytes=size), problem
        )
    except FileNotFoundError:
        content, wrong = b"", "missing"
    except ValueError as error:
        content, wrong = b"", f"cannot be verified: {error}"
    except OSError as error:
        content, wrong = b"", unreadable(error)
    if wrong:
        raise damaged(f"{storage.url}/{name}", entry.path, wrong)
    return content


def _committed_manifest(storage: Storage, name: str, sha256: str | None) -> tuple[bytes, Manifest]:
    marker, place = Catalog(storage).marker(name), f"{storage.url}/{name}"
    content, _ = read_committed(storage, name, marker)
    if sha256 is not None and marker.manifest_sha256 != sha256:
        raise damaged(place, MANIFEST, f"its SHA-256 is {marker.manifest_sha256}, not {sha256}")
    manifest = Manifest.from_bytes(content)
    if not marker.is_of(manifest):
        raise damaged(place, MARKER, f"disagrees with {MANIFEST}: it is the marker of another save")
    return content, manifest


def read_all(
    names: Iterable[str], read: Callable[[str], CheckpointInfo]
) -> tuple[list[CheckpointInfo], dict[str, CheckpointError | OSError]]:
    """Read the markers of directories; return the checkpoints, and errors by name."""
    infos: list[CheckpointInfo] = []
    unreadable: dict[str, CheckpointError | OSError] = {}
    for name in names:
        try:
            infos.append(read(name))
        except CheckpointNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            unreadable[name] = error
    return infos, unreadable


def arranged(
    storage: Storage,
    infos: Sequence[CheckpointInfo],
    unreadable: Mapping[str, CheckpointError | OSError],
    *,
    noted: bool = True,
) -> Survey:
    """Arrange checkpoints along the present lineage, as pinned, marked and noted."""
    others = [lineage for name in unreadable if (lineage := lineage_in_manifest(storage, name)) is not None]
    present = present_lineage(infos, others)
    names = {info.name for info in infos}
    # Without those that were set aside and whose successor has the name.
    found = on_present_line([info for info in infos if set_aside(info.name) not in names], present)
    pins, marks = known_pins(storage), known_marks(storage)
    notes = read_notes(storage) if noted else Notes({}, {})

    def remarked(info: CheckpointInfo) -> CheckpointInfo:
        pinned = _PINS_UNREADABLE if pins is None else pins.get(info.step, notes.in_use.get(info.step))
        damaged, bad = (problem_of(kind, info.name, info.save_id) for kind in (marks.damaged, marks.bad))
        measured = notes.measured(info.save_id)
        plain = pinned is None and damaged is None and bad is None and not measured
        metrics = {**info.metrics, **measured}
        return info if plain else replace(info, pinned=pinned, damaged=damaged, bad=bad, metrics=metrics)

    def parts() -> Iterator[CheckpointInfo]:
        for name, error in unreadable.items():
            if isinstance(error, PartialCheckpointError):
                with suppress(CheckpointNotFoundError):  # the job that owns the root prunes parts, too
                    yield Catalog(storage).marker(name).info(name)

    found = list(map(remarked, found))
    whole = [info for info in found if info.weights_of is None]
    return Survey(
        lineage=present,
        committed=[info for info in whole if not info.abandoned],
        unreadable=dict(unreadable),
        abandoned=[info for info in whole if info.abandoned],
        weights=[info for info in found if info.weights_of is not None],
        parts=list(map(remarked, parts())),
    )


Sign: TypeAlias = Callable[[bytes], bytes]

MAX_SIGNATURE_BYTES: Final = 1 << 20
"""A larger file is no signature, and must not be read into memory."""


def write_signature(storage: Storage, working: str, manifest: Manifest, sign: Sign) -> bytes:
    """Sign a manifest as `commit` writes it; write and return the signature.

    A manifest binds the content of files as firmly as its checksums do: with `checksum="sha256"` as firmly as
    the signature. It cannot list that, which is known by its name, and moved and deleted with the manifest.
    """
    try:
        signature: Any = sign(manifest.to_bytes())
    except Exception as error:  # a user's function: its error is reported with the failed save
        raise _unsigned(storage, manifest, f"sign_manifest raised {type(error).__name__}: {error}") from error
    if not isinstance(signature, bytes) or not 0 < len(signature) <= MAX_SIGNATURE_BYTES:
        what = f"{len(signature)} bytes" if isinstance(signature, bytes) else type(signature).__name__
        problem = f"sign_manifest returned {what}: it must return 1 to {MAX_SIGNATURE_BYTES} bytes"
        raise _unsigned(storage, manifest, problem)
    storage.write_bytes(f"{working}/{SIGNATURE}", signature)
    return signature


def require_trusted(storage: Storage, name: str, verify: VerifyManifest | None) -> str | None:
    """Raise unless the user's function accepts the checkpoint's manifest.

    Called before any other file of the checkpoint is used. Returns the SHA-256 of the accepted manifest, so
    that later reads can require the same one; None without `verify`.

    Raises:
        UntrustedCheckpointError: it was refused, or has no manifest of ours.
        CheckpointNotFoundError: the directory does not exist.
        CorruptCheckpointError: the manifest is not the one that was committed.
        LoadError: the function could not decide.
    """
    if verify is None:
        return None
    place = f"{storage.url}/{name}"
    try:
        content = read_manifest(storage, name)
    except CheckpointNotFoundError:
        if not storage.list(name) and not storage.exists(name):
            raise
        raise _refused(place, f"it has no manifest to be judged, because there is no {MARKER}") from None
    try:
        _judge(verify, name, content, _signature(storage, name, place), place=place)
    except UntrustedCheckpointError:
        # A signature has no checksum: which of the two is damaged, only a second judgement shows.
        if Manifest.from_bytes(content).replicas == 1:
            raise
        _judge(verify, name, content, _signature(storage, name, place, twin_name(SIGNATURE)), place=place)
    return hashlib.sha256(content).hexdigest()


def _judge(verify: VerifyManifest, name: str, content: bytes, signature: bytes, *, place: str) -> None:
    try:
        accepted: Any = verify(name, content, signature)
    except OSError as error:
        raise LoadError(
            f"verify_manifest could not judge {place}: {type(error).__name__}: {error}. No other checkpoint "
            "was tried and nothing was loaded; fix what verify_manifest depends on, and try again"
        ) from error
    except Exception as error:  # a user's function: it refuses by any other error
        raise _refused(place, f"verify_manifest raised {type(error).__name__}: {error}") from error
    if accepted is not True:
        raise _refused(place, f"verify_manifest returned {accepted!r:.80}, and not True")


def _signature(storage: Storage, name: str, place: str, path: str = SIGNATURE) -> bytes:
    try:
        return read_small(storage, f"{name}/{path}", MAX_SIGNATURE_BYTES)
    except FileNotFoundError:
        return b""
    except CorruptCheckpointError as error:
        problem = "; ".join(map(str, error.failures))
        raise _refused(place, f"its signature file is too large, or no file of ours: {problem}") from error


def _refused(place: str, why: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(
        f"{place} is not trusted: {why}. Nothing was loaded; find out who wrote it, or load another", why=why
    )


def _unsigned(storage: Storage, manifest: Manifest, why: str) -> SaveError:
    return SaveError(
        f"step {manifest.step} was not committed to {storage.url}: its manifest could not be signed: {why}. "
        "Earlier checkpoints are untouched; fix the signing, and save again",
        step=manifest.step,
        phase="commit",
    )
