"""The contract of save policies, and their combination with `|`, `&` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ckpt_core.cadence._cadence_context import CadenceContext, ChosenInterval
from ckpt_core.validation import instances, require

if TYPE_CHECKING:
    from ckpt_core.cadence._fixed import OnPreemption


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
    def preemptions(self) -> tuple[OnPreemption, ...]:
        """The sources of preemptions of this policy; () if there are none."""
        return ()

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

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return AnyOf((*_flat(self, AnyOf), *_flat(other, AnyOf)))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return AllOf((*_flat(self, AllOf), *_flat(other, AllOf)))

    def __invert__(self) -> SavePolicy:
        return Not(self)


def _intervals(policies: tuple[SavePolicy, ...], context: CadenceContext) -> list[ChosenInterval]:
    return [found for policy in policies if (found := policy.interval(context)) is not None]


def decide(policy: SavePolicy, context: CadenceContext) -> str | None:
    """Return the reason to save now, or None; never for a step saved already.

    Raises:
        ConfigError: the policy needs a value that neither it nor the context has.
    """
    return None if context.step == context.last_save_step else policy.decide(context)


def needed_counts(policy: SavePolicy | None) -> frozenset[str]:
    """Return the names of the counts that a policy needs; none without a policy."""
    return frozenset() if policy is None else policy.counts


@dataclass(frozen=True, slots=True)
class _Several(SavePolicy):
    """Policies as one, which needs what any of them needs."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        require(type(self).__name__, instances("policies", self.policies, SavePolicy))

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
    def needs_upload(self) -> bool:
        return any(policy.needs_upload for policy in self.policies)

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return tuple(each for policy in self.policies for each in policy.preemptions)

    @property
    def counts(self) -> frozenset[str]:
        return frozenset[str]().union(*(policy.counts for policy in self.policies))


@final
@dataclass(frozen=True, slots=True)
class AnyOf(_Several):
    """Saves when at least one policy does; written `a | b`."""

    def decide(self, context: CadenceContext) -> str | None:
        reasons = [reason for policy in self.policies if (reason := policy.decide(context))]
        return ", ".join(reasons) or None

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        return min(_intervals(self.policies, context), default=None)


@final
@dataclass(frozen=True, slots=True)
class AllOf(_Several):
    """Saves when all policies do, at the same decision; written `a & b`."""

    def decide(self, context: CadenceContext) -> str | None:
        reasons = [policy.decide(context) for policy in self.policies]
        return " and ".join(reason for reason in reasons if reason) if all(reasons) else None

    def interval(self, context: CadenceContext) -> ChosenInterval | None:
        return max(_intervals(self.policies, context), default=None)


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
    def needs_upload(self) -> bool:
        return self.policy.needs_upload

    @property
    def preemptions(self) -> tuple[OnPreemption, ...]:
        return self.policy.preemptions

    @property
    def counts(self) -> frozenset[str]:
        return self.policy.counts


def _flat(policy: SavePolicy, kind: type[AnyOf] | type[AllOf]) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, kind) else (policy,)
