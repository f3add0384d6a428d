"""One save as a pure function: (phase, event) -> (phase, commands).

The background thread only executes commands and reports events; every decision about the order of things
is here, where it can be tested without torch, threads or storage.

    PLANNED --Staged--> OPENING --Opened--> WRITING --Written--> MEETING --Committed--> DONE
       |                   |                   |                    |
       +------Failed-------+------Failed-------+--Failed--> MEETING +--Failed--> DONE

Nobody writes before the coordinator has opened the save; if it cannot, it says so to all at once. A rank that
failed still goes to the meeting: it brings its error, so that every rank learns of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, final

from ckpt_core.types import CheckpointInfo


class Phase(Enum):
    """Where a save stands on this rank."""

    PLANNED = auto()
    OPENING = auto()
    WRITING = auto()
    MEETING = auto()
    DONE = auto()


@final
@dataclass(frozen=True, slots=True)
class Staged:
    """The copies are made; training may change the originals."""


@final
@dataclass(frozen=True, slots=True)
class Opened:
    """The place is prepared; ranks may write."""


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator could not open the save. Every rank knows, and nobody has written."""


@final
@dataclass(frozen=True, slots=True)
class Written:
    """This rank's files are durable; `report` says which they are."""

    report: bytes


@final
@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists."""

    info: CheckpointInfo


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """Something went wrong on this rank, or, in the meeting, on any rank."""

    error: BaseException


Event: TypeAlias = Staged | Opened | Refused | Written | Committed | Failed


@final
@dataclass(frozen=True, slots=True)
class Open:
    """Prepare the place and tell all, or wait to be told; `error` is what kept this rank from staging."""

    error: BaseException | None = None


@final
@dataclass(frozen=True, slots=True)
class Write:
    """Write this rank's files."""


@final
@dataclass(frozen=True, slots=True)
class Meet:
    """Go to the meeting with a report or with an error."""

    payload: bytes | BaseException


@final
@dataclass(frozen=True, slots=True)
class Release:
    """Give the staging memory back."""


@final
@dataclass(frozen=True, slots=True)
class Fulfil:
    """Tell whoever waits that the checkpoint exists."""

    info: CheckpointInfo


@final
@dataclass(frozen=True, slots=True)
class Reject:
    """Tell whoever waits that the save failed."""

    error: BaseException


@final
@dataclass(frozen=True, slots=True)
class Prune:
    """Apply the retention policy; only ever after a commit."""

    info: CheckpointInfo


Command: TypeAlias = Open | Write | Meet | Release | Fulfil | Reject | Prune


def reduce(phase: Phase, event: Event) -> tuple[Phase, tuple[Command, ...]]:
    """What happens next.

    Raises:
        ValueError: this event cannot occur in this phase.
    """
    match phase, event:
        case Phase.PLANNED, Staged() | Failed():
            return Phase.OPENING, (Open(event.error if isinstance(event, Failed) else None),)
        case Phase.OPENING, Opened():
            return Phase.WRITING, (Write(),)
        case (Phase.OPENING, Refused() | Failed()) | (Phase.WRITING, Written() | Failed()):
            return Phase.MEETING, (Release(), Meet(_brought(event)))
        case Phase.MEETING, Committed(info):
            return Phase.DONE, (Fulfil(info), Prune(info))
        case Phase.MEETING, Failed(error):
            return Phase.DONE, (Reject(error),)
        case _:
            raise ValueError(f"{type(event).__name__} cannot occur in phase {phase.name}")


def _brought(event: Event) -> bytes | BaseException:
    match event:
        case Failed(error):
            return error
        case Written(report):
            return report
        case _:
            return b""
