"""The two kinds of policy, when to save and what to keep, and their algebra."""

from ckpt_core.policies._algebra import (
    PREEMPTION,
    AllOf,
    AnyOf,
    CadenceContext,
    ChosenInterval,
    Counts,
    FailureRate,
    Not,
    RetentionPolicy,
    SaveCosts,
    SavePolicy,
    is_of_kind,
    joined,
    leaves,
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
