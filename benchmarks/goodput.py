"""Goodput of cadences that decide themselves, against the best fixed interval found by search."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.simulation import (
    LLAMA_3_DEVICE_SECONDS,
    ExponentialFailures,
    FailureTrace,
    LearnedRate,
    Scenario,
    SimulatedJob,
    Study,
    WeibullFailures,
    simulate,
)
from ckpt_core.cadence import EverySeconds, FailureRate, Optimal, optimal_interval
from ckpt_core.journal import failure_rate

HOUR, DAY = 3600.0, 86400.0
JOB = SimulatedJob(work=5 * DAY, step=5.0, stall=1.0, slowdown=2.0, durable=60.0, down=180.0, restore=60.0)
GIVEN_BAR, LEARNED_BAR = 0.99, 0.98
_COARSE = tuple(2 ** (power / 2) for power in range(-4, 5))
_FINE = tuple(2 ** (power / 8) for power in (-3, -2, -1, 1, 2, 3))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace, and the devices by which the prior is scaled when its rate is learned."""

    name: str
    trace: FailureTrace
    devices: int


CASES = (
    Case(name="exponential", trace=ExponentialFailures(6 * HOUR), devices=8450),
    Case(name="exponential, 3 times the prior's rate", trace=ExponentialFailures(6 * HOUR), devices=2817),
    Case(name="exponential, 1/3 of the prior's rate", trace=ExponentialFailures(6 * HOUR), devices=25350),
    Case(name="Weibull 0.7", trace=WeibullFailures(6 * HOUR, 0.7), devices=8450),
    Case(name="Weibull 0.7, 3 times the prior's rate", trace=WeibullFailures(6 * HOUR, 0.7), devices=2817),
    Case(name="8 devices that fail 1,056 times as often", trace=ExponentialFailures(6 * HOUR), devices=8),
    Case(name="Llama 3", trace=ExponentialFailures(LLAMA_3_DEVICE_SECONDS / 16384), devices=16384),
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome of one case: goodput of the best fixed interval, of both forms of `Optimal`."""

    case: str
    mtbf_seconds: float
    best_seconds: float
    best: float
    best_interval: tuple[float, float]
    formula_seconds: float
    given: float
    learned: float

    @property
    def passed(self) -> bool:
        """Whether both are as near the best as they must be."""
        return self.given >= GIVEN_BAR * self.best and self.learned >= LEARNED_BAR * self.best


def learning(devices: int) -> LearnedRate:
    """What a root learns: the real estimate, from a history summed up."""

    def learned(failures: int, seconds: float) -> FailureRate:
        past = {"failures": failures, "seconds": seconds, "device_seconds": devices * seconds}
        return failure_rate([{"kind": "summary", **past}], devices)

    return learned


@cache
def best_fixed(scenario: Scenario, runs: int) -> tuple[float, Study]:
    """Search the fixed interval of the highest goodput, wide and then fine, on the same failures."""

    def study(seconds: float, count: int) -> Study:
        return simulate(EverySeconds(seconds), scenario, runs=count)

    few, around = max(1, runs // 5), formula_of(scenario)
    coarse = max((around * factor for factor in _COARSE), key=lambda seconds: study(seconds, few).goodput)
    near = {seconds: study(seconds, runs) for seconds in (coarse, *(coarse * factor for factor in _FINE))}
    best = max(near, key=lambda seconds: near[seconds].goodput)
    return best, near[best]


def formula_of(scenario: Scenario) -> float:
    """The interval of the formula, of which the search knows only where to begin."""
    job = scenario.job
    return optimal_interval(cost=job.stall + job.slowdown, durable=job.durable, mtbf=scenario.trace.mtbf)


def compare(case: Case, runs: int, job: SimulatedJob = JOB) -> Line:
    """Run one case."""
    given = Scenario(job=job, trace=case.trace)
    seconds, best = best_fixed(given, runs)
    learned = replace(given, learned=learning(case.devices))
    return Line(
        case=case.name,
        mtbf_seconds=case.trace.mtbf,
        best_seconds=seconds,
        best=best.goodput,
        best_interval=best.interval,
        formula_seconds=formula_of(given),
        given=simulate(Optimal(case.trace.mtbf), given, runs=runs).goodput,
        learned=simulate(Optimal(), learned, runs=runs).goodput,
    )


def in_words(line: Line) -> str:
    """One row of the table."""
    return (
        f"| {line.case} | {line.mtbf_seconds / HOUR:.2f} h | {line.best_seconds:.0f} s | "
        f"{100 * line.best:.3f} % ± {50 * (line.best_interval[1] - line.best_interval[0]):.3f} | "
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
