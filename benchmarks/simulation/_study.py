"""Many runs of one job, summed up with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final, final

import numpy as np

from benchmarks.simulation._failure_traces import FailureTrace
from benchmarks.simulation._replay import replay
from benchmarks.simulation._simulated_job import LearnedRate, RunParts, SimulatedJob
from ckpt_core.cadence import SavePolicy
from ckpt_core.retention import RetentionPolicy, plan_prune
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import integer, require

_NORMAL_95: Final = 1.959964


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A job and its failures.

    Attributes:
        job: to run.
        trace: when it fails.
        learned: the rate of failures that a policy without one of its own is given.
    """

    job: SimulatedJob
    trace: FailureTrace
    learned: LearnedRate | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The results of many runs.

    Attributes:
        runs: the parts of each.
        most_kept: the most checkpoints that retention left in the root at once, in the first run; None
            without a retention policy.
    """

    runs: Sequence[RunParts]
    most_kept: int | None = None

    @property
    def goodput(self) -> float:
        """Training that counted, as a share of all time of all runs."""
        return sum(run.useful for run in self.runs) / sum(run.wall for run in self.runs)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the goodput; (0, 1) of a single run."""
        count = len(self.runs)
        if count < 2:
            return 0.0, 1.0
        goodput = self.goodput
        residuals = [run.useful - goodput * run.wall for run in self.runs]
        mean_wall = sum(run.wall for run in self.runs) / count
        error = math.sqrt(sum(each * each for each in residuals) / (count * (count - 1))) / mean_wall
        return max(0.0, goodput - _NORMAL_95 * error), min(1.0, goodput + _NORMAL_95 * error)

    def share(self, part: str) -> float:
        """Return a part of `RunParts` as a share of all time."""
        return float(sum(getattr(run, part) for run in self.runs) / sum(run.wall for run in self.runs))

    def mean(self, part: str) -> float:
        """Return the mean of a part of `RunParts` over the runs."""
        return float(sum(getattr(run, part) for run in self.runs) / len(self.runs))


PARTS: Final = tuple(field.name for field in fields(RunParts) if field.type == "float")
"""The parts of `RunParts` that are seconds."""


def simulate(
    policy: SavePolicy,
    scenario: Scenario,
    *,
    runs: int = 100,
    seed: int = 0,
    keep: RetentionPolicy | None = None,
    done: Callable[[], None] = lambda: None,
) -> Study:
    """Run a job many times; the same seed gives every policy the same failures.

    Args:
        policy: when to save.
        scenario: the job and its failures.
        runs: how many.
        seed: of the random numbers.
        keep: what a prune keeps, applied after each commit of the first run.
        done: called after each run.

    Raises:
        ConfigError: no runs, or the policy needs what the job does not have.
    """
    require("simulate", integer("runs", runs, minimum=1), integer("seed", seed, minimum=0))
    commits: list[tuple[float, int]] = []
    found: list[RunParts] = []
    for number, sequence in enumerate(np.random.SeedSequence(seed).spawn(runs)):
        failures, losses = map(np.random.default_rng, sequence.spawn(2))
        kept = commits if keep is not None and number == 0 else None
        gaps = scenario.trace.gaps(failures, number)
        run = replay(policy, scenario.job, gaps=gaps, draws=losses, learned=scenario.learned, commits=kept)
        found.append(run)
        done()
    return Study(runs=found, most_kept=None if keep is None else _most_kept(keep, commits))


def _most_kept(keep: RetentionPolicy, commits: Sequence[tuple[float, int]]) -> int:
    history: dict[str, CheckpointInfo] = {}
    most = 0
    for created, step in commits:
        name = f"step-{step}"  # a step saved again takes the place of the first
        history[name] = CheckpointInfo(step=step, name=name, created=created)
        plan = plan_prune(keep, list(history.values()), created)
        for info in plan.drop:
            history.pop(info.name, None)
        most = max(most, len(history))
    return most
