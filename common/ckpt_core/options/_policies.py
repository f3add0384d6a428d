"""Policies written as plain values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Literal, TypeVar, cast, overload

from ckpt_core import cadence, retention
from ckpt_core.errors import ConfigError
from ckpt_core.options._parsing import Problems, undotted
from ckpt_core.policies import RetentionPolicy, SavePolicy, is_of_kind
from ckpt_core.validation import boolean, one_of, require

Policy = TypeVar("Policy", SavePolicy, RetentionPolicy)


@overload
def policy_from(value: Any, kind: Literal["save"]) -> SavePolicy: ...
@overload
def policy_from(value: Any, kind: Literal["keep"]) -> RetentionPolicy: ...
@overload
def policy_from(value: Any, kind: str) -> SavePolicy | RetentionPolicy: ...
def policy_from(value: Any, kind: str) -> SavePolicy | RetentionPolicy:
    """Build a policy from a policy, a mapping, or a list of them, joined by "or".

    Args:
        value: e.g. `{"every_steps": 500, "on_preemption": True}` or `[KeepLatest(3), {"every": 10_000}]`; a
            number alone is the number of steps between saves, or of checkpoints to keep.
        kind: `save` for when to save, `keep` for what to keep.

    Raises:
        ConfigError: invalid policies; the message lists all of them.
    """
    require("policy_from", one_of("kind", kind, ("save", "keep")))
    return _any_of(value, _SAVE, kind) if kind == "save" else _any_of(value, _KEEP, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grammar(Generic[Policy]):
    """The vocabulary of one kind of policy; builders return None for a switch off."""

    base: type[SavePolicy] | type[RetentionPolicy]
    joined: Callable[[list[Any]], Any]
    number: Callable[[int], Policy]
    builders: Mapping[str, Callable[[Any], Policy | None]]


def _members(value: Any, grammar: _Grammar[Policy], where: str) -> list[Policy]:
    if is_of_kind(value, grammar.base):
        return [cast("Policy", value)]
    if type(value) is int:
        try:
            return [grammar.number(value)]
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    problems = Problems()
    if isinstance(value, Mapping):
        members = _entries(undotted(value), grammar, where, problems)
    elif isinstance(value, list | tuple):
        members = [
            problems.collect(_any_of, part, grammar, f"{where}[{index}]") for index, part in enumerate(value)
        ]
    else:
        raise ConfigError(f"{where}: expected a policy, a mapping or a list of them, not {value!r}")
    problems.raise_if_any()
    found = [member for member in members if member is not None]
    if not found:
        raise ConfigError(f"{where}: names no policy; leave it out for no policy")
    return found


def _entries(
    mapping: Mapping[Any, Any], grammar: _Grammar[Policy], where: str, problems: Problems
) -> list[Policy | None]:
    builders: Mapping[str, Callable[..., Policy | None]] = grammar.builders
    combinators: Mapping[str, Callable[..., Policy]] = {"any": _any_of, "all_of": _all_of, "not": _none_of}
    problems.unknown(where, mapping, (*builders, *combinators))
    members: list[Policy | None] = []
    for key, value in mapping.items():
        inside = f"{where}.{key}"
        if key in builders:
            members.append(problems.collect(builders[key], value, prefix=f"{inside}: "))
        elif key in combinators:
            members.append(problems.collect(combinators[key], value, grammar, inside))
    return members


def _any_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    found: Policy = grammar.joined(_members(value, grammar, where))
    return found


def _all_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    return reduce(operator.and_, _members(value, grammar, where))


def _none_of(value: Any, grammar: _Grammar[Policy], where: str) -> Policy:
    policy: Policy = _any_of(value, grammar, where)
    try:
        return ~policy
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with(
    make: Callable[..., Policy], *arguments: str, required: bool = True, switch: bool = False
) -> Callable[[Any], Any]:
    def build(value: Any) -> Policy | None:
        if switch and isinstance(value, bool):
            return make() if value else None
        if not isinstance(value, Mapping):
            if not required and not switch:
                raise ConfigError(f"must be a mapping of {', '.join(arguments)}, not {value!r:.80}")
            return make(value)
        problems = Problems()
        problems.unknown("arguments", value, arguments)
        if required and arguments[0] not in value:
            problems.add(f"{arguments[0]!r} is missing")
        problems.raise_if_any(separator="; ")
        return make(**value)

    return build


def _all(value: Any) -> RetentionPolicy | None:
    require("switch", boolean("value", value))
    return retention.KeepAll() if value else None


def _on_preemption(value: Any) -> SavePolicy | None:
    given = value if isinstance(value, bool | Mapping) else {"signals": value}
    if isinstance(given, Mapping) and isinstance(given.get("signals"), list):
        given = {**given, "signals": tuple(given["signals"])}
    names = ("signals", "file", "when", "stop", "deadline")
    build = _with(cadence.OnPreemption, *names, required=False, switch=True)
    return cast("SavePolicy | None", build(given))


def _best(value: Any) -> RetentionPolicy:
    build: Callable[[Any], RetentionPolicy] = _with(retention.KeepBest, "metric", "n", "mode")
    return reduce(operator.or_, map(build, value)) if isinstance(value, list) and value else build(value)


def _weights(value: Any) -> RetentionPolicy:
    rules = (
        {key: each for key, each in value.items() if key != "dtype"} if isinstance(value, Mapping) else value
    )
    dtype = value.get("dtype") if isinstance(value, Mapping) else None
    return retention.KeepWeights(_any_of(rules, _KEEP, "weights"), dtype=dtype)


_SAVE: _Grammar[SavePolicy] = _Grammar(
    base=SavePolicy,
    joined=lambda policies: reduce(operator.or_, policies),
    number=cadence.EverySteps,
    builders={
        "every_steps": _with(cadence.EverySteps, "n", "offset"),
        "at_steps": _with(cadence.AtSteps, "steps"),
        "every_seconds": _with(cadence.EverySeconds, "seconds"),
        "every_fraction": _with(cadence.EveryFraction, "fraction", "total_steps"),
        "every_epochs": _with(cadence.EveryEpochs, "n"),
        "every_tokens": _with(cadence.EveryTokens, "n"),
        "optimal": _with(
            cadence.Optimal,
            *("mtbf", "min_seconds", "max_seconds", "tier"),
            required=False,
            switch=True,
        ),
        "max_overhead": _with(cadence.MaxOverhead, "fraction"),
        "continuous": _with(cadence.Continuous, "min_seconds", required=False, switch=True),
        "on_preemption": _on_preemption,
    },
)
_KEEP: _Grammar[RetentionPolicy] = _Grammar(
    base=RetentionPolicy,
    joined=retention.any_of,
    number=retention.KeepLatest,
    builders={
        "latest": _with(retention.KeepLatest, "n"),
        "every": _with(retention.KeepEvery, "steps"),
        "every_fraction": _with(retention.KeepEveryFraction, "fraction", "total_steps"),
        "every_epochs": _with(retention.KeepEveryEpochs, "n"),
        "every_seconds": _with(retention.KeepEverySeconds, "seconds"),
        "best": _best,
        "for": _with(retention.KeepFor, "seconds"),
        "thinned": _with(retention.KeepThinned, "hourly", "daily", "weekly", required=False),
        "within": _with(retention.KeepWithin, "size"),
        "steps": _with(retention.KeepSteps, "steps"),
        "weights": _weights,
        "all": _all,
    },
)
