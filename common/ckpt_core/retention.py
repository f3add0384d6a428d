"""Retention policies: values over the history of checkpoints, without I/O.

`plan_prune` applies a policy, and adds the guarantees that no policy can undo. Policies combine with `|`, `&`
and `~`.
"""
# ruff: noqa: D102, ARG002 - the docstring of a policy describes its overrides; few of them need `now`

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from itertools import groupby
from operator import and_, attrgetter, or_
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, cast, final

from ckpt_core.errors import ConfigError
from ckpt_core.messages import message
from ckpt_core.policies import AllOf, AnyOf, RetentionPolicy, joined, leaves
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import (
    instances,
    integer,
    integers,
    one_of,
    parse_size,
    require,
    require_part,
    take_duration,
    text,
)


@final
@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keeps the `n` highest steps."""

    n: int

    def __post_init__(self) -> None:
        require("KeepLatest", integer("n", self.n, minimum=1))

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        # In a bucket, where nothing is replaced, one step may have been saved twice.
        return frozenset(sorted({info.step for info in history}, reverse=True)[: self.n])


class _Milestones(RetentionPolicy):
    """Keeps the first checkpoint of each interval, from the first multiple.

    Exact multiples are not required: saves by time or signals would miss them all.
    """

    __slots__ = ()

    @abstractmethod
    def intervals(self, history: Sequence[CheckpointInfo]) -> Callable[[CheckpointInfo], int | None]:
        """Return what counts the intervals before a checkpoint; None where not known."""

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        if unknown_counts(self, history):
            return frozenset(info.step for info in history)
        count, newest_first = self.intervals(history), sorted(history, key=_by_step, reverse=True)
        # The last to be set is the first of its interval.
        return frozenset({number: info.step for info in newest_first if (number := count(info))}.values())


@final
@dataclass(frozen=True, slots=True)
class KeepEvery(_Milestones):
    """Keeps the first checkpoint of each interval of `steps`, from the first multiple."""

    steps: int

    def __post_init__(self) -> None:
        require("KeepEvery", integer("steps", self.steps, minimum=1))

    def intervals(self, history: Sequence[CheckpointInfo]) -> Callable[[CheckpointInfo], int | None]:
        return lambda info: info.step // self.steps


@final
@dataclass(frozen=True, slots=True)
class KeepEveryFraction(_Milestones):
    """Keeps the first checkpoint of each such fraction of training: 0.1 keeps ten.

    `total_steps` is needed unless the host, or the loop, says it at each save. The length that the newest
    checkpoint knows counts for all; as long as none knows any, all stay.
    """

    fraction: float
    total_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_part("KeepEveryFraction", self.fraction, self.total_steps)

    @property
    def counts(self) -> frozenset[str]:
        return frozenset({"total_steps"} if self.total_steps is None else ())

    def intervals(self, history: Sequence[CheckpointInfo]) -> Callable[[CheckpointInfo], int | None]:
        known = [info for info in history if info.total_steps]
        total = self.total_steps or max(known, key=_by_age, default=_NOTHING).total_steps
        # Exact: 0.1 means 1/10, and k * 0.1 in floats would miss milestones by a step.
        interval = Fraction(self.fraction).limit_denominator(1_000_000) * (total or 1)
        return lambda info: int(info.step // interval)


@final
@dataclass(frozen=True, slots=True)
class KeepEveryEpochs(_Milestones):
    """Keeps the first checkpoint of each `n` epochs, from the end of the nth.

    One that does not know its epoch is not kept; as long as none does, all stay.
    """

    n: int

    def __post_init__(self) -> None:
        require("KeepEveryEpochs", integer("n", self.n, minimum=1))

    @property
    def counts(self) -> frozenset[str]:
        return frozenset({"epochs"})

    def intervals(self, history: Sequence[CheckpointInfo]) -> Callable[[CheckpointInfo], int | None]:
        return lambda info: None if info.epochs is None else info.epochs // self.n


@final
@dataclass(frozen=True, slots=True)
class KeepEverySeconds(RetentionPolicy):
    """Keeps the first checkpoint of each interval, 3600 or "1h", since the epoch."""

    seconds: float | str

    def __post_init__(self) -> None:
        take_duration(self, "seconds")

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        newest_first, seconds = sorted(history, key=_by_age, reverse=True), cast("float", self.seconds)
        return frozenset({math.floor(each.created / seconds): each.step for each in newest_first}.values())


@final
@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keeps the `n` checkpoints with the best metric; of equal ones the newer.

    A checkpoint without the metric, or with NaN or an infinite value, is never among the best.
    """

    metric: str
    n: int = field(default=1, kw_only=True)
    mode: Literal["min", "max"] = field(default="min", kw_only=True)

    def __post_init__(self) -> None:
        require(
            "KeepBest",
            text("metric", self.metric),
            integer("n", self.n, minimum=1),
            one_of("mode", self.mode, ("min", "max")),
        )

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(self.preferred(history, now))

    def preferred(self, history: Sequence[CheckpointInfo], now: float) -> Sequence[int]:
        sign = 1 if self.mode == "min" else -1
        scores = [(sign * info.metrics.get(self.metric, math.nan), -info.step) for info in history]
        ranked = sorted(score for score in scores if math.isfinite(score[0]))
        steps = dict.fromkeys(-negative_step for _, negative_step in ranked)  # one may have been saved twice
        return list(steps)[: self.n]


