"""Save policies whose boundaries the user gives: steps, times, counts, signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import PurePath
from typing import Any, ClassVar, Final, Literal, TypeAlias, cast, final

from ckpt_core.errors import ConfigError
from ckpt_core.policies import PREEMPTION, CadenceContext, SavePolicy, leaves
from ckpt_core.validation import (
    boolean,
    duration,
    function,
    instances,
    integer,
    integers,
    require,
    require_part,
    seconds_of,
    take_duration,
    text,
)

Deadline: TypeAlias = float | str | timedelta | datetime | Callable[[], float | None]
_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})


def decide(policy: SavePolicy, context: CadenceContext) -> str | None:
    """Return the reason to save now, or None; never for a step saved already.

    Raises:
        ConfigError: the policy needs a value that neither it nor the context has.
    """
    return None if context.step == context.last_save_step else policy.decide(context)


def needed_counts(policy: SavePolicy | None) -> frozenset[str]:
    """Return the names of the counts that a policy needs; none without a policy."""
    return frozenset() if policy is None else policy.counts


def preemptions(policy: SavePolicy | None) -> tuple[OnPreemption, ...]:
    """Return the sources of preemptions in a policy; none without a policy."""
    return tuple(leaf for leaf in leaves(policy) if isinstance(leaf, OnPreemption))


class _Agreed(SavePolicy):
    """A policy whose answer goes by what every rank knows alike."""

    __slots__ = ()

    @property
    def needs_agreement(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class EverySteps(_Agreed):
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


@final
@dataclass(frozen=True, slots=True)
class AtSteps(_Agreed):
    """Saves at these steps, or at the first decision after one that was jumped over."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        require("AtSteps", integers("steps", self.steps, minimum=0))
        # Any collection is accepted, but equal policies must be equal and hashable.
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def decide(self, context: CadenceContext) -> str | None:
        due = [step for step in self.steps if context.since < step <= context.step]
        return f"at step {due[-1]}" if due else None


@final
@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Saves at this interval since the last save, or since the start of the run.

    Args:
        seconds: the interval, as a number or as "15m".
    """

    seconds: float | str

    def __post_init__(self) -> None:
        take_duration(self, "seconds")

    def decide(self, context: CadenceContext) -> str | None:
        start = context.started if context.last_save_time is None else context.last_save_time
        seconds = cast("float", self.seconds)
        return f"every {seconds:g} s" if context.now - start >= seconds else None


@final
@dataclass(frozen=True, slots=True)
class EveryFraction(_Agreed):
    """Saves at each such fraction of training: `EveryFraction(0.1)` saves ten times.

    `total_steps` is required unless the training loop gives it to the manager.
    """

    fraction: float
    total_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_part("EveryFraction", self.fraction, self.total_steps)

    def decide(self, context: CadenceContext) -> str | None:
        total = context.total_steps if self.total_steps is None else self.total_steps
        if total is None:
            raise ConfigError(
                "EveryFraction: the length of the training is unknown. Give "
                f"EveryFraction({self.fraction}, total_steps=…), or maybe_save(step, state, total_steps=…)"
            )
        # Exact: 0.1 means 1/10, and k * 0.1 in floats would miss boundaries by a step.
        interval = Fraction(self.fraction).limit_denominator(1_000_000) * total
        due = context.step // interval > max(context.since, 0) // interval
        return f"every {self.fraction:.6g} of {total} steps" if due else None


@dataclass(frozen=True, slots=True)
class _EveryCount(_Agreed):
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
        deadline: when the job ends, so that the last save begins early enough by what saves have cost:
            `slurm`, for the end that SLURM gives the job; a `datetime`; seconds from the start of the run, as
            a number, a `timedelta` or text such as "12h"; a function, or its name, that returns seconds
            since the epoch, or None, and is called as `when` is. That of rank 0 counts.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    file: str | PurePath | None = field(default=None, kw_only=True)
    when: Callable[[], bool] | str | None = field(default=None, kw_only=True)
    stop: bool = field(default=True, kw_only=True)
    deadline: Deadline | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        elsewhere = self.file is not None or self.when is not None or self.deadline is not None
        signals = None if self.signals == () and elsewhere else _signals(self.signals)
        file = None if self.file is None or isinstance(self.file, PurePath) else text("file", self.file)
        when = None if self.when is None else function("when", self.when)
        # Equal policies are written in several ways.
        if isinstance(self.deadline, timedelta):
            object.__setattr__(self, "deadline", self.deadline.total_seconds())
        object.__setattr__(self, "deadline", seconds_of(self.deadline))
        require(
            "OnPreemption",
            signals,
            file,
            when,
            boolean("stop", self.stop),
            _deadline(self.deadline, self.stop),
        )
        object.__setattr__(self, "file", None if self.file is None else str(self.file))

    def decide(self, context: CadenceContext) -> str | None:
        return PREEMPTION if PREEMPTION in context.signals else None

    @property
    def needs_costs(self) -> bool:
        return self.deadline is not None


_TEN_YEARS: Final = 10 * 365 * 86400.0


def _deadline(value: Any, stop: Any) -> str | None:
    if value is None:
        return None
    if stop is False:
        return "deadline is for the last save of a job, and stop=False goes on: give it a policy of its own"
    if value == "slurm" or isinstance(value, datetime) or function("deadline", value) is None:
        return None
    if duration("deadline", value) is None:
        if not isinstance(value, int | float) or value < _TEN_YEARS:
            return None
        return (
            "deadline as a number is seconds from the start of the run; for a time since the epoch give "
            f"datetime.fromtimestamp({value!r})"
        )
    return (
        'deadline must be "slurm", a datetime, seconds from the start ("12h"), or a function or '
        f'"package.module:function" that returns seconds since the epoch, not {value!r}'
    )


def _signals(names: tuple[str, ...]) -> str | None:
    known = set(signal.Signals.__members__) - _UNCATCHABLE
    problem = instances("signals", names, str)
    wrong = [] if problem else [name for name in names if name not in known]
    return f"signals must be names of signals that a process can catch, not {wrong!r}" if wrong else problem
