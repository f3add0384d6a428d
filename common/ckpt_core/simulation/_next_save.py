"""The next step at which a policy saves, found without asking at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

ContextAt: TypeAlias = Callable[[int, int | None], CadenceContext]
"""The context of a decision: step, the step decided on before it -> context."""

_BOUNDARIES = (EverySteps, AtSteps, EveryFraction, EveryEpochs, EveryTokens, FirstStep)
_LASTING = (EverySeconds, Optimal, MaxOverhead, Continuous, OnPreemption)
"""Policies that, once they want a save, want it until one is made or the facts change."""


def leaves(policy: SavePolicy) -> Iterator[SavePolicy]:
    """Yield the policies that a policy is composed of."""
    if isinstance(policy, AnyOf | AllOf):
        for part in policy.policies:
            yield from leaves(part)
    elif isinstance(policy, Not):
        yield from leaves(policy.policy)
    else:
        yield policy


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
        self._leaves = tuple(leaves(policy))
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
        step = first
        while (step := self._next_change(at, step, last)) <= last:
            if decide(self._policy, at(step, step - 1)):
                return step
        return None

    def _next_change(self, at: ContextAt, step: int, last: int) -> int:
        """Return the first step after `step` at which some part may decide differently."""
        following = last + 1
        for leaf in self._leaves:
            if not isinstance(leaf, _BOUNDARIES + _LASTING):
                return step + 1  # of a class unknown here
            if leaf.decide(at(step, step - 1)) is None:
                found = _bisect(leaf, at, (step, last), None)
                following = following if found is None else min(following, found)
            elif isinstance(leaf, _BOUNDARIES):
                return step + 1
        return following


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


__all__ = ["ContextAt", "NextSave", "leaves", "repeats"]