@final
@dataclass(frozen=True, slots=True)
class KeepFor(RetentionPolicy):
    """Keeps each checkpoint for this many seconds, or "7d", after its commit."""

    seconds: float | str

    def __post_init__(self) -> None:
        take_duration(self, "seconds")

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(i.step for i in history if now - i.created < cast("float", self.seconds))

    @property
    def judges_alone(self) -> bool:
        return True


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepThinned(RetentionPolicy):
    """Keeps the newest of each of the last hours, days and weeks with a checkpoint.

    They begin in UTC, weeks on Mondays. `KeepThinned(hourly=24, daily=7, weekly=4)` is that of many backups.
    """

    hourly: int = 0
    daily: int = 0
    weekly: int = 0

    def __post_init__(self) -> None:
        counts = {"hourly": self.hourly, "daily": self.daily, "weekly": self.weekly}
        problems = [integer(name, count, minimum=0) for name, count in counts.items()]
        none = None if any(counts.values()) else "one of hourly, daily and weekly must be above 0"
        require("KeepThinned", *(problems if any(problems) else [none]))

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(self.preferred(history, now))

    def preferred(self, history: Sequence[CheckpointInfo], now: float) -> Sequence[int]:
        oldest_first, steps = sorted(history, key=_by_age), list[int]()
        for count, seconds, shift in (
            (self.hourly, 3600, 0),
            (self.daily, _DAY, 0),
            (self.weekly, 7 * _DAY, _MONDAY),
        ):
            newest = {math.floor((each.created + shift) / seconds): each.step for each in oldest_first}
            steps += [newest[key] for key in sorted(newest, reverse=True)[:count]]
        return list(dict.fromkeys(steps))


@final
@dataclass(frozen=True, slots=True)
class KeepWithin(RetentionPolicy):
    """Bounds the bytes, or "2 TB", of all checkpoints of a root together.

    `(KeepBest("loss") | KeepLatest(5) | KeepEvery(1000)) & KeepWithin("2 TB")` keeps the best, then the
    latest, then every thousandth, newest first, up to the first that has no room. Alone, it keeps the newest
    that have. The newest, pinned and marked checkpoints stay whatever they take, and count. A save needs its
    own room besides, until the prune after it.
    """

    size: int | str

    def __post_init__(self) -> None:
        if parse_size("KeepWithin: size", self.size) is None:
            raise ConfigError('KeepWithin: size must be given, such as "2 TB"')

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(info.step for info in history)

    @property
    def most_bytes(self) -> int | None:
        return parse_size("size", self.size)


