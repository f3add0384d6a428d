"""One run of a job through its failures, from event to event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, final

import numpy as np

from benchmarks.simulation._simulated_job import LearnedRate, RunParts, SimulatedJob
from benchmarks.simulation._stretch import RunSoFar, Stretch
from benchmarks.simulation._tiers_of_run import TiersOfRun
from ckpt_core.cadence import SavePolicy
from ckpt_core.errors import ConfigError

_MOST_TIMES: Final = 100
"""A run of a goodput below one percent is of no use to anybody."""


def replay(
    policy: SavePolicy,
    job: SimulatedJob,
    *,
    gaps: Iterator[float],
    draws: np.random.Generator,
    learned: LearnedRate | None = None,
    commits: list[tuple[float, int]] | None = None,
) -> RunParts:
    """Run a training through failures to its end; return where the time went.

    Args:
        policy: when to save; its real `decide` is asked.
        job: to run.
        gaps: seconds between failures, without end.
        draws: random numbers, for which failures lose a node.
        learned: the rate of failures that the policy is given.
        commits: collects (time, step) of every commit, if given.
    """
    upload_seconds = None if job.uploaded is None else job.uploaded - job.durable
    tiers = TiersOfRun(upload_seconds, commits)
    # A stream of its own, so that failures stay the same whatever saves cost.
    (costs,) = draws.spawn(1)
    sigma = math.log(job.spread)
    run = RunSoFar(
        policy,
        job,
        tiers,
        learned=learned,
        every_save=commits is not None,
        factor=lambda: math.exp(sigma * costs.standard_normal()) if sigma else 1.0,
    )
    failing = _Failing(run, gaps, draws)
    began, step = 0.0, 0
    while True:
        stretch = Stretch(run, began, failing.at, step)
        reached = stretch.run()
        run.trained += reached - began
        if reached < failing.at:
            run.parts.useful = job.steps * job.step
            return run.parts
        began, step = failing.come_back(stretch.done_at(reached))
        _refuse_to_go_on(run, began, step)
        tiers.resume(began)


def _refuse_to_go_on(run: RunSoFar, now: float, step: int) -> None:
    """End a run that would take for ever, as its saves are too rare for its failures.

    Raises:
        ConfigError: it has taken a hundred times as long as its training.
    """
    if now > _MOST_TIMES * run.job.work:
        raise ConfigError(
            f"the job does not come to its end: after {run.parts.failures:,} failures, in {_MOST_TIMES} "
            f"times the length of its training, it is at step {step:,} of {run.job.steps:,}; save more often"
        )


@final
class _Failing:
    """The failures of a run, and how it comes back."""

    def __init__(self, run: RunSoFar, gaps: Iterator[float], draws: np.random.Generator) -> None:
        self._run, self._gaps, self._draws = run, gaps, draws
        self.at = next(gaps)

    def come_back(self, done: float) -> tuple[float, int]:
        """Restart until no failure strikes meanwhile; return the time and the step."""
        job, parts, node_was_lost = self._run.job, self._run.parts, False
        while True:
            now, node_lost = self.at, self._draws.random() < job.node_loss
            node_was_lost = node_was_lost or node_lost
            step = self._run.tiers.fail(now, node_lost=node_lost)
            parts.failures += 1
            parts.lost += done - step * job.step
            done = step * job.step
            self.at = now + next(self._gaps)
            far = node_was_lost and job.restore_upload is not None
            restore = (job.restore_upload or 0.0) if far else job.restore
            down = min(job.down, self.at - now)
            parts.down += down
            parts.restore += min(restore, self.at - now - down)
            if now + job.down + restore <= self.at:
                return now + job.down + restore, step
