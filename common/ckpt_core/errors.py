"""All errors that this suite raises, under one root.

CheckpointError(Exception)
├─ ConfigError(…, ValueError)                      bad construction or options; lists every offender
├─ CheckpointNotFoundError(…, FileNotFoundError)   no such step, or nothing committed yet
├─ CheckpointExistsError(…, FileExistsError)       the step is committed already; nothing is overwritten
├─ RootBusyError                                   another live job writes to this root
├─ CorruptCheckpointError                          files differ from the manifest
├─ IncompatibleCheckpointError                     foreign or newer format, or another model's checkpoint
├─ UnsafeCheckpointError                           loading it would need pickle, which was not allowed
├─ UntrustedCheckpointError                        `verify_manifest` does not accept it
├─ SaveError                                       a save failed; the last committed checkpoint is untouched
│  ├─ NoRoomError                                  it would not have fitted on the disk; nothing was written
│  └─ DivergenceError                              ranks hold different values under one name
├─ UploadError                                     a checkpoint is in the root, and in no further tier
├─ StagingMemoryError(…, MemoryError)              the copy of the state would not fit into host memory
├─ LoadError                                       a load failed for a reason that is none of the above
│  ├─ ArchivedError(…, PermissionError)            it is in an archive, and must be restored before it is read
│  ├─ OverwrittenError                             it failed half-way: the live state is partly overwritten
│  └─ PartialCheckpointError                       some of its files are on disks of other nodes
├─ HalfRenamedError(…, OSError)                    done on the disks of some nodes, and not on others
└─ CoordinationError                               ranks could not agree
   └─ DeadlineError(…, TimeoutError)               some ranks did not arrive in time; names them
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Self, TypeAlias


class CheckpointError(Exception):
    """Root of all errors raised by ckpt-suite.

    Keyword attributes are pickled with the error and, as far as they are plain, sent to other ranks.
    """

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The keyword arguments of the error."""
        return self._attributes

    def retold(self, message: str, **changed: Any) -> Self:
        """Copy the error with a different message, and with changed attributes."""
        return type(self)(message, **{**self._attributes, **changed})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.message, **self._attributes), ()


class ConfigError(CheckpointError, ValueError):
    """An option or argument is wrong; the message names it and the fix."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint of the given step, name or root."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is already there; checkpoints are immutable."""


class RootBusyError(CheckpointError):
    """Another job writes to the same root."""