@final
@dataclass(frozen=True, slots=True)
class KeepWeights(RetentionPolicy):
    """Keeps of what another policy keeps the models and their averages alone.

    A checkpoint that no other rule keeps is demoted: its weights are committed beside it as a checkpoint that
    names it, then it is removed. No resume takes weights; `init_from`, `load(source=)` and `ckpt export` do.

    Attributes:
        policy: that selects them, from whole checkpoints and weights.
        dtype: `bf16`, `fp16` or `fp32`, of all floating tensors; None for their own.
    """

    policy: RetentionPolicy
    dtype: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        problem = instances("policy", (self.policy,), RetentionPolicy)
        if problem is None and (self.policy.most_bytes is not None or _as_weights(self.policy)):
            problem = f"{self.policy!r} has a bound or weights in it: write (a | KeepWeights(b)) & bound"
        known = None if self.dtype is None else one_of("dtype", self.dtype, ("bf16", "fp16", "fp32"))
        require("KeepWeights", problem, known)

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return self.policy.keep(history, now)

    def preferred(self, history: Sequence[CheckpointInfo], now: float) -> Sequence[int]:
        return self.policy.preferred(history, now)

    @property
    def counts(self) -> frozenset[str]:
        return self.policy.counts


def any_of(policies: Sequence[RetentionPolicy]) -> RetentionPolicy:
    """Join policies by "or", within all bounds in them, which are of the whole root."""
    bounded = [each for each in policies if each.most_bytes is not None]
    bounds = [each for policy in bounded for each in leaves(policy) if each.most_bytes is not None]
    rules = [rule for policy in policies if (rule := _rules(policy)).most_bytes is None]
    return reduce(and_, [*([reduce(or_, rules)] if rules else []), *bounds])


