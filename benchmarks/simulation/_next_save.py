"""The next step at which a policy saves, found without asking at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from ckpt_core.cadence import (
    AllOf,
    AnyOf,
    AtSteps,
    CadenceContext,
    Continuous,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    FirstStep,
    MaxOverhead,
    Not,
    OnPreemption,
    Optimal,
    SavePolicy,
    decide,
)
from ckpt_core.policies import leaves

ContextAt: TypeAlias = Callable[[int, int | None], CadenceContext]
"""The context of a decision: step, the step decided on before it -> context."""

_BOUNDARIES = (EverySteps, AtSteps, EveryFraction, EveryEpochs, EveryTokens, FirstStep)
_LASTING = (EverySeconds, Optimal, MaxOverhead, Continuous, OnPreemption)
"""Policies that, once they want a save, want it until one is made or the facts change."""


def repeats(policy: SavePolicy) -> bool:
    """Return whether equal facts lead to the same number of steps between saves."""
    found = [leaf for leaf in leaves(policy) if not isinstance(leaf, OnPreemption)]
    if len(found) == 1 and isinstance(found[0], EverySteps):
        return _any_of_known(policy)
    return all(isinstance(leaf, EverySeconds | Optimal | Continuous) for leaf in found)


@final
class NextSave:
    """A search for the next step at which a policy saves.

    It asks the policy as a manager does, but only about steps that matter.
    """

    def __init__(self, policy: SavePolicy) -> None:
        self._policy = policy
        self._is_known = all(isinstance(leaf, _BOUNDARIES + _LASTING) for leaf in leaves(policy))
        self._can_jump = _any_of_known(policy)

    def first(
        self, at: ContextAt, first: int, last: int, *, previous: int | None, expected: int | None
    ) -> int | None:
        """Return the first step in a range that is saved; None if there is none.

        Args:
            at: the context at a step; over the range only time and step change.
            first: of the range.
            last: of the range.
            previous: `first - 1`, or None if nothing was decided yet.
            expected: a guess, where the search begins.
        """
        if first > last:
            return None
        if previous is None or not self._can_jump:
            if decide(self._policy, at(first, previous)):
                return first
            previous = first
        if self._can_jump:
            return _bisect(self._policy, at, (previous, last), expected)
        if self._is_known:
            return _first_of(self._policy, at, (previous + 1, last), expected)
        for step in range(previous + 1, last + 1):
            if decide(self._policy, at(step, step - 1)):
                return step
        return None


def _first_of(
    policy: SavePolicy,
    at: ContextAt,
    between: tuple[int, int],
    expected: int | None,
    *,
    wanted: bool = True,
) -> int | None:
    """Return the first step of a range at which a policy wants a save, or does not.

    Args:
        policy: of parts known here.
        at: the context at a step.
        between: the first and the last step.
        expected: a guess for parts that last.
        wanted: whether a step is looked for at which it wants a save.
    """
    first, last = between
    if isinstance(policy, Not):
        return _first_of(policy.policy, at, between, expected, wanted=not wanted)
    if isinstance(policy, AnyOf | AllOf):
        if isinstance(policy, AnyOf) is wanted:
            found = [_first_of(part, at, between, expected, wanted=wanted) for part in policy.policies]
            return min((step for step in found if step is not None), default=None)
        return _first_of_all(policy.policies, at, between, expected, wanted=wanted)
    if wanted:
        guess = expected if isinstance(policy, _LASTING) else None
        return _bisect(policy, at, (first - 1, last), guess)
    # What lasts stays wanted; a boundary is wanted at one step.
    end = min(first, last) if isinstance(policy, _LASTING) else last
    return next((step for step in range(first, end + 1) if not policy.decide(at(step, step - 1))), None)


def _first_of_all(
    parts: Sequence[SavePolicy],
    at: ContextAt,
    between: tuple[int, int],
    expected: int | None,
    *,
    wanted: bool,
) -> int | None:
    """Return the first step at which all parts agree: each goes on from the latest."""
    step, last = between
    agreed, place = 0, 0
    while agreed < len(parts):
        found = _first_of(parts[place], at, (step, last), expected, wanted=wanted)
        if found is None:
            return None
        agreed = agreed + 1 if found == step else 1
        step, place = found, (place + 1) % len(parts)
    return step


def _any_of_known(policy: SavePolicy) -> bool:
    """Return whether the first decision after a jump finds what was jumped over."""
    if isinstance(policy, AnyOf):
        return all(map(_any_of_known, policy.policies))
    return isinstance(policy, _BOUNDARIES + _LASTING)


def _bisect(policy: SavePolicy, at: ContextAt, between: tuple[int, int], expected: int | None) -> int | None:
    """Return the first step between two that a jump from the lower finds due."""
    before, last = between
    low, high, stride = before, last + 1, 1
    probe = before + 1 if expected is None else expected
    while low + 1 < high:
        probe = min(max(probe, low + 1), high - 1)
        if decide(policy, at(probe, before)):
            high = probe
            probe = high - 1 if stride == 1 else (low + high) // 2
        else:
            low = probe
            probe = low + stride if high > last else (low + high) // 2
        stride *= 2
    return None if high > last else high


__all__ = ["ContextAt", "NextSave", "repeats"]
