"""The two kinds of policy, when to save and what to keep, and their algebra."""

from ckpt_core.policies._algebra import (
    AllOf,
    AnyOf,
    Not,
    RetentionPolicy,
    SavePolicy,
    is_of_kind,
    joined,
    leaves,
)
from ckpt_core.policies._cadence_context import (
    PREEMPTION,
    CadenceContext,
    ChosenInterval,
    Counts,
    FailureRate,
    SaveCosts,
)

__all__ = [
    "PREEMPTION",
    "AllOf",
    "AnyOf",
    "CadenceContext",
    "ChosenInterval",
    "Counts",
    "FailureRate",
    "Not",
    "RetentionPolicy",
    "SaveCosts",
    "SavePolicy",
    "is_of_kind",
    "joined",
    "leaves",
]
