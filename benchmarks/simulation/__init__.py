"""What a cadence costs: a job run through failures, with the real save policies."""

from __future__ import annotations

from benchmarks.simulation._failure_traces import (
    LLAMA_3_DEVICE_SECONDS,
    ExponentialFailures,
    FailureTrace,
    RecordedFailures,
    WeibullFailures,
    failures_from_csv,
)
from benchmarks.simulation._simulated_job import LearnedRate, RunParts, SimulatedJob
from benchmarks.simulation._study import PARTS, Scenario, Study, simulate

__all__ = [
    "LLAMA_3_DEVICE_SECONDS",
    "PARTS",
    "ExponentialFailures",
    "FailureTrace",
    "LearnedRate",
    "RecordedFailures",
    "RunParts",
    "Scenario",
    "SimulatedJob",
    "Study",
    "WeibullFailures",
    "failures_from_csv",
    "simulate",
]
