"""Phases that fail on all ranks or on none, and agreement on arguments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

from ckpt_core.coordination import Coordinator
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    DeadlineError,
    LoadError,
    failure_text,
)
from ckpt_core.formats.codec import MAX_COUNT
from ckpt_core.messages import message
from ckpt_core.options import difference, text_of
from ckpt_core.validation import integer, plain_integer, require, text

T = TypeVar("T")
_SOON_SECONDS = 5.0


@message
@final
@dataclass(frozen=True, slots=True)
class _PhaseOutcome:
    error: CheckpointError | None
    text: str
    note: object = None


@final
@dataclass(slots=True)
class Note:
    """A plain value that each rank sends at the end of a phase; then `all` are there."""

    own: Any = None
    all: Sequence[Any] = ()


@contextmanager
def collective_phase(
    coordinator: Coordinator, consequence: str, *, what: str = "loading a checkpoint"
) -> Generator[Note]:
    """Run the body on every rank; raise the same error on all if it fails. Collective.

    `consequence` is the state that an unexpected exception leaves the live model in, `what` the phase in
    words, for the error of a rank that waits for another.

    Raises:
        DeadlineError: a rank did not reach the end of the phase; `awaited` names it.
        CorruptCheckpointError: damage that any rank found, all of it.
        CheckpointError: the first rank's.
        LoadError: a rank failed otherwise.
    """
    note = Note()
    try:
        yield note
    except Exception as error:
        own = _PhaseOutcome(error if isinstance(error, CheckpointError) else None, failure_text(error))
        # A rank that has just failed to answer needs no second wait of full length.
        soon = _SOON_SECONDS if isinstance(error, DeadlineError) else None
        outcomes = _gathered(coordinator, own, consequence, what, soon=soon)
        _raise_worst(outcomes, consequence, error)
        raise
    outcomes = _gathered(coordinator, _PhaseOutcome(None, "", note.own), consequence, what)
    _raise_worst(outcomes, consequence, None)
    note.all = [outcome.note for outcome in outcomes]


def _gathered(
    coordinator: Coordinator, own: _PhaseOutcome, consequence: str, what: str, *, soon: float | None = None
) -> list[_PhaseOutcome]:
    try:
        return coordinator.gather(own, what=what, deadline_seconds=soon)
    except CoordinationError as error:
        own_part = f"; on this rank {own.text}" if own.text else ""
        raise error.retold(f"{error}{own_part}. {consequence}") from error


def _raise_worst(outcomes: Sequence[_PhaseOutcome], consequence: str, cause: Exception | None) -> None:
    damage = {
        rank: outcome.error
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome.error, CorruptCheckpointError)
    }
    if damage:
        # First of all: with damage, an older checkpoint must be tried, whatever errors other ranks had.
        first = next(iter(damage.values()))
        if len(outcomes) == 1:
            raise first from cause
        found = dict.fromkeys(failure for error in damage.values() for failure in error.failures)
        more = f" (found by rank {', '.join(map(str, damage))}; {len(found)} place(s) in all)"
        raise CorruptCheckpointError(f"{first}{more}", failures=tuple(found)) from cause
    # A CoordinationError only reports the failure of another rank, whose own error is more precise.
    secondhand = [isinstance(outcome.error, CoordinationError) for outcome in outcomes]
    for rank, outcome in sorted(enumerate(outcomes), key=lambda each: secondhand[each[0]]):
        if outcome.error is not None and not secondhand[rank]:
            raise outcome.error from cause
        if outcome.text:
            raise LoadError(f"{consequence} (rank {rank}: {outcome.text})") from cause


@final
class SameOptions:
    """What a manager was given, compared over all ranks before anything depends on it.

    `given` is of `given_options`. Main thread; `require` is collective.
    """

    def __init__(self, coordinator: Coordinator, given: Mapping[str, str]) -> None:
        self._coordinator = coordinator
        self._given = dict(given)
        self._compared_ranks = 0

    def add(self, **options: object) -> None:
        """Add options of a host to what is compared; None is not given."""
        self._given |= {name: text_of(value) for name, value in options.items() if value is not None}

    def require(self) -> None:
        """Refuse options that differ between ranks; compare them once. Collective.

        They are compared again after a refusal, and when the ranks have changed.

        Raises:
            ConfigError: they differ; it names option, values and ranks, the same on every rank.
        """
        coordinator = self._coordinator
        if not self._compared_ranks:
            coordinator.check()  # the other ranks may have come since
        if self._compared_ranks == coordinator.world_size:
            return

        def decide(given: list[dict[str, str]]) -> list[None]:
            if different := difference(given):
                raise ConfigError(
                    f"every rank must be given the same options, and they differ: {different}. Give "
                    "all ranks the same; nothing was written"
                )
            return [None] * len(given)

        if coordinator.world_size > 1:
            coordinator.gather_scatter(self._given, decide, what="comparing the options of the ranks")
        self._compared_ranks = coordinator.world_size


def agreed_values(coordinator: Coordinator, call: str, get: Callable[[], T]) -> T:
    """Agree on plain values of a call; ConfigError on all if they differ. Collective."""
    own: tuple[T | None, str | None]
    try:
        own = get(), None
    except ConfigError as error:
        own = None, str(error)

    def decide(gathered: list[tuple[T | None, str | None]]) -> list[T | None]:
        for rank, (_, problem) in enumerate(gathered):
            if problem is not None:
                raise ConfigError(problem if len(gathered) == 1 else f"rank {rank}: {problem}")
        arguments = [each for each, _ in gathered]
        if any(each != arguments[0] for each in arguments):
            different = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(arguments[:8]))
            raise ConfigError(f"{call}: ranks ask for different things, and must agree: {different}")
        return arguments

    return coordinator.gather_scatter(own, decide, what=f"agreeing on {call}")  # type: ignore[return-value]


def agreed_place(
    coordinator: Coordinator,
    call: str,
    step: int | None,
    name: str | None,
    *,
    others: Callable[[], object] = lambda: None,
) -> tuple[int | None, str | None]:
    """Agree on a call's checkpoint; the newest without step and name. Collective.

    `others` returns plain values of other arguments. Errors as by `agreed_values`.
    """

    def get() -> list[Any]:
        require(call, None if name is None else _key(name))
        also = others()
        return [None if step is None else checked_step(call, step), name, also]

    step, name, _ = agreed_values(coordinator, call, get)
    return step, name


def agreed_step(coordinator: Coordinator, call: str, step: int, *reasons: str) -> int:
    """Agree on a step, as by `agreed_values`; the coordinator's reason counts."""

    def get() -> int:
        require(call, *(text("reason", reason) for reason in reasons))
        return checked_step(call, step)

    return agreed_values(coordinator, call, get)


def checked_step(owner: str, step: Any) -> int:
    """Convert a step to an int; ConfigError if it is none that the format takes."""
    if type(step) is int and 0 <= step <= MAX_COUNT:  # every step of a training comes by here
        return step
    plain = plain_integer(step)
    require(owner, integer("step", plain, minimum=0, maximum=MAX_COUNT))
    return int(plain)


def _key(value: Any) -> str | None:
    if (problem := text("name", value)) is not None:
        return problem
    if "\0" in value or any(part in {"", ".", ".."} for part in value.split("/")):
        return f"name must be the name of a directory in the root, not {value!r}; for another, give its root"
    return None
