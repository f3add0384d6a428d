"""Save policies: values without a clock, a rank, torch or I/O.

Time, history, signals and what saves cost are in a `CadenceContext`, so that one rank can decide for all, and
so that every decision can be replayed in a test. Policies combine with `|`, `&` and `~`.
"""

from __future__ import annotations

from ckpt_core.cadence._adaptive import Continuous, MaxOverhead, Optimal, expected_overhead, optimal_interval
from ckpt_core.cadence._fixed import (
    AtSteps,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    OnPreemption,
    decide,
    needed_counts,
    preemptions,
)

__all__ = [
    "AtSteps",
    "Continuous",
    "EveryEpochs",
    "EveryFraction",
    "EverySeconds",
    "EverySteps",
    "EveryTokens",
    "MaxOverhead",
    "OnPreemption",
    "Optimal",
    "decide",
    "expected_overhead",
    "needed_counts",
    "optimal_interval",
    "preemptions",
]
