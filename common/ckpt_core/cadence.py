"""Save policies: values without a clock, a rank, torch or I/O.

Time, history and signals are in a `CadenceContext`, so that one rank can decide for all, and so that every
decision can be replayed in a test. Policies combine with `|`, `&` and `~`.
"""
# ruff: noqa: D102 - the docstring of a policy describes its overrides

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePath
from typing import ClassVar, Final, Literal, NamedTuple, TypedDict, final

from ckpt_core.errors import ConfigError
from ckpt_core.validation import boolean, function, instances, integer, integers, positive, require, text

PREEMPTION = "preemption"
"""The entry of `CadenceContext.signals` for a job that is about to be stopped."""

_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})
_SMALLEST_FRACTION = Fraction(1, 1_000_000)


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
        slowdown: further training time lost while one save is in flight.
        durable: from the decision to the commit in the root.
        uploaded: from the decision until the first `Upload` tier has it; None if not known.
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
    """How often this job fails: seconds between failures, and how that is known."""

    mtbf: float
    source: str


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
        costs: of the saves of this run; None before one is measured.
        failures: how often the job fails; None before the root is taken.
        in_flight: whether on any rank the newest save is not durable in the root yet.
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


class SavePolicy(ABC):
    """A policy that decides whether to save the step just finished.

    1. (all ranks) where `needs_agreement` is False, every rank calls `decide` and gets the same answer.
    2. (coordinator) where it is True, one rank calls `decide` and broadcasts the answer.

    Implementations are frozen values: same context, same answer, on any thread.
    """

    __slots__ = ()

    @abstractmethod
    def decide(self, context: CadenceContext) -> str | None:
        """Return the reason to save now, for users, or None. Call `decide` of this module."""

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks may decide differently, by time or signals; True by default."""
        return True

    @property
    def needs_costs(self) -> bool:
        """Whether it decides by what saves cost."""
        return False

    @property
    def needs_failures(self) -> bool:
        """Whether it decides by how often the job fails."""
        return False

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        """The sources of preemptions of this policy; () if there are none."""
        return ()

    @property
    def counts(self) -> frozenset[str]:
        """The names of the counts that it needs, of `Counts`."""
        return frozenset()

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return AnyOf((*_flat(self, AnyOf), *_flat(other, AnyOf)))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return AllOf((*_flat(self, AllOf), *_flat(other, AllOf)))

    def __invert__(self) -> SavePolicy:
        return Not(self)


def decide(policy: SavePolicy, context: CadenceContext) -> str | None:
    """Return the reason to save now, or None; never for a step saved already.

    Raises:
        ConfigError: the policy needs a value that neither it nor the context has.
    """
    return None if context.step == context.last_save_step else policy.decide(context)


def needed_counts(policy: SavePolicy | None) -> frozenset[str]:
    """Return the names of the counts that a policy needs; none without a policy."""
    return frozenset() if policy is None else policy.counts


@final
@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Saves at `offset`, `offset + n`, `offset + 2n`…, but not at step 0.

    If steps advance by more than one, the first decision at or after a boundary fires.
    """

    n: int
    offset: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        require("EverySteps", integer("n", self.n, minimum=1), integer("offset", self.offset, minimum=0))

    def decide(self, context: CadenceContext) -> str | None:
        boundary = context.step - (context.step - self.offset) % self.n
        due = boundary >= self.offset and boundary > max(context.since, 0)
        return f"every {self.n} steps" if due else None

    @property
    def needs_agreement(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class AtSteps(SavePolicy):
    """Saves at these steps, or at the first decision after one that was jumped over."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        require("AtSteps", integers("steps", self.steps, minimum=0))
        # Any collection is accepted, but equal policies must be equal and hashable.
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def decide(self, context: CadenceContext) -> str | None:
        due = [step for step in self.steps if context.since < step <= context.step]
        return f"at step {due[-1]}" if due else None

    @property
    def needs_agreement(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Saves at this interval since the last save, or since the start of the run."""

    seconds: float

    def __post_init__(self) -> None:
        require("EverySeconds", positive("seconds", self.seconds))

    def decide(self, context: CadenceContext) -> str | None:
        start = context.started if context.last_save_time is None else context.last_save_time
        return f"every {self.seconds:g} s" if context.now - start >= self.seconds else None


@final
@dataclass(frozen=True, slots=True)
class EveryFraction(SavePolicy):
    """Saves at each such fraction of training: `EveryFraction(0.1)` saves ten times.

    `total_steps` is required unless the training loop gives it to the manager.
    """

    fraction: float
    total_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        problem = positive("fraction", self.fraction)
        if problem is None and not _SMALLEST_FRACTION <= self.fraction <= 1:
            problem = f"fraction must be between 0.000001 and 1, not {self.fraction!r}"
        total = None if self.total_steps is None else integer("total_steps", self.total_steps, minimum=1)
        require("EveryFraction", problem, total)

    def decide(self, context: CadenceContext) -> str | None:
        total = context.total_steps if self.total_steps is None else self.total_steps
        if total is None:
            raise ConfigError(
                "EveryFraction: the length of the training is unknown. Give "
                f"EveryFraction({self.fraction}, total_steps=…) or give the manager the total."
            )
        # Exact: 0.1 means 1/10, and k * 0.1 in floats would miss boundaries by a step.
        interval = Fraction(self.fraction).limit_denominator(1_000_000) * total
        due = context.step // interval > max(context.since, 0) // interval
        return f"every {self.fraction:.6g} of {total} steps" if due else None

    @property
    def needs_agreement(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _EveryCount(SavePolicy):
    """Saves at the first decision that finds a count at or beyond the next multiple."""

    n: int

    _NAME: ClassVar[Literal["epochs", "tokens"]]

    def __post_init__(self) -> None:
        require(type(self).__name__, integer("n", self.n, minimum=1))

    def decide(self, context: CadenceContext) -> str | None:
        name = self._NAME
        count = context.counts.get(name)
        if count is None:
            raise ConfigError(
                f"{self!r}: the number of {name} is unknown here. Give it with every step: "
                f"maybe_save(step, state, {name}=…)"
            )
        due = count // self.n > context.since_counts.get(name, count) // self.n
        return f"every {self.n} {name}" if due else None

    @property
    def needs_agreement(self) -> bool:
        return False

    @property
    def counts(self) -> frozenset[str]:
        return frozenset({self._NAME})


@final
@dataclass(frozen=True, slots=True)
class EveryEpochs(_EveryCount):
    """Saves at the end of every `n`th epoch; the training loop gives the number."""

    _NAME = "epochs"


@final
@dataclass(frozen=True, slots=True)
class EveryTokens(_EveryCount):
    """Saves each time that `n` more tokens were trained on, by all ranks together.

    The training loop gives the number so far, which need not be a multiple of `n` at any step.
    """

    _NAME = "tokens"


@final
@dataclass(frozen=True, slots=True)
class FirstStep(SavePolicy):
    """Saves at the first decision of a new run, so that a bad set-up shows early."""

    def decide(self, context: CadenceContext) -> str | None:
        fresh = context.previous_step is None and context.last_save_step is None
        return "first step" if fresh else None

    @property
    def needs_agreement(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class OnPreemption(SavePolicy):
    """Saves once when a preemption of the job is announced to any rank.

    Args:
        signals: names of operating-system signals.
        file: a path whose existence announces it. It is polled once a second, and also counts if it exists at
            the start of a run: remove it before the job starts again.
        when: a function without arguments, or its name, as "package.module:function"; it is called about once
            a second on a separate thread, and announces a preemption by True.
        stop: whether training must end after that save; else it continues, and each further announcement
            leads to another save. An announcement to several ranks, one after another, counts once.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    file: str | PurePath | None = field(default=None, kw_only=True)
    when: Callable[[], bool] | str | None = field(default=None, kw_only=True)
    stop: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        elsewhere = self.file is not None or self.when is not None
        signals = None if self.signals == () and elsewhere else _signals(self.signals)
        file = None if self.file is None or isinstance(self.file, PurePath) else text("file", self.file)
        when = None if self.when is None else function("when", self.when)
        require("OnPreemption", signals, file, when, boolean("stop", self.stop))
        # A path and its text make equal policies.
        object.__setattr__(self, "file", None if self.file is None else str(self.file))

    def decide(self, context: CadenceContext) -> str | None:
        return PREEMPTION if PREEMPTION in context.signals else None

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return (self,)


@final
@dataclass(frozen=True, slots=True)
class AnyOf(SavePolicy):
    """Saves when at least one policy does; written `a | b`."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        require("AnyOf", instances("policies", self.policies, SavePolicy))

    def decide(self, context: CadenceContext) -> str | None:
        reasons = [reason for policy in self.policies if (reason := policy.decide(context))]
        return ", ".join(reasons) or None

    @property
    def needs_agreement(self) -> bool:
        return any(policy.needs_agreement for policy in self.policies)

    @property
    def needs_costs(self) -> bool:
        return any(policy.needs_costs for policy in self.policies)

    @property
    def needs_failures(self) -> bool:
        return any(policy.needs_failures for policy in self.policies)

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return tuple(each for policy in self.policies for each in policy.preemptions)

    @property
    def counts(self) -> frozenset[str]:
        return frozenset[str]().union(*(policy.counts for policy in self.policies))


@final
@dataclass(frozen=True, slots=True)
class AllOf(SavePolicy):
    """Saves when all policies do, at the same decision; written `a & b`."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        require("AllOf", instances("policies", self.policies, SavePolicy))

    def decide(self, context: CadenceContext) -> str | None:
        reasons = [policy.decide(context) for policy in self.policies]
        return " and ".join(reason for reason in reasons if reason) if all(reasons) else None

    @property
    def needs_agreement(self) -> bool:
        return any(policy.needs_agreement for policy in self.policies)

    @property
    def needs_costs(self) -> bool:
        return any(policy.needs_costs for policy in self.policies)

    @property
    def needs_failures(self) -> bool:
        return any(policy.needs_failures for policy in self.policies)

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return tuple(each for policy in self.policies for each in policy.preemptions)

    @property
    def counts(self) -> frozenset[str]:
        return frozenset[str]().union(*(policy.counts for policy in self.policies))


@final
@dataclass(frozen=True, slots=True)
class Not(SavePolicy):
    """Saves when the policy does not; written `~a`. Useful inside `&`."""

    policy: SavePolicy

    def __post_init__(self) -> None:
        require("Not", instances("policy", (self.policy,), SavePolicy))

    def decide(self, context: CadenceContext) -> str | None:
        return None if self.policy.decide(context) else f"not {self.policy!r}"

    @property
    def needs_agreement(self) -> bool:
        return self.policy.needs_agreement

    @property
    def needs_costs(self) -> bool:
        return self.policy.needs_costs

    @property
    def needs_failures(self) -> bool:
        return self.policy.needs_failures

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return self.policy.preemptions

    @property
    def counts(self) -> frozenset[str]:
        return self.policy.counts


def _signals(names: tuple[str, ...]) -> str | None:
    known = set(signal.Signals.__members__) - _UNCATCHABLE
    problem = instances("signals", names, str)
    wrong = [] if problem else [name for name in names if name not in known]
    return f"signals must be names of signals that a process can catch, not {wrong!r}" if wrong else problem


def _flat(policy: SavePolicy, kind: type[AnyOf] | type[AllOf]) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, kind) else (policy,)


__all__ = [
    "PREEMPTION",
    "AllOf",
    "AnyOf",
    "AtSteps",
    "CadenceContext",
    "Counts",
    "EveryEpochs",
    "EveryFraction",
    "EverySeconds",
    "EverySteps",
    "EveryTokens",
    "FirstStep",
    "Not",
    "OnPreemption",
    "SavePolicy",
    "decide",
    "needed_counts",
]
