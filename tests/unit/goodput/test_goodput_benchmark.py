"""The simulation that judges policies: against closed forms, against a run of every step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.goodput import CASES, DAY, JOB, Job, Life, Trace, compare, simulate
from ckpt_core.cadence import EverySeconds, EverySteps, MaxOverhead, Optimal, decide, expected_overhead
from ckpt_core.policies import CadenceContext, SaveCosts, SavePolicy

NEVER = 1e12


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-1]], ids=lambda case: case.name)
def test_the_optimum_is_as_near_the_best_as_it_must_be(case):
    line = compare(case, 10, replace(JOB, work=JOB.work / 2))
    assert line.passed, line
    assert 0.6 < line.best_seconds / line.formula_seconds < 1.7


@pytest.mark.parametrize("work", [2400, 4800])
def test_where_saves_block_the_time_is_dalys(work):
    mtbf, save, restart = 6 * 3600.0, 120.0, 300.0
    job = Job(work=40 * DAY, step=60.0, stall=save, slowdown=0.0, durable=save, down=restart)
    study = simulate(EverySteps(work // 60), job, Trace(mtbf=mtbf), runs=40)
    daly = mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf) / work
    assert study.goodput == pytest.approx(1 / daly, rel=0.005)
    assert abs(study.goodput - 1 / daly) < 2 * study.error, "within four standard errors"


def test_an_asynchronous_save_costs_what_the_formula_says():
    job, trace = (
        Job(work=40 * DAY, step=5.0, stall=3.0, slowdown=5.0, durable=90.0, down=180.0),
        Trace(mtbf=3 * 3600.0),
    )
    expected = expected_overhead(600, cost=8.0, durable=90.0, mtbf=trace.mtbf, restart=180.0)
    assert simulate(EverySeconds(600), job, trace, runs=15).goodput == pytest.approx(1 - expected, rel=0.005)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_failures_of_every_shape_come_as_often_as_they_are_said_to(shape):
    gaps = Trace(mtbf=500.0, shape=shape).gaps(np.random.default_rng(0))
    assert sum(itertools.islice(gaps, 20_000)) / 20_000 == pytest.approx(500, rel=0.05)


def every_step(policy: SavePolicy, job: Job) -> list[int]:
    """The steps saved in one start, asked at every step, with the manager's rules."""
    saves: list[tuple[int, float, float]] = []
    now, measured, flight = 0.0, None, job.durable - job.stall
    work = flight - job.slowdown
    for step in range(1, job.steps):
        left = flight - (now - saves[-1][2]) if saves else 0.0
        slow = flight / work if left > 1e-9 else 1.0
        now += job.step * slow if left <= 1e-9 or left >= job.step * slow else left + job.step - left / slow
        in_flight = bool(saves) and now - saves[-1][2] < flight - 1e-9
        done = max(1, math.ceil(work / job.step - 1e-9))
        if saves and step - saves[-1][0] >= done + 8:
            measured = costs_of(job, len(saves))
        context = CadenceContext(
            step=step,
            now=now,
            started=0.0,
            previous_step=step - 1 if step > 1 else None,
            last_save_step=saves[-1][0] if saves else None,
            last_save_time=saves[-1][1] if saves else None,
            total_steps=job.steps,
            costs=measured,
            in_flight=in_flight,
        )
        if decide(policy, context):
            measured = costs_of(job, len(saves)) if saves else measured
            saves.append((step, now, now + job.stall))
            now += job.stall
    return [step for step, _, _ in saves]


def costs_of(job: Job, saves: int) -> SaveCosts:
    return SaveCosts(job.stall, job.slowdown, job.durable, None, saves, saves * job.cost, job.step)


@settings(max_examples=40, deadline=None)
@given(
    policy=st.one_of(
        st.builds(EverySteps, st.integers(15, 60), offset=st.integers(0, 20)),
        st.integers(20, 90).map(lambda number: EverySeconds(number + 0.3)),  # no sum of steps and stalls
        st.sampled_from(
            [Optimal("1h"), Optimal(200, max_seconds=50), MaxOverhead(0.0213), MaxOverhead(0.2137)]
        ),
        st.builds(
            lambda first, second: first | second,
            st.builds(EverySteps, st.integers(15, 60)),
            st.just(Optimal("1h")),
        ),
    ),
    stall=st.sampled_from([0.0, 0.53, 2.07]),
    slowdown=st.sampled_from([0.0, 1.51]),
)
def test_a_search_finds_the_steps_at_which_a_policy_asked_at_every_step_saves(policy, stall, slowdown):
    job = Job(work=2000.0, step=1.0, stall=stall, slowdown=slowdown, durable=stall + 10)
    life = Life(policy, job, 0.0, 0)
    life.run(NEVER)
    assert life.saved == every_step(policy, job)
