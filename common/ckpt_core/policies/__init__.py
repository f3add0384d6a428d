"""The contracts of policies, `|`, `&` and `~`, and what a save is decided by."""
# ruff: noqa: D102 - the docstring of a policy describes its overrides

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, cast, final

from ckpt_core.errors import ConfigError
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import instances, require

PREEMPTION = "preemption"
"""The entry of `CadenceContext.signals` for a job that is about to be stopped."""


class Counts(TypedDict, total=False):
    """What a training has done besides steps, the same on every rank.

    Attributes:
        epochs: epochs finished.
        tokens: tokens trained on, by all ranks together.
    """

    epochs: int
    tokens: int


_NO_COUNTS: Final = Counts()


class SaveCosts(NamedTuple):
    """What the saves of this run cost, measured: medians in seconds of training time.

    Attributes:
        stall: a save blocks training for so long.
        slowdown: further training time lost while one save is in flight, as steps took longer.
        durable: from the decision to the commit in the root.
        uploaded: from the decision until the first `Upload` tier has it; None without one, or not yet known.
        saves: how many were measured.
        lost: seconds of training time that all saves of this run have cost so far.
        step: a step without a save in flight.
    """

    stall: float
    slowdown: float
    durable: float
    uploaded: float | None
    saves: int
    lost: float
    step: float


class FailureRate(NamedTuple):
    """How often this job fails.

    Attributes:
        mtbf: mean seconds between failures.
        source: where the number comes from, for users.
    """

    mtbf: float
    source: str


class ChosenInterval(NamedTuple):
    """The seconds between saves that a policy finds, by which rate of failures."""

    seconds: float
    failures: FailureRate | None = None


class CadenceContext(NamedTuple):
    """The input of a decision; a tuple, as every step of a training makes one.

    Attributes:
        step: the step just finished.
        previous_step: the last step decided on before this one in this run; None at the first.
        now: seconds on any clock, the same for every time here.
        started: when this run started.
        last_save_step: the last step saved or resumed from; None if there is none.
        last_save_time: time of that save; None if there is none.
        total_steps: length of the training, if known.
        signals: external events of the job, e.g. `PREEMPTION`.
        counts: of this step, as far as they are known.
        since_counts: of the last decision or save before it; without a count where it is not known.
        costs: what saves cost; None as long as none was measured.
        failures: how often this job fails; None if not known yet.
        in_flight: whether the newest save is not yet durable in the root, on any rank.
    """

    step: int
    now: float
    started: float
    previous_step: int | None = None
    last_save_step: int | None = None
    last_save_time: float | None = None
    total_steps: int | None = None
    signals: frozenset[str] = frozenset()
    counts: Counts = _NO_COUNTS
    since_counts: Counts = _NO_COUNTS
    costs: SaveCosts | None = None
    failures: FailureRate | None = None
    in_flight: bool = False

    @property
    def since(self) -> int:
        """The last step decided on: a boundary after it and up to `step` is due now."""
        step, decided, saved = self.step, self.previous_step, self.last_save_step
        since = decided if decided is not None and decided < step else None
        if saved is not None and saved < step and (since is None or saved > since):
            since = saved
        return step - 1 if since is None else since


Kind = TypeVar("Kind", "SavePolicy", "RetentionPolicy")


class _Policy(ABC, Generic[Kind]):
    """What combines with others of its kind."""

    __slots__ = ()

    def __or__(self, other: Kind) -> Kind:
        return cast("Kind", AnyOf((*joined(self, AnyOf), *joined(other, AnyOf))))

    def __and__(self, other: Kind) -> Kind:
        return cast("Kind", AllOf((*joined(self, AllOf), *joined(other, AllOf))))

    def __invert__(self) -> Kind:
        return cast("Kind", Not(self))


