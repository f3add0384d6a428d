"""Goodput of cadences that decide themselves, against the best fixed interval found by search.

A simulation: a training goes through random failures, and the real policies decide when it saves.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ckpt_core.cadence import EverySeconds, Optimal, decide, optimal_interval
from ckpt_core.journal import failure_rate
from ckpt_core.policies import CadenceContext, FailureRate, SaveCosts, SavePolicy

HOUR, DAY = 3600.0, 86400.0
GIVEN_BAR, LEARNED_BAR = 0.99, 0.98
LLAMA_3_DEVICE_SECONDS: Final = 54 * DAY * 16384 / 419
"""GPU-seconds per interruption of the training of Llama 3 405B: 419 in 54 days on 16,384 GPUs."""

_COARSE = tuple(2 ** (power / 2) for power in range(-4, 5))
_FINE = tuple(2 ** (power / 8) for power in (-3, -2, -1, 1, 2, 3))
_STEPS_TO_MEASURE: Final = 8
"""Steps after a save is durable until a manager knows what it cost."""
_NORMAL_95: Final = 1.959964

LearnedRate: TypeAlias = Callable[[int, float], FailureRate]
"""What a run believes when it begins: failures so far, seconds of training so far -> rate."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, its saves and its failures, in seconds.

    Attributes:
        work: training time without a save or a failure.
        step: of that, one step.
        stall: a save blocks training for so long.
        slowdown: further training time lost while one save is in flight.
        durable: from the decision to save until the root has the checkpoint.
        down: from a failure until the job runs again, the checkpoint loaded.
    """

    work: float = 5 * DAY
    step: float = 5.0
    stall: float = 1.0
    slowdown: float = 2.0
    durable: float = 60.0
    down: float = 240.0

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return max(1, math.ceil(self.work / self.step - 1e-9))

    @property
    def cost(self) -> float:
        """Training time that one save costs."""
        return self.stall + self.slowdown


JOB = Job()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """When a job fails.

    Attributes:
        mtbf: the mean seconds between failures.
        shape: of Weibull's distribution: below 1 failures cluster, at 1 they know no past.
    """

    mtbf: float
    shape: float = 1.0

    def gaps(self, draws: np.random.Generator) -> Iterator[float]:
        """Yield the seconds to the first failure and between failures, without end."""
        scale = self.mtbf / math.gamma(1 + 1 / self.shape)
        while True:
            yield from (scale * draws.weibull(self.shape, 64)).tolist()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace, and the devices by which the prior is scaled when its rate is learned."""

    name: str
    trace: Trace
    devices: int


CASES = (
    Case(name="exponential", trace=Trace(mtbf=6 * HOUR), devices=8450),
    Case(name="exponential, 3 times the prior's rate", trace=Trace(mtbf=6 * HOUR), devices=2817),
    Case(name="exponential, 1/3 of the prior's rate", trace=Trace(mtbf=6 * HOUR), devices=25350),
    Case(name="Weibull 0.7", trace=Trace(mtbf=6 * HOUR, shape=0.7), devices=8450),
    Case(name="Weibull 0.7, 3 times the prior's rate", trace=Trace(mtbf=6 * HOUR, shape=0.7), devices=2817),
    Case(name="8 devices that fail 1,056 times as often", trace=Trace(mtbf=6 * HOUR), devices=8),
    Case(name="Llama 3", trace=Trace(mtbf=LLAMA_3_DEVICE_SECONDS / 16384), devices=16384),
)


class _Anchor(NamedTuple):
    """The last save of a life, or its beginning: when each step after it ends is known.

    `work` seconds of training are done in the `flight` seconds after the stall.
    """

    time: float
    step: int
    stall: float = 0.0
    flight: float = 0.0
    work: float = 0.0

    def ends(self, step: int, job: Job) -> float:
        """Return when a step ends."""
        work = (step - self.step) * job.step
        if work >= self.work:
            return self.time + self.stall + self.flight + work - self.work
        return self.time + self.stall + work * self.flight / self.work

    def trained(self, now: float) -> float:
        """Return the seconds of training by then: the inverse of `ends`."""
        since = max(0.0, now - self.time - self.stall)
        return since - self.flight + self.work if since >= self.flight else since * self.work / self.flight