SavePhase: TypeAlias = Literal["plan", "stage", "open", "write", "commit"]
"""The phases of a save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one rank, as reported to the others.

    `text` is class and message, in one line; `errno` that of an error of the operating system.
    """

    kind: str
    text: str
    errno: int | None = None
    phase: SavePhase | Literal[""] = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an exception, including details of its causes."""
        phases: list[SavePhase | Literal[""]]
        phases = [e.phase for e in _causes(error) if isinstance(e, SaveError) and e.phase]
        return cls(
            kind=type(error).__name__,
            text=failure_text(error),
            errno=next((e.errno for e in _causes(error) if isinstance(e, OSError) and e.errno), None),
            phase=phases[0] if phases else "",
        )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def first_of(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """Join the first of some texts, and say how many more there are."""
    more = f"{between if between != ', ' else ' '}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def failure_text(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFailure:
    """One file that differs from the manifest.

    Attributes:
        twin: the other file of the same bytes, from which loads take what is damaged in this one; "" if there
            is none, or the same is damaged there.
    """

    path: str
    problem: str
    twin: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (f"; whole in {self.twin}" if self.twin else "")


def lost(failures: Iterable[FileFailure]) -> list[FileFailure]:
    """Return the failures for which no twin makes up: they make a checkpoint damaged."""
    return [failure for failure in failures if not failure.twin]


class CorruptCheckpointError(CheckpointError):
    """The bytes on storage are not those that were committed.

    Attributes:
        failures: the problem of each file.
    """

    failures: Sequence[FileFailure] = ()


def damaged(place: str, path: str, problem: str) -> CorruptCheckpointError:
    """Return the error of one file of the checkpoint at a place."""
    failure = FileFailure(path=path, problem=problem)
    return CorruptCheckpointError(f"{place}/{failure}", failures=(failure,))


def unreadable(error: OSError) -> str:
    """Return what to say of a block that the device has lost.

    Any other error may be temporary, and is raised.
    """
    if error.errno != errno.EIO:
        raise error
    return f"cannot be read: {error}"


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is intact but does not fit this state or this version.

    Attributes:
        missing: keys the training state has and the checkpoint lacks.
        unexpected: keys the checkpoint has and the training state lacks.
        mismatched: keys whose shape or dtype differ, with both sides spelled out.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()


ALLOW_PICKLE: Final = (
    "allow_pickle=True to what the script calls: CheckpointManager, ShardedCheckpoint, ShardedCheckpointIO, "
    "setup_fabric, enable or enable_trainer (to load_from_checkpoint, weights_only=False)"
)
"""What the user writes to permit pickle, at whatever door."""


class UnsafeCheckpointError(CheckpointError):
    """Loading would execute a pickle and `allow_pickle=True` was not given."""


class UntrustedCheckpointError(CheckpointError):
    """The user's `verify_manifest` rejects the checkpoint, which may still be whole.

    Attributes:
        why: the result of the function, in words.
    """

    why: str = ""


class SaveError(CheckpointError):
    """A save failed on at least one rank; the same error reaches every rank.

    Attributes:
        step: the step being saved.
        phase: a `SavePhase`; of ranks that did not arrive in time, the phase that they did not finish.
        failures: rank -> its failure, as text.
        in_doubt: whether the checkpoint may exist nevertheless, now or after a power cut: its name could not
            be made durable, or an object store did not report the outcome of the marker's upload. If it
            exists, it is whole.
    """

    step: int = -1
    phase: SavePhase | Literal[""] = ""
    failures: Mapping[int, str] = {}
    in_doubt: bool = False


class NoRoomError(SaveError):
    """A save would not fit into its root; nothing was written.

    Attributes:
        needed_bytes: of the save.
        free_bytes: in the root, headroom included; None if unknown.
        headroom_bytes: that saves must leave free.
        needed_files: files and directories of the save.
        free_files: files that can be made; None if unknown.
    """

    needed_bytes: int = 0
    free_bytes: int | None = None
    headroom_bytes: int = 0
    needed_files: int = 0
    free_files: int | None = None


class DivergenceError(SaveError):
    """Ranks hold different values under one name, and any of them may be wrong.

    Attributes:
        differing: name -> the ranks whose value differs from that of the lowest rank that has one; after the
            first save, of the compared names only.
    """

    differing: Mapping[str, Sequence[int]] = {}


class UploadError(CheckpointError):
    """A checkpoint could not be uploaded to a further tier; in the root it is whole.

    Attributes:
        step: of the checkpoint.
        name: of its directory.
        failures: rank -> its failure, as text.
        lasting: whether another try cannot help.
    """

    step: int = -1
    name: str = ""
    failures: Mapping[int, str] = {}
    lasting: bool = False


OWN_NAMES: Final = (
    "Give tensors that differ, such as those of the stages of a pipeline or of experts, names of their own, "
    "for example TrainState(model={'stage1': module}) on the ranks of that stage"
)
"""Remedy for different tensors of one name."""


class StagingMemoryError(CheckpointError, MemoryError):
    """The copy of this rank's share does not fit into host memory; none was allocated.

    Attributes:
        needed_bytes: to allocate.
        available_bytes: that may be allocated.
    """

    needed_bytes: int = 0
    available_bytes: int = 0


class LoadError(CheckpointError):
    """A load failed; the message says on which rank and why."""


class ArchivedError(LoadError, PermissionError):
    """An object is in an archive: it is whole, and can be read once restored."""


class OverwrittenError(LoadError):
    """A load failed half-way, so that the live state is partly overwritten.

    Saves are refused with it until a load has overwritten all of that.

    Attributes:
        step: of the checkpoint; None if it has none.
        name: of its directory.
        damaged: whether it failed because the bytes that arrived differ from those that were saved.
        failures: the problem of each file, if so.
    """

    step: int | None = None
    name: str = ""
    damaged: bool = False
    failures: Sequence[FileFailure] = ()


class PartialCheckpointError(LoadError):
    """Some files of a checkpoint are on disks of other nodes; those here are whole.

    Attributes:
        lacking: the filesystem groups whose files are not here.
    """

    lacking: Sequence[int] = ()


class HalfRenamedError(CheckpointError, OSError):
    """A name was changed on the disks of some nodes, and not on those of others."""


class CoordinationError(CheckpointError):
    """Ranks could not agree.

    Attributes:
        failures: rank -> its failure, as text.
        causes: rank -> the same, as values.
        in_doubt: whether the coordinator may have committed nevertheless: this rank had reported, and did not
            receive the outcome.
    """

    failures: Mapping[int, str] = {}
    causes: Mapping[int, Failure] = {}
    in_doubt: bool = False


class DeadlineError(CoordinationError, TimeoutError):
    """Ranks did not arrive within the deadline.

    Attributes:
        awaited: the ranks that did not arrive; none if the job's store did not answer.
    """

    awaited: Sequence[int] = ()
