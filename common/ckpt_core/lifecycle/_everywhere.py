"""A phase that every rank goes through, and that fails for all of them if it fails for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast, final

from ckpt_core.coordination import Coordinator
from ckpt_core.errors import (
    CheckpointError,
    CoordinationError,
    CorruptCheckpointError,
    DeadlineError,
    FileFailure,
    LoadError,
    failure_text,
)
from ckpt_core.messages import message

T = TypeVar("T")
N = TypeVar("N")
_SOON_SECONDS = 5.0


@message
@final
@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one rank fared, as it travels to the others."""

    error: CheckpointError | None
    text: str
    note: object = None


def everywhere(
    coordinator: Coordinator, act: Callable[[], T], consequence: str, *, what: str = "loading a checkpoint"
) -> T:
    """Run one phase on every rank; if it fails on any, the same error is raised on all. Collective.

    Args:
        coordinator: of the ranks.
        act: the phase.
        consequence: what it means that an error which is none of ours kept it from ending.
        what: the phase in words, for whoever waits in vain for another rank.

    Raises:
        DeadlineError: a rank did not come to the end of the phase; `awaited` names it.
        CorruptCheckpointError: what any rank has found damaged, all of it.
        CheckpointError: the first rank's.
        LoadError: a rank failed otherwise.
    """
    return everywhere_told(coordinator, lambda: (act(), None), consequence, what=what)[0]


def everywhere_told(
    coordinator: Coordinator, act: Callable[[], tuple[T, N]], consequence: str, *, what: str
) -> tuple[T, list[N]]:
    """Run one phase on every rank, as `everywhere`; each also leaves a short note for all. Collective.

    Returns:
        What this rank's phase gave, and the notes of all ranks, which must be plain.
    """
    try:
        result, note = act()
    except Exception as error:
        own = _Outcome(error if isinstance(error, CheckpointError) else None, failure_text(error))
        # A rank that was waited for in vain just now need not be waited for as long again.
        soon = _SOON_SECONDS if isinstance(error, DeadlineError) else None
        outcomes = _gathered(coordinator, own, consequence, what=what, deadline_seconds=soon)
        _raise_worst(outcomes, consequence, error)
        raise
    own = _Outcome(None, "", note)
    outcomes = _gathered(coordinator, own, consequence, what=what, deadline_seconds=None)
    _raise_worst(outcomes, consequence, None)
    return result, [cast("N", outcome.note) for outcome in outcomes]


def _gathered(
    coordinator: Coordinator, own: _Outcome, consequence: str, *, what: str, deadline_seconds: float | None
) -> list[_Outcome]:
    try:
        return coordinator.gather(own, what=what, deadline_seconds=deadline_seconds)
    except CoordinationError as error:
        own_part = f"; on this rank {own.text}" if own.text else ""
        raise error.retold(f"{error}{own_part}. {consequence}") from error


def _raise_worst(outcomes: Sequence[_Outcome], consequence: str, cause: Exception | None) -> None:
    damage = {
        rank: outcome.error
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome.error, CorruptCheckpointError)
    }
    if damage:
        # Before anything else: whatever kept another rank from ending, an older checkpoint must be tried.
        raise _joined(damage, len(outcomes)) from cause
    # What another rank was told of is a CoordinationError; the rank that it happened to knows better.
    for rank, outcome in sorted(enumerate(outcomes), key=lambda each: _is_hearsay(each[1])):
        if outcome.error is not None and not _is_hearsay(outcome):
            raise outcome.error from cause
        if outcome.text:
            raise LoadError(f"{consequence} (rank {rank}: {outcome.text})") from cause


def _is_hearsay(outcome: _Outcome) -> bool:
    return isinstance(outcome.error, CoordinationError)


def _joined(damage: dict[int, CorruptCheckpointError], world_size: int) -> CorruptCheckpointError:
    first = next(iter(damage.values()))
    if world_size == 1:
        return first
    found: dict[FileFailure, None] = dict.fromkeys(
        failure for error in damage.values() for failure in error.failures
    )
    more = f" (found by rank {', '.join(map(str, damage))}; {len(found)} place(s) in all)"
    return CorruptCheckpointError(f"{first}{more}", failures=tuple(found))
