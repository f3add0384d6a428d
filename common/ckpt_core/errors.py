"""Every error that this suite raises, so that one `except` can catch them all.

CheckpointError(Exception)
├─ ConfigError(…, ValueError)                      bad construction or options; lists every offender
├─ CheckpointNotFoundError(…, FileNotFoundError)   no such step, or nothing committed yet
├─ CheckpointExistsError(…, FileExistsError)       the step is committed already; nothing is overwritten
├─ RootBusyError                                   another live job writes to this root
├─ CorruptCheckpointError                          files differ from what the manifest promises
├─ IncompatibleCheckpointError                     foreign or newer format, or another model's checkpoint
├─ UnsafeCheckpointError                           loading it would need pickle, which was not allowed
├─ UntrustedCheckpointError                        `verify_manifest` does not accept it
├─ SaveError                                       a save failed; the last committed checkpoint is untouched
│  ├─ NoRoomError                                  it would not have fitted on the disk; nothing was written
│  └─ DivergenceError                              ranks hold different values under one name
├─ StagingMemoryError(…, MemoryError)              the copy of the state would not fit into host memory
├─ LoadError                                       a load failed for a reason that is none of the above
│  └─ ArchivedError(…, PermissionError)            it is in an archive, and must be restored before it is read
└─ CoordinationError                               ranks could not agree
   └─ DeadlineError(…, TimeoutError)               some ranks did not arrive in time; names them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias


class CheckpointError(Exception):
    """Root of all errors raised by ckpt-suite.

    Keyword attributes go with the error where it is pickled and, as far as they are plain, across ranks.
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
        """What was given beside the message."""
        return self._attributes

    def retold(self, message: str, **changed: Any) -> Self:
        """The same error, attributes included unless they are given, in other words."""
        return type(self)(message, **{**self._attributes, **changed})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._attributes)


def _rebuild(cls: type[CheckpointError], message: str, attributes: dict[str, Any]) -> CheckpointError:
    return cls(message, **attributes)


class ConfigError(CheckpointError, ValueError):
    """An option or argument is wrong; the message names it and the fix."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the place asked for."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is already there; checkpoints are immutable."""


class RootBusyError(CheckpointError):
    """Another job writes to the same root."""


SavePhase: TypeAlias = Literal["plan", "stage", "open", "write", "commit"]
"""Where in a save something happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What happened on one rank, as the other ranks are told.

    Attributes:
        kind: name of the exception's class.
        text: class and message, in one line.
        errno: the operating system's number for it; None if it did not come from there.
        phase: of the save in which it happened, see `SaveError`; "" if that is not known.
    """

    kind: str
    text: str
    errno: int | None = None
    phase: SavePhase | Literal[""] = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an exception; what it was raised from may say more than it does itself."""
        return cls(
            kind=type(error).__name__,
            text=failure_text(error),
            errno=next((e.errno for e in _causes(error) if isinstance(e, OSError) and e.errno), None),
            phase=_phase_of(error),
        )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def _phase_of(error: BaseException) -> SavePhase | Literal[""]:
    for each in _causes(error):
        if isinstance(each, SaveError) and each.phase:
            return each.phase
    return ""


def failure_text(error: BaseException) -> str:
    """One line for the person on call: the exception's type and message."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFailure:
    """One file that is not what the manifest promises."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class CorruptCheckpointError(CheckpointError):
    """The bytes on storage are not those that were committed.

    Attributes:
        failures: what is wrong, file by file.
    """

    failures: Sequence[FileFailure] = ()


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is intact but cannot be loaded into this state or by this version.

    Attributes:
        missing: keys the training state has and the checkpoint lacks.
        unexpected: keys the checkpoint has and the training state lacks.
        mismatched: keys whose shape or dtype differ, with both sides spelled out.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()


class UnsafeCheckpointError(CheckpointError):
    """Loading would execute a pickle and `allow_pickle=True` was not given."""


class UntrustedCheckpointError(CheckpointError):
    """The user's `verify_manifest` does not accept the checkpoint; its bytes may be whole all the same.

    Attributes:
        why: what the function did, in words.
    """

    why: str = ""


class SaveError(CheckpointError):
    """A save failed on at least one rank; the same error reaches every rank.

    Attributes:
        step: the step being saved.
        phase: a `SavePhase`; of ranks that did not come in time, what they were waited for to do.
        failures: rank -> what happened there, as text.
        in_doubt: whether the checkpoint may be there all the same, now or after a power cut: its name could
            not be made durable, or an object store did not tell what became of the marker. It is whole if it
            is there.
    """

    step: int = -1
    phase: SavePhase | Literal[""] = ""
    failures: Mapping[int, str] = {}
    in_doubt: bool = False


class NoRoomError(SaveError):
    """A save would not fit where checkpoints go, so that it was refused before anything was written.

    Attributes:
        needed_bytes: what the save would take, in bytes.
        free_bytes: what is free there, in bytes, headroom included; None where nobody can tell.
        headroom_bytes: what saves are to leave free, in bytes.
        needed_files: how many files and directories it would make.
        free_files: how many can be made; None where nobody can tell.
    """

    needed_bytes: int = 0
    free_bytes: int | None = None
    headroom_bytes: int = 0
    needed_files: int = 0
    free_files: int | None = None


class DivergenceError(SaveError):
    """Ranks hold different values under one name, so that nobody can tell which is the training's.

    Attributes:
        differing: name -> the ranks whose value is not that of the lowest rank that has one; after the first
            save, of the names that were compared.
    """

    differing: Mapping[str, Sequence[int]] = {}


OWN_NAMES: Final = (
    "Give tensors that differ, such as those of the stages of a pipeline or of experts, names of their own, "
    "for example TrainState(model={'stage1': module}) on the ranks of that stage"
)
"""What to do about tensors that have one name and are not the same."""


class StagingMemoryError(CheckpointError, MemoryError):
    """The copy of this rank's share would not fit into host memory; nothing was allocated.

    Attributes:
        needed_bytes: what would have to be allocated, in bytes.
        available_bytes: what may be, in bytes.
    """

    needed_bytes: int = 0
    available_bytes: int = 0


class LoadError(CheckpointError):
    """A load failed; the message says on which rank and why."""


class ArchivedError(LoadError, PermissionError):
    """An object was moved to an archive: it is whole, and can be read once it has been restored."""


class CoordinationError(CheckpointError):
    """Ranks could not agree.

    Attributes:
        failures: rank -> what happened there, as text.
        causes: rank -> the same, as values.
        in_doubt: whether the coordinator may have done what was agreed on all the same: this rank had told
            that it was ready, and did not hear how it ended.
    """

    failures: Mapping[int, str] = {}
    causes: Mapping[int, Failure] = {}
    in_doubt: bool = False


class DeadlineError(CoordinationError, TimeoutError):
    """Ranks did not arrive within the deadline.

    Attributes:
        awaited: the ranks that did not arrive; none if it was the job's store that did not answer.
    """

    awaited: Sequence[int] = ()
