"""Simulated runs: against closed forms, against a run of every step, and against one another."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.simulation import (
    ExponentialFailures,
    RecordedFailures,
    Scenario,
    SimulatedJob,
    WeibullFailures,
    failures_from_csv,
    simulate,
)
from ckpt_core.cadence import (
    AtSteps,
    CadenceContext,
    Continuous,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    FirstStep,
    MaxOverhead,
    OnPreemption,
    Optimal,
    SaveCosts,
    SavePolicy,
    decide,
    expected_overhead,
    optimal_interval,
)
from ckpt_core.errors import ConfigError
from ckpt_core.retention import KeepLatest

DAY = 86400.0
NEVER = 1e12


@dataclass(frozen=True)
class Custom(SavePolicy):
    """A policy of a user's own, of which the search knows nothing."""

    def decide(self, context: CadenceContext) -> str | None:
        return "custom" if context.step % 7 in {2, 3} else None


@pytest.mark.parametrize("work", [1200, 2400, 4800])
def test_where_saves_block_the_time_is_dalys(work: int) -> None:
    mtbf, save, restart = 6 * 3600.0, 120.0, 300.0
    job = SimulatedJob(work=40 * DAY, step=60.0, stall=save, durable=save, down=restart)
    study = simulate(EverySteps(work // 60), Scenario(job=job, trace=ExponentialFailures(mtbf)), runs=60)
    daly = mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf) / work
    assert study.goodput == pytest.approx(1 / daly, rel=0.005)
    low, high = study.interval
    assert abs(study.goodput - 1 / daly) < high - low, "within four standard errors"


@pytest.mark.slow
def test_an_asynchronous_save_costs_what_the_formula_says() -> None:
    mtbf, down, restore = 3 * 3600.0, 120.0, 60.0
    facts = {"stall": 3.0, "slowdown": 5.0, "durable": 90.0}
    job = SimulatedJob(work=40 * DAY, step=2.0, down=down, restore=restore, **facts)
    study = simulate(EverySeconds(600), Scenario(job=job, trace=ExponentialFailures(mtbf)), runs=60)
    expected = expected_overhead(600, cost=8.0, durable=90.0, mtbf=mtbf, restart=down + restore)
    assert study.goodput == pytest.approx(1 - expected, rel=0.005)


def costs_so_far(job: SimulatedJob, saves: int) -> SaveCosts:
    lost = saves * (job.stall + job.slowdown)
    return SaveCosts(job.stall, job.slowdown, job.durable, None, saves, lost, job.step)


def reference(policy: SavePolicy, job: SimulatedJob, fails_at: float = NEVER) -> list[int]:
    """The steps saved in one start, asked at every step, with the manager's rules."""
    saves: list[tuple[int, float, float]] = []
    now, measured = 0.0, None
    for step in range(1, job.steps):
        since = now - (saves[-1][2] if saves else now)
        slow = 1.0
        left = job.in_flight - since if saves else 0.0
        if left > 1e-9:
            slow = job.in_flight / job.work_in_flight
        now += job.step * slow if left <= 1e-9 or left >= job.step * slow else left + job.step - left / slow
        if now > fails_at:
            break
        in_flight = bool(saves) and now - saves[-1][2] < job.in_flight - 1e-9
        done = math.ceil(job.work_in_flight / job.step - 1e-9) if saves else 0
        if saves and step - saves[-1][0] >= max(1, done) + 8:
            measured = costs_so_far(job, len(saves))
        context = CadenceContext(
            step=step,
            now=now,
            started=0.0,
            previous_step=step - 1 if step > 1 else None,
            last_save_step=saves[-1][0] if saves else None,
            last_save_time=saves[-1][1] if saves else None,
            total_steps=job.steps,
            counts={"tokens": 10 * step, "epochs": step // 30},
            since_counts={"tokens": 10 * (step - 1), "epochs": (step - 1) // 30},
            costs=measured,
            in_flight=in_flight,
        )
        if decide(policy, context):
            if saves:
                measured = costs_so_far(job, len(saves))
            saves.append((step, now, now + job.stall))
            now += job.stall
    return [step for step, _, _ in saves]


LEAVES = st.one_of(
    st.builds(EverySteps, st.integers(15, 60), offset=st.integers(0, 20)),
    st.builds(EverySeconds, st.floats(20, 90)),
    st.builds(AtSteps, st.lists(st.integers(10, 300).map(lambda n: 12 * n), min_size=1, max_size=5)),
    st.sampled_from(
        [
            *(Optimal("1h"), Optimal(200, max_seconds=50), MaxOverhead(0.02), Continuous(25)),
            *(EveryFraction(0.07), EveryTokens(370), EveryEpochs(1), FirstStep(), OnPreemption(), Custom()),
        ]
    ),
)


@settings(max_examples=60, deadline=None)
@given(LEAVES, LEAVES, st.sampled_from(["one", "or", "and", "not"]))
@example(Optimal("1h"), EverySteps(50), "or")
@example(MaxOverhead(0.02), EverySteps(50), "one")
@example(EverySeconds(30.0), EverySteps(20), "not")
def test_the_search_finds_the_saves_that_every_step_finds(a, b, how) -> None:
    policy = {"one": a, "or": a | b, "and": a & b, "not": a & ~b}[how]
    job = SimulatedJob(
        work=700, stall=0.5, slowdown=1.25, durable=10.5, step=1.0, tokens_per_step=10, steps_per_epoch=30
    )
    # Retention makes the run record each commit; none may come so soon that it would wait for the last one.
    expected = reference(policy, job)
    study = simulate(policy, Scenario(job=job, trace=RecordedFailures((NEVER,))), runs=1, keep=KeepLatest(1))
    gaps = [after - before for before, after in itertools.pairwise(expected)]
    if all(gap > 10 for gap in gaps):
        assert study.runs[0].saves == len(expected)
        assert study.runs[0].stall == pytest.approx(0.5 * len(expected), abs=1e-6)


@pytest.mark.parametrize(
    "policy", [Optimal("6h"), EverySeconds(333), EverySteps(250), Continuous(60), Optimal() | OnPreemption()]
)
def test_saves_that_are_skipped_over_count_as_if_they_were_made(policy: SavePolicy) -> None:
    job = SimulatedJob(
        work=DAY,
        stall=0.5,
        slowdown=0.3,
        durable=20,
        uploaded=45,
        node_loss=0.4,
        down=60,
        restore=20,
        restore_upload=90,
    )
    scenario = Scenario(job=job, trace=ExponentialFailures(7200))
    skipped = simulate(policy, scenario, runs=1, seed=3).runs[0]
    made = simulate(policy, scenario, runs=1, seed=3, keep=KeepLatest(1)).runs[0]
    for name in ("useful", "stall", "slowdown", "lost", "restore", "down", "failures", "saves"):
        assert getattr(skipped, name) == pytest.approx(getattr(made, name), abs=1e-5), name


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([EverySeconds(40), Optimal("1h"), MaxOverhead(0.05), EverySteps(7), Continuous()]),
    st.integers(0, 1000),
)
def test_every_second_is_one_part(policy: SavePolicy, seed: int) -> None:
    facts = {"stall": 1.0, "slowdown": 2.0, "durable": 30.0, "uploaded": 100.0, "node_loss": 0.3}
    job = SimulatedJob(work=4000, **facts, down=50.0, restore=20.0, restore_upload=200.0)
    clock = Clocked(900.0)
    (run,) = simulate(policy, Scenario(job=job, trace=clock), runs=1, seed=seed).runs
    assert run.useful == 4000
    assert min(run.lost, run.down, run.restore, run.stall, run.slowdown) >= -1e-6
    # All failures lie before the end, and the one drawn last lies after it.
    assert clock.drawn[-2] - 1e-6 <= run.wall < clock.drawn[-1] + 1e-6
    assert run.failures == len(clock.drawn) - 2


class Clocked(ExponentialFailures):
    """Remembers when failures strike."""

    def __new__(cls, mean: float):
        return object.__new__(cls)

    def gaps(self, draws, run):
        at = 0.0
        object.__setattr__(self, "drawn", [0.0])
        for gap in super().gaps(draws, run):
            at += gap
            self.drawn.append(at)
            yield gap


def test_a_lost_node_goes_back_to_the_upload_tier() -> None:
    facts = {"work": 1000.0, "durable": 10.0, "uploaded": 60.0, "restore": 1.0, "restore_upload": 7.0}
    trace = RecordedFailures((355.0, NEVER))
    near = simulate(EverySteps(100), Scenario(job=SimulatedJob(**facts), trace=trace), runs=1).runs[0]
    far = SimulatedJob(**facts, node_loss=1.0)
    lost = simulate(EverySteps(100), Scenario(job=far, trace=trace), runs=1).runs[0]
    assert (near.lost, near.restore, near.failures) == (55, 1, 1)
    assert (lost.lost, lost.restore, lost.failures) == (155, 7, 1), "the save of step 300 is not uploaded"


def test_a_save_that_is_not_durable_is_lost_and_a_failed_restart_is_repeated() -> None:
    job = SimulatedJob(work=1000.0, durable=30.0, down=40.0, restore=10.0)
    trace = RecordedFailures((229.0, 20.0, 45.0, NEVER))
    run = simulate(EverySteps(100), Scenario(job=job, trace=trace), runs=1).runs[0]
    assert (run.lost, run.down, run.restore, run.failures) == (129, 100, 15, 3)
    assert run.wall == 1000 + 129 + 115


def test_a_save_that_is_due_too_early_waits_for_the_last_one() -> None:
    job = SimulatedJob(work=100.0, stall=1.0, durable=26.0)
    run = simulate(EverySteps(10), Scenario(job=job, trace=RecordedFailures((NEVER,))), runs=1).runs[0]
    assert run.saves == 9
    assert run.stall == pytest.approx(9 * 1 + 8 * 15)


def test_equal_seeds_give_equal_failures_to_every_policy() -> None:
    scenario = Scenario(job=SimulatedJob(work=DAY, down=10.0), trace=WeibullFailures(3600, 0.7))
    a, b, other = (
        simulate(policy, scenario, runs=3, seed=seed)
        for policy, seed in [(EverySteps(100), 1), (EverySteps(100), 1), (EverySteps(100), 2)]
    )
    assert a.runs == b.runs
    assert a.runs != other.runs


def test_the_mean_gap_is_the_mtbf_of_the_trace() -> None:
    for trace in (ExponentialFailures(500.0), WeibullFailures(500.0, 0.7), RecordedFailures((400.0, 600.0))):
        gaps = list(itertools.islice(trace.gaps(np.random.default_rng(0), 1), 40_000))
        assert np.mean(gaps) == pytest.approx(trace.mtbf, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("trace", [ExponentialFailures(11135.0), WeibullFailures(21600.0, 0.7)])
def test_the_optimum_is_near_the_best_fixed_interval(trace) -> None:
    job = SimulatedJob(work=5 * DAY, stall=2.0, slowdown=3.0, durable=60.0, down=180.0, restore=60.0)
    scenario = Scenario(job=job, trace=trace)
    around = optimal_interval(cost=5.0, durable=60.0, mtbf=trace.mtbf)
    fixed = [EverySeconds(around * factor) for factor in (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)]
    best = max(simulate(policy, scenario, runs=40).goodput for policy in fixed)
    assert simulate(Optimal(trace.mtbf), scenario, runs=40).goodput >= 0.99 * best


def test_a_record_is_read_from_csv(tmp_path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("time,host\n2024-05-01T00:00:10,a\n2024-05-01T00:00:00Z,b\n1714521700,c\n")
    assert failures_from_csv(times) == RecordedFailures((10.0, 90.0))
    gaps = tmp_path / "gaps.csv"
    gaps.write_text("seconds\n5\n7.5\n")
    assert failures_from_csv(gaps).recorded == (5.0, 7.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs a column"),
        ("when\n5\n", "needs a column"),
        ("time\n5\n", "at least one gap"),
        ("seconds\n5\nsoon\n", "line 3: 'soon' is no time"),
        ("seconds,a\n5\n,b\n", "line 3: '' is no time"),
        ("seconds\n0\n", "each gap must be a finite number above 0"),
    ],
)
def test_a_record_that_says_nothing_is_refused(tmp_path, text: str, problem: str) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        failures_from_csv(path)
    with pytest.raises(ConfigError, match="cannot read failures"):
        failures_from_csv(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"spread": 0.5}, "spread must be a factor"),
        ({"work": 0}, "work must be"),
        ({"node_loss": 0.5}, "without an upload tier"),
        ({"node_loss": 1.5, "uploaded": 9.0}, "between 0 and 1"),
        ({"stall": 5.0}, "durable, 0, includes the stall"),
        ({"slowdown": 5.0, "durable": 5.0}, "slowdown, 5, must be less"),
        ({"durable": 5.0, "uploaded": 4.0}, "uploaded, 4, cannot be less"),
        ({"tokens_per_step": 0}, "tokens_per_step must be"),
    ],
)
def test_a_job_that_cannot_be_is_refused(facts, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SimulatedJob(**{"work": 100.0, **facts})


def test_a_policy_that_never_saves_ends_with_an_error_not_never() -> None:
    job = SimulatedJob(work=86_400.0, down=60.0)
    scenario = Scenario(job=job, trace=ExponentialFailures(3600.0))
    with pytest.raises(ConfigError, match="does not come to its end"):
        simulate(~MaxOverhead(0.01) & EverySteps(10**7), scenario, runs=1)


def test_costs_that_vary_have_the_median_given_and_every_second_is_still_one_part() -> None:
    facts = {"work": 86_400.0, "stall": 2.0, "slowdown": 1.0, "durable": 10.0}
    trace = RecordedFailures([10.0**9])
    spread = 2.0
    study = simulate(
        EverySeconds(100.0), Scenario(job=SimulatedJob(**facts, spread=spread), trace=trace), runs=3
    )
    even = simulate(EverySeconds(100.0), Scenario(job=SimulatedJob(**facts), trace=trace), runs=3)

    assert study.mean("useful") == 86_400.0
    mean = math.exp(math.log(spread) ** 2 / 2)  # of a logarithmic normal distribution, in medians
    cost = (study.mean("stall") + study.mean("slowdown")) / study.mean("saves")
    assert cost == pytest.approx(3.0 * mean, rel=0.08)
    assert (even.mean("stall") + even.mean("slowdown")) / even.mean("saves") == pytest.approx(3.0, rel=0.01)


def test_the_optimum_of_the_medians_is_near_the_best_although_costs_vary() -> None:
    job = SimulatedJob(work=10 * 86_400.0, stall=4.0, durable=20.0, down=60.0, spread=1.5)
    scenario = Scenario(job=job, trace=ExponentialFailures(4 * 3600.0))
    best = max(simulate(EverySeconds(seconds), scenario, runs=6).goodput for seconds in (240, 340, 480))
    assert simulate(Optimal(mtbf="4h"), scenario, runs=6).goodput > 0.99 * best