class SavePolicy(_Policy["SavePolicy"]):
    """A policy that decides whether to save the step just finished.

    1. (all ranks) where `needs_agreement` is False, every rank calls `decide` and gets the same answer.
    2. (coordinator) where it is True, one rank calls `decide` and broadcasts the answer.

    Implementations are frozen values: same context, same answer, on any thread.
    """

    __slots__ = ()

    @abstractmethod
    def decide(self, context: CadenceContext) -> str | None:
        """Return the reason to save now, for users, or None. Call `cadence.decide`."""

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks may decide differently, by time or signals; True by default."""
        return True

    @property
    def counts(self) -> frozenset[str]:
        """The names of the counts that it needs, of `Counts`."""
        return frozenset()

    @property
    def needs_costs(self) -> bool:
        """Whether it reads `costs` or `in_flight` of the context; False by default."""
        return False

    @property
    def needs_failures(self) -> bool:
        """Whether it reads `failures` of the context; False by default."""
        return False

    @property
    def needs_upload(self) -> bool:
        """Whether the run must have an upload tier; False by default."""
        return False

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        """Return the interval that it has found by now; None where it looks for none."""
        del context
        return None


class RetentionPolicy(_Policy["RetentionPolicy"]):
    """A policy that selects the committed checkpoints to keep.

    Implementations are frozen values. The result must not depend on the order of the history, and a kept
    checkpoint must still be kept after others are removed: pruning twice then equals pruning once.
    """

    __slots__ = ()

    @abstractmethod
    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        """Select the steps to keep. `now` is Unix time, like `CheckpointInfo.created`.

        `history` holds the committed checkpoints of the present lineage that are marked neither as damaged
        nor as bad.
        """

    def preferred(self, history: Sequence[CheckpointInfo], now: float) -> Sequence[int]:
        """Return the steps that `keep` selects; the first go last where room is short."""
        return sorted(self.keep(history, now), reverse=True)

    @property
    def counts(self) -> frozenset[str]:
        """What must be known of a save: `epochs`, `total_steps`."""
        return frozenset()

    @property
    def most_bytes(self) -> int | None:
        """The most bytes that all checkpoints together may have; None for no bound."""
        return None

    def surplus(self, history: Sequence[CheckpointInfo]) -> Collection[str]:
        """Name checkpoints to remove whose step stays, for a host that counts saves."""
        del history
        return ()

    @property
    def judges_alone(self) -> bool:
        """Whether each checkpoint is judged by itself; only then can a policy be negated."""
        return False


class _Combined(SavePolicy, RetentionPolicy):  # pyright: ignore[reportGeneralTypeIssues]
    """Policies as one, of the kind that they are of; it needs what any of them needs."""

    __slots__ = ()

    @property
    @abstractmethod
    def _parts(self) -> tuple[Any, ...]: ...

    @property
    def needs_agreement(self) -> bool:
        return any(part.needs_agreement for part in self._parts)

    @property
    def needs_costs(self) -> bool:
        return any(part.needs_costs for part in self._parts)

    @property
    def needs_failures(self) -> bool:
        return any(part.needs_failures for part in self._parts)

    @property
    def needs_upload(self) -> bool:
        return any(part.needs_upload for part in self._parts)

    @property
    def counts(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.counts for part in self._parts))

    @property
    def judges_alone(self) -> bool:
        return all(part.judges_alone for part in self._parts)


@dataclass(frozen=True, slots=True)
class _Several(_Combined):
    policies: tuple[Any, ...]

    def __post_init__(self) -> None:
        members: Any = self.policies
        keeps = isinstance(members, tuple) and bool(members) and is_of_kind(members[0], RetentionPolicy)
        kind = RetentionPolicy if keeps else SavePolicy
        problem = instances("policies", members, kind)
        wrong = [] if problem else [each for each in members if not is_of_kind(each, kind)]
        if wrong:
            problem = f"policies must hold {kind.__name__} objects, not {wrong!r}"
        require(type(self).__name__, problem)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.policies

    def _interval(
        self, context: CadenceContext, of: Callable[..., ChosenInterval | None]
    ) -> ChosenInterval | None:
        return of((found for part in self._parts if (found := part.interval(context))), default=None)


@final
@dataclass(frozen=True, slots=True)
class AnyOf(_Several):
    """Saves, or keeps, where at least one policy does; written `a | b`."""

    def __post_init__(self) -> None:
        _Several.__post_init__(self)  # without arguments, `super` is another class where slots are made
        parts = (leaf for part in self._parts for leaf in leaves(part))
        bound = next((leaf for leaf in parts if getattr(leaf, "most_bytes", None) is not None), None)
        if bound is not None:
            raise ConfigError(
                f"{bound!r} bounds what other policies keep, together: write (a | b) & {bound!r}"
            )

    def decide(self, context: CadenceContext) -> str | None:
        return ", ".join([reason for part in self._parts if (reason := part.decide(context))]) or None

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        return self._interval(context, min)

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset[int]().union(*(part.keep(history, now) for part in self._parts))


@final
@dataclass(frozen=True, slots=True)
class AllOf(_Several):
    """Saves, or keeps, where all policies do; written `a & b`."""

    def decide(self, context: CadenceContext) -> str | None:
        reasons = [part.decide(context) for part in self._parts]
        return " and ".join(reasons) if all(reasons) else None

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        return self._interval(context, max)

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return _steps(history).intersection(*(part.keep(history, now) for part in self._parts))

    def preferred(self, history: Sequence[CheckpointInfo], now: float) -> Sequence[int]:
        kept = self.keep(history, now)
        return [step for step in self._parts[0].preferred(history, now) if step in kept]

    @property
    def most_bytes(self) -> int | None:
        bounds = [getattr(part, "most_bytes", None) for part in self._parts]
        return min((bound for bound in bounds if bound is not None), default=None)


@final
@dataclass(frozen=True, slots=True)
class Not(_Combined):
    """Saves, or keeps, where the policy does not; written `~a`.

    Of retention policies only for those that judge each checkpoint by itself: "all but the latest three"
    would select three others after every prune, and so remove the whole history over time.
    """

    policy: Any

    def __post_init__(self) -> None:
        problem = None
        if not is_of_kind(self.policy, RetentionPolicy):
            if not isinstance(self.policy, SavePolicy):
                problem = f"policy must be a SavePolicy or a RetentionPolicy, not {self.policy!r}"
        elif not self.policy.judges_alone:
            problem = (
                f"{self.policy!r} compares checkpoints with each other, so that its opposite would delete "
                "more at every prune; negate only KeepSteps, KeepFor or KeepAll"
            )
        require("Not", problem)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.policy,)

    def decide(self, context: CadenceContext) -> str | None:
        return None if self.policy.decide(context) else f"not {self.policy!r}"

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return _steps(history).difference(self.policy.keep(history, now))


def leaves(policy: Kind | None) -> Iterator[Kind]:
    """Yield the policies of which a policy is combined, from left to right."""
    if isinstance(policy, _Combined):
        for part in policy._parts:
            yield from leaves(part)
    elif policy is not None:
        yield policy


def is_of_kind(policy: Any, kind: type[SavePolicy] | type[RetentionPolicy]) -> bool:
    """Return whether a value is a policy of a kind, which is that of its parts."""
    return isinstance(policy, kind) and isinstance(next(leaves(cast("SavePolicy", policy))), kind)


def joined(policy: Any, how: type[AnyOf] | type[AllOf]) -> tuple[Any, ...]:
    """Return the policies that were joined with `|` or `&`; of another policy, itself."""
    return policy.policies if isinstance(policy, how) else (policy,)


def _steps(history: Sequence[CheckpointInfo]) -> frozenset[int]:
    return frozenset(info.step for info in history)