class Life:
    """One start of a job, until it fails or the training ends.

    Args:
        policy: when to save; its `decide` is asked about the steps that a search needs, so that only policies
            are right here whose wish lasts until a save is made.
        job: to run.
        began: Unix seconds.
        step: resumed; 0 for a new training.
        costs: that the checkpoint carries.
        rate: of failures, that the policy is given.

    Attributes:
        saved: the steps saved so far.
    """

    def __init__(
        self,
        policy: SavePolicy,
        job: Job,
        began: float,
        step: int,
        *,
        costs: SaveCosts | None = None,
        rate: FailureRate | None = None,
    ) -> None:
        self._policy, self._job, self._began, self._resumed, self._rate = policy, job, began, step, rate
        self._anchor, self._gap = _Anchor(began, step), 1
        self.costs, self.saved, self._durable = costs, list[int](), list[tuple[float, int]]()

    def run(self, fails_at: float) -> tuple[float, int]:
        """Train; return when the training ended or failed, and the last step that is durable then."""
        while (due := self._next(fails_at)) is not None:
            self._save(due)
        reached = min(self._anchor.ends(self._job.steps, self._job), fails_at)
        return reached, max((step for at, step in self._durable if at <= reached), default=self._resumed)

    def _next(self, fails_at: float) -> int | None:
        job, anchor = self._job, self._anchor
        reached = math.floor(anchor.trained(fails_at) / job.step + 1e-9)
        last, known = min(job.steps - 1, anchor.step + reached), anchor.step + 1
        if self.saved:
            known = anchor.step + max(1, math.ceil(anchor.work / job.step - 1e-9)) + _STEPS_TO_MEASURE
            if (found := self._first(anchor.step + 1, min(known - 1, last))) is not None:
                return found
            self._measure()
        return self._first(known, last)

    def _first(self, first: int, last: int) -> int | None:
        """Return the first step of a range that the policy saves: outward from the last gap, then halving."""
        if first == 1 <= last:  # nothing has been decided before
            if decide(self._policy, self._context(1, None)):
                return 1
            first = 2
        low, high, stride = first - 1, last + 1, 1
        probe = self._anchor.step + self._gap
        while low + 1 < high:
            probe = min(max(probe, low + 1), high - 1)
            if decide(self._policy, self._context(probe, first - 1)):
                high = probe
                probe = high - 1 if stride == 1 else (low + high) // 2
            else:
                low = probe
                probe = low + stride if high > last else (low + high) // 2
            stride *= 2
        return None if high > last else high

    def _context(self, step: int, previous: int | None) -> CadenceContext:
        job, anchor, fresh = self._job, self._anchor, not self._resumed and not self.saved
        saved_at = None if fresh else anchor.time if self.saved else self._began + job.step
        return CadenceContext(
            step=step,
            now=anchor.ends(step, job),
            started=self._began,
            previous_step=previous,
            last_save_step=None if fresh else anchor.step,
            last_save_time=saved_at,
            total_steps=job.steps,
            costs=self.costs,
            failures=self._rate,
            in_flight=bool(self.saved) and (step - anchor.step) * job.step < anchor.work,
        )

    def _save(self, step: int) -> None:
        job, before, now = self._job, self._anchor, self._anchor.ends(step, self._job)
        self._measure()
        wait = max(0.0, before.time + before.stall + before.flight - now) if self.saved else 0.0
        flight = job.durable - job.stall
        self._gap = step - before.step
        self._anchor = _Anchor(now, step, job.stall + wait, flight, flight - job.slowdown)
        self.saved.append(step)
        self._durable.append((now + wait + job.durable, step))

    def _measure(self) -> None:
        if count := len(self.saved):
            job = self._job
            self.costs = SaveCosts(
                job.stall, job.slowdown, job.durable, None, count, count * job.cost, job.step
            )


def wall_seconds(
    policy: SavePolicy, job: Job, gaps: Iterator[float], learned: LearnedRate | None = None
) -> float:
    """Run a training through its failures to its end; return how long it takes."""
    began, step, failures, trained = 0.0, 0, 0, 0.0
    fails_at, costs = next(gaps), None
    while True:
        rate = learned(failures, trained) if learned else None
        life = Life(policy, job, began, step, costs=costs, rate=rate)
        reached, step = life.run(fails_at)
        costs, trained = life.costs, trained + reached - began
        if reached < fails_at:
            return reached
        began = fails_at + job.down
        while True:  # it may fail while it comes back
            failures, fails_at = failures + 1, fails_at + next(gaps)
            if fails_at >= began:
                break
            began = fails_at + job.down