@final
@dataclass(frozen=True, slots=True)
class KeepSteps(RetentionPolicy):
    """Keeps exactly these steps."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        require("KeepSteps", integers("steps", self.steps, minimum=0))
        # Any collection is accepted, but equal policies must be equal and hashable.
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(info.step for info in history).intersection(self.steps)

    @property
    def judges_alone(self) -> bool:
        return True


@final
@dataclass(frozen=True, slots=True)
class KeepAll(RetentionPolicy):
    """Keeps everything."""

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        return frozenset(info.step for info in history)

    @property
    def judges_alone(self) -> bool:
        return True


Abandoned: TypeAlias = Literal["keep", "prune"]
"""Treatment of checkpoints that the present lineage does not continue: see `plan_prune`."""

UNVERIFIED: Final = "nothing that would stay is known to be whole"
"""Reason to keep a checkpoint that no policy keeps."""

UNRANKED: Final = "no checkpoint has a number for the metric that the policy ranks by"
"""Reason to keep all checkpoints where a policy keeps none, because the best one is unknown."""


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class PrunePlan:
    """The removals and kept checkpoints of a prune.

    Attributes:
        keep: step -> reasons to keep it, for users.
        drop: checkpoints to remove, lowest step first.
        damaged: checkpoints marked as damaged, kept for inspection by a user, lowest step first.
        bad: checkpoints marked as bad and not as damaged, kept likewise.
        abandoned: kept checkpoints that the present lineage does not continue.
        without_room: names of those to remove that `KeepWithin` alone removes.
        demote: those of `keep` of which only the weights are to stay, each with their dtype.
        superseded: names of those to remove whose weights are there already.
    """

    keep: Mapping[int, tuple[str, ...]]
    drop: tuple[CheckpointInfo, ...]
    damaged: tuple[CheckpointInfo, ...] = ()
    bad: tuple[CheckpointInfo, ...] = ()
    abandoned: tuple[CheckpointInfo, ...] = ()
    without_room: tuple[str, ...] = ()
    demote: tuple[tuple[CheckpointInfo, str | None], ...] = ()
    superseded: tuple[str, ...] = ()


def as_it_is(info: CheckpointInfo, dtype: str | None) -> int:
    """Return the size of a checkpoint that nobody makes weights of."""
    del dtype
    return info.size_bytes


def plan_prune(
    policy: RetentionPolicy,
    history: Sequence[CheckpointInfo],
    now: float,
    *,
    abandoned: Abandoned = "keep",
    last: int | None = None,
    weights_bytes: Callable[[CheckpointInfo, str | None], int] = as_it_is,
) -> PrunePlan:
    """Apply a policy to the committed checkpoints, with guarantees for some of them.

    Of the present lineage, the highest step (which a resume would load), the checkpoint committed last
    (training may have gone back to an earlier step) and pinned checkpoints always stay, so that a history is
    never emptied.
    Checkpoints marked as damaged or bad do not count here, so that no sound one is deleted in their place.
    They are not deleted either, because they may be the only trace of a fault, and a mark may be wrong.

    Where a policy keeps none of them, and ranks by a metric that none of them has, all stay: the name may be
    misspelt, or the first evaluation may be still to come, and the best may be any of them.

    Abandoned checkpoints do not count either. They stay, or with `abandoned="prune"` they fill the places
    that the policy still has for checkpoints older and worse than any of the present lineage: with
    `KeepLatest(3)` two stay beside the first of a new run, and the last is removed with its third; with
    `KeepEvery(100)` that of step 300 stays until the new run has one of 300 to 399. Pinned ones stay.

    Weights stay where any rule would keep them, and count for none that keeps whole states. A whole state
    that only a `KeepWeights` keeps is to be demoted, or removed if its weights are there.

    `now` is Unix time in seconds. `last` is the step committed last; by default by timestamps, although a
    clock may have been set back. `weights_bytes` returns what the weights of a whole checkpoint will take.
    """
    ordered = sorted(history, key=_by_step)
    sound = [info for info in ordered if not info.marked]
    present, gone = ([info for info in sound if info.abandoned is each] for each in (False, True))
    whole = [info for info in present if info.usable]
    others = [info for info in gone if abandoned == "keep" or info.pinned is not None]
    if abandoned == "prune":
        newest_first = sorted(gone, key=lambda info: (info.lineage.number, *_by_age(info)), reverse=True)
        names = _stay(policy, newest_first, present, now)  # not replaced by the present line
        others += [info for info in newest_first if info.name in names and info.pinned is None]
    rules, held = _rules(policy), others
    states = _reasons(_of_states(rules), whole, now, last)
    wanted = dict(sorted((_reasons(rules, present, now, last) | states).items()))
    dtypes = _dtypes(rules, [info for info in whole if info.step not in states], present, now)
    there = {info.weights_of.save_id for info in present if info.weights_of is not None}
    superseded = {info.name for info in whole if info.name in dtypes and info.save_id in there}
    reasons = wanted
    if policy.most_bytes is not None:
        must = _reasons(None, present, now, last)
        by_rule = [step for rule in joined(rules, AnyOf) for step in rule.preferred(present, now)]
        sizes = Counter[int]()
        for info in present:
            light = weights_bytes(info, dtypes[info.name]) if info.name in dtypes else info.size_bytes
            sizes[info.step] += 0 if info.name in superseded else light
        order = [step for step in [*by_rule, *sorted(wanted, reverse=True)] if step in wanted]
        left = policy.most_bytes - sum(info.size_bytes for info in ordered if info.marked)
        fits, others = _with_room(order, must, sizes, others, left=left)
        # What has no room stays because it must, and by no rule.
        reasons = {step: why if fits[step] else must[step] for step, why in wanted.items() if step in fits}
    stays = {info.name for info in others}
    surplus = {*superseded, *policy.surplus([info for info in whole if info.pinned is None])}
    drop = [
        info
        for info in sound
        if info.name not in stays and (info.abandoned or info.step not in reasons or info.name in surplus)
    ]
    marked = [info for info in ordered if info.marked] if len(sound) < len(ordered) else []
    return PrunePlan(
        keep=MappingProxyType(reasons),
        drop=tuple(drop),
        damaged=tuple(info for info in marked if info.damaged is not None),
        bad=tuple(info for info in marked if info.damaged is None),
        abandoned=tuple(others),
        without_room=tuple(
            i.name for i in drop if i in held or (i.step in wanted and i.name not in superseded)
        ),
        demote=tuple(
            (info, dtypes[info.name])
            for info in whole
            if info.name in dtypes and info.step in reasons and info.name not in superseded
        ),
        superseded=tuple(sorted(superseded)),
    )


def _with_room(
    order: Iterable[int],
    must: Collection[int],
    sizes: Mapping[int, int],
    others: Sequence[CheckpointInfo],
    *,
    left: int,
) -> tuple[dict[int, bool], list[CheckpointInfo]]:
    """Return the steps, and abandoned checkpoints, for which so many bytes are enough.

    A step that must stay is among them in any case; the value is whether there is room for it.

    The first step without room is the last that is tried: when a prune is cut short and repeated, nothing
    takes the place of what the whole one kept.
    """
    stay = [info for info in others if info.pinned is not None]
    left -= sum(info.size_bytes for info in stay)
    fits = dict[int, bool]()
    for step in dict.fromkeys([*must, *order]):
        left -= sizes[step]
        if left < 0 and step not in must:
            break
        fits[step] = left >= 0
    for info in others:
        if info.pinned is None:
            left -= info.size_bytes
            stay += [info] * (left >= 0)
    return fits, stay


def keeps_weights(policy: RetentionPolicy | None) -> bool:
    """Return whether a policy keeps weights alone of some checkpoints."""
    return policy is not None and _as_weights(policy) is not None


def _as_weights(policy: RetentionPolicy) -> KeepWeights | None:
    """Return the first rule for weights in a policy."""
    return next((leaf for leaf in leaves(policy) if isinstance(leaf, KeepWeights)), None)


def _of_states(policy: RetentionPolicy) -> RetentionPolicy | None:
    """Return what a policy keeps whole; None if it keeps only weights."""
    if _as_weights(policy) is None:
        return policy
    if not isinstance(policy, AnyOf | AllOf):
        return None
    parts = [part for each in policy.policies if (part := _of_states(each)) is not None]
    if not parts or (isinstance(policy, AllOf) and len(parts) < len(policy.policies)):
        return None
    return reduce(or_ if isinstance(policy, AnyOf) else and_, parts)


def _dtypes(
    rules: RetentionPolicy, light: Sequence[CheckpointInfo], present: Sequence[CheckpointInfo], now: float
) -> dict[str, str | None]:
    """Map those of `light` whose weights a rule keeps to the dtype of the first."""
    found: dict[str, str | None] = {}
    for member in joined(rules, AnyOf) if light else ():
        if (weights := _as_weights(member)) is not None:
            steps = member.keep(present, now)
            found = {info.name: weights.dtype for info in light if info.step in steps} | found
    return found


def _rules(policy: RetentionPolicy) -> RetentionPolicy:
    """Return what a policy keeps without its bounds."""
    if not isinstance(policy, AllOf):
        return policy
    rules = [_rules(each) for each in policy.policies if not isinstance(each, KeepWithin)]
    return reduce(and_, rules) if rules else policy


def _reasons(
    policy: RetentionPolicy | None, present: Sequence[CheckpointInfo], now: float, last: int | None
) -> dict[int, tuple[str, ...]]:
    """Map each step that stays to its reasons; no policy keeps nothing."""
    members = () if policy is None else joined(policy, AnyOf)
    kept = [(repr(member), member.keep(present, now)) for member in members]
    if policy is not None and not any(s for _, s in kept) and unknown_metrics(policy, present):
        kept = [(UNRANKED, frozenset(info.step for info in present))]
    reasons = dict[int, tuple[str, ...]]()
    for step, reason in _guaranteed(present, last):
        reasons[step] = (*reasons.get(step, ()), reason)
    for reason, steps in kept:
        # Thousands of steps share the tuple of their only reason.
        alone = (reason,)
        twice = {step: (*reasons[step], reason) for step in reasons.keys() & steps}
        reasons = {**reasons, **dict.fromkeys(steps, alone), **twice}
    return reasons


def _stay(
    policy: RetentionPolicy, gone: Sequence[CheckpointInfo], present: Sequence[CheckpointInfo], now: float
) -> frozenset[str]:
    match policy:
        case AnyOf():
            return frozenset[str]().union(*(_stay(each, gone, present, now) for each in policy.policies))
        case AllOf():
            names = frozenset(info.name for info in gone)
            return names.intersection(*(_stay(each, gone, present, now) for each in policy.policies))
        case KeepWeights():
            return _stay(policy.policy, gone, present, now)
        case _Milestones():
            count = policy.intervals(present)
            return _in_step_places(policy, gone, present, now, place=lambda info: count(info) or 0)
        case KeepSteps():
            return _in_step_places(policy, gone, present, now, place=_by_step)
        case _:
            return _as_the_past(policy, gone, present, now)


def _in_step_places(
    policy: RetentionPolicy,
    gone: Sequence[CheckpointInfo],
    present: Sequence[CheckpointInfo],
    now: float,
    *,
    place: Callable[[CheckpointInfo], int],
) -> frozenset[str]:
    """Apply a policy on steps to each lineage, but to places reached by later ones.

    `gone` begins with the newest lineage; `place` returns the place that a checkpoint takes.
    """
    taken, names = set(map(place, present)), set[str]()
    for _, group in groupby(gone, key=lambda info: info.lineage):
        lineage = list(group)
        kept = policy.keep(lineage, now)
        free = [info for info in lineage if info.step in kept and place(info) not in taken]
        names.update(info.name for info in free)
        taken.update(map(place, free))
    return frozenset(names)


def _as_the_past(
    policy: RetentionPolicy, gone: Sequence[CheckpointInfo], present: Sequence[CheckpointInfo], now: float
) -> frozenset[str]:
    """Apply the policy as if they were the oldest, and worst, of the present line.

    In this way they do not displace another checkpoint.
    """
    past = {-place: info for place, info in enumerate(gone, start=1)}
    posed = [replace(info, step=step, metrics=_worst(policy)) for step, info in past.items()]
    kept = policy.keep((*present, *posed), now)
    return frozenset(info.name for step, info in past.items() if step in kept)


def withheld(plan: PrunePlan, drop: Sequence[CheckpointInfo]) -> PrunePlan:
    """Restrict a plan to `drop`, if no checkpoint that stays is known to be whole."""
    if len(drop) == len(plan.drop):
        return plan
    names = {info.name for info in drop}
    kept = {info.step: (UNVERIFIED,) for info in plan.drop if info.name not in names and not info.abandoned}
    others = tuple(info for info in plan.drop if info.name not in names and info.abandoned)
    keep = dict(sorted((kept | dict(plan.keep)).items()))
    return replace(plan, keep=MappingProxyType(keep), drop=tuple(drop), abandoned=(*plan.abandoned, *others))


def unknown_counts(policy: RetentionPolicy, history: Sequence[CheckpointInfo]) -> tuple[str, ...]:
    """List the counts that the policy needs and that no checkpoint knows; sorted."""
    return tuple(
        name for name in sorted(policy.counts) if all(getattr(info, name) is None for info in history)
    )


def unknown_metrics(policy: RetentionPolicy, history: Sequence[CheckpointInfo]) -> tuple[str, ...]:
    """List metrics that the policy ranks by and that no checkpoint has; sorted."""
    return tuple(
        metric
        for metric in sorted(_worst(policy))
        if not any(math.isfinite(info.metrics.get(metric, math.nan)) for info in history)
    )


def best_by(policy: RetentionPolicy | None) -> KeepBest | None:
    """Return how a policy ranks, the first of several; None if by no metric.

    Of a policy of a host, too, that has a `metric` and a `mode`.
    """
    for each in leaves(policy):
        metric = getattr(each, "metric", None)
        if isinstance(metric, str):
            return KeepBest(metric, mode=getattr(each, "mode", "min"))
    return None


def _worst(policy: RetentionPolicy) -> dict[str, float]:
    """Map the metrics that the policy ranks by to their worst values."""
    match policy:
        case KeepWeights():
            return _worst(policy.policy)
        case KeepBest():
            return {policy.metric: sys.float_info.max if policy.mode == "min" else -sys.float_info.max}
        case AnyOf() | AllOf():
            return {metric: worst for part in policy.policies for metric, worst in _worst(part).items()}
        case _:
            return {}


def _guaranteed(history: Sequence[CheckpointInfo], last: int | None) -> Iterable[tuple[int, str]]:
    if not history:
        return
    states = [info for info in history if info.weights_of is None] or history
    newest, youngest = max(states, key=_by_step).step, max(states, key=_by_age).step
    yield newest, "newest"
    if last is not None and last != newest and any(info.step == last for info in states):
        yield last, "committed last"
    if youngest not in {newest, last}:
        yield youngest, "committed last"
    for info in history:
        if info.pinned is not None:
            yield info.step, f"pinned: {info.pinned}"


_DAY: Final = 86_400
_MONDAY: Final = 3 * _DAY
"""What the beginning of Unix time is after a Monday."""
_NOTHING: Final = CheckpointInfo(step=0, name="", created=0)
_by_step: Callable[[Any], int] = attrgetter("step")
_by_age = attrgetter("created", "step")