@dataclass(frozen=True, kw_only=True)
class Study:
    """Many runs of a job.

    Attributes:
        work: training time of each.
        walls: how long each took, in seconds.
    """

    work: float
    walls: Sequence[float]

    @property
    def goodput(self) -> float:
        """Training that counted, as a share of all time of all runs."""
        return self.work * len(self.walls) / sum(self.walls)

    @property
    def error(self) -> float:
        """Half of the 95 % confidence interval of the goodput."""
        walls = np.array(self.walls)
        residuals = self.work - self.goodput * walls
        return float(_NORMAL_95 * residuals.std(ddof=1) / math.sqrt(len(walls)) / walls.mean())


def simulate(
    policy: SavePolicy, job: Job, trace: Trace, *, runs: int, learned: LearnedRate | None = None
) -> Study:
    """Run a job many times; every policy meets the same failures."""
    draws = map(np.random.default_rng, np.random.SeedSequence(0).spawn(runs))
    walls = [wall_seconds(policy, job, trace.gaps(each), learned) for each in draws]
    return Study(work=job.steps * job.step, walls=walls)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome of one case: goodput of the best fixed interval, of both forms of `Optimal`."""

    case: str
    mtbf_seconds: float
    best_seconds: float
    best: float
    best_error: float
    formula_seconds: float
    given: float
    learned: float

    @property
    def passed(self) -> bool:
        """Whether both are as near the best as they must be."""
        return self.given >= GIVEN_BAR * self.best and self.learned >= LEARNED_BAR * self.best


def learning(devices: int) -> LearnedRate:
    """What a root learns: the real estimate, from a history."""

    def learned(failures: int, seconds: float) -> FailureRate:
        past = {"devices": devices, "seconds": seconds / max(1, failures), "lost_steps": 0}
        event = "unclean" if failures else "end"
        return failure_rate([{"event": event, **past}] * max(1, failures), devices)

    return learned


@cache
def best_fixed(job: Job, trace: Trace, runs: int) -> tuple[float, Study]:
    """Search the fixed interval of the highest goodput, wide and then fine, on the same failures."""

    def study(seconds: float, count: int) -> Study:
        return simulate(EverySeconds(seconds), job, trace, runs=count)

    few, around = max(1, runs // 5), formula_of(job, trace)
    coarse = max((around * factor for factor in _COARSE), key=lambda seconds: study(seconds, few).goodput)
    near = {seconds: study(seconds, runs) for seconds in (coarse, *(coarse * factor for factor in _FINE))}
    best = max(near, key=lambda seconds: near[seconds].goodput)
    return best, near[best]


def formula_of(job: Job, trace: Trace) -> float:
    """The interval of the formula, of which the search knows only where to begin."""
    return optimal_interval(cost=job.cost, durable=job.durable, mtbf=trace.mtbf)


def compare(case: Case, runs: int, job: Job = JOB) -> Line:
    """Run one case."""
    seconds, best = best_fixed(job, case.trace, runs)
    learned = learning(case.devices)
    return Line(
        case=case.name,
        mtbf_seconds=case.trace.mtbf,
        best_seconds=seconds,
        best=best.goodput,
        best_error=best.error,
        formula_seconds=formula_of(job, case.trace),
        given=simulate(Optimal(case.trace.mtbf), job, case.trace, runs=runs).goodput,
        learned=simulate(Optimal(), job, case.trace, runs=runs, learned=learned).goodput,
    )


def in_words(line: Line) -> str:
    """One row of the table."""
    return (
        f"| {line.case} | {line.mtbf_seconds / HOUR:.2f} h | {line.best_seconds:.0f} s | "
        f"{100 * line.best:.3f} % ± {100 * line.best_error:.3f} | "
        f"{line.formula_seconds:.0f} s | {100 * line.given:.3f} % | {100 * line.given / line.best:.2f} % | "
        f"{100 * line.learned:.3f} % | {100 * line.learned / line.best:.2f} % |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare on every trace; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs of every policy (1000)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name begins with it")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    print("| trace | MTBF | best fixed | goodput | formula | Optimal(mtbf) | of best | Optimal() | of best |")
    print("|---|---|---|---|---|---|---|---|---|")
    lines: list[Line] = []
    began = time.process_time()
    for case in CASES:
        if case.name.startswith(options.only):
            lines.append(compare(case, options.runs))
            print(in_words(lines[-1]), flush=True)
    print(f"\n{options.runs} runs of each, {time.process_time() - began:.0f} s of CPU time")
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
