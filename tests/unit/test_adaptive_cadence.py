"""Policies that follow what saves cost: the optimum, the decisions, and whole runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.cadence import (
    Continuous,
    EverySeconds,
    EverySteps,
    MaxOverhead,
    Optimal,
    decide,
    expected_overhead,
    optimal_interval,
)
from ckpt_core.errors import ConfigError
from ckpt_core.options import policy_from
from ckpt_core.policies import CadenceContext, FailureRate, SaveCosts, SavePolicy

SECONDS = st.floats(1e-3, 1e4)


def costs(
    cost: float = 0.3, *, durable: float = 6.0, saves: int = 5, lost: float = 1.5, **other
) -> SaveCosts:
    facts = {"stall": cost, "slowdown": 0.0, "uploaded": None, "step": 1.0}
    return SaveCosts(**{**facts, "durable": durable, "saves": saves, "lost": lost, **other})


def at(now: float, last: float | None = 0.0, **facts) -> CadenceContext:
    return CadenceContext(step=9, now=now, started=0.0, last_save_time=last, **facts)


@dataclass
class Run:
    """A run on a clock of its own, where a save costs and is measured once durable."""

    policy: SavePolicy
    cost: float
    durable: float
    step: float = 0.25
    mtbf: float | None = None
    now: float = 0.0
    lost: float = 0.0
    last: float | None = None
    measured: SaveCosts | None = None

    def train(self, seconds: float) -> list[float]:
        """Train so long; return when saves began."""
        began, end = [], self.now + seconds
        while self.now < end:
            self.now += self.step
            in_flight = self.last is not None and self.now - self.last < self.durable
            if began and not in_flight:
                count = len(began)
                self.measured = costs(self.cost, durable=self.durable, saves=count, lost=self.lost)
            known = None if self.mtbf is None else FailureRate(self.mtbf, "given")
            facts = {"costs": self.measured, "failures": known, "in_flight": in_flight}
            if decide(self.policy, at(self.now, self.last, **facts)):
                began.append(self.now)
                self.last = self.now
                self.lost += self.cost
                self.now += self.cost
        return began


@given(cost=SECONDS, mtbf=st.floats(1.0, 1e8))
def test_no_interval_loses_less_than_the_optimum(cost: float, mtbf: float) -> None:
    best = optimal_interval(cost=cost, durable=0, mtbf=mtbf)
    assert cost < best <= math.sqrt(2 * cost * mtbf) + cost, "Young's interval plus the save is above it"
    least = expected_overhead(best, cost=cost, durable=0, mtbf=mtbf)
    for factor in (0.7, 0.95, 1.05, 1.5):
        assert expected_overhead(best * factor, cost=cost, durable=0, mtbf=mtbf) >= least - 1e-9


@given(cost=SECONDS, mtbf=st.floats(1.0, 1e8), restart=st.floats(0, 1e4), work=st.floats(0.01, 1e5))
def test_where_a_save_blocks_the_overhead_is_dalys(cost, mtbf, restart, work) -> None:
    if (work + cost + restart) / mtbf > 500:
        return  # the wall time overflows, the overhead does not
    found = expected_overhead(work + cost, cost=cost, durable=cost, mtbf=mtbf, restart=restart)
    wall_per_work = mtbf * math.exp(restart / mtbf) * math.expm1((work + cost) / mtbf) / work
    assert found == pytest.approx(1 - 1 / wall_per_work, abs=1e-9)


@pytest.mark.parametrize(("cost", "mtbf"), [(60.0, 3600.0), (300.0, 86400.0), (5.0, 1e6)])
def test_the_optimum_is_dalys_up_to_the_order_that_he_keeps(cost: float, mtbf: float) -> None:
    root = math.sqrt(cost / (2 * mtbf))
    daly = math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root * root / 9)  # with the save itself
    assert optimal_interval(cost=cost, durable=0, mtbf=mtbf) == pytest.approx(daly, rel=1e-4)


def test_an_extreme_is_no_error() -> None:
    assert optimal_interval(cost=0.0, durable=7.0, mtbf=1e6) == 7
    assert optimal_interval(cost=1e-12, durable=0.0, mtbf=1e9) == pytest.approx(math.sqrt(2e-3), rel=1e-3)
    assert optimal_interval(cost=1e6, durable=0.0, mtbf=1.0) == pytest.approx(1e6 + 1)
    assert expected_overhead(1e9, cost=1.0, durable=1.0, mtbf=1.0) == 1
    assert expected_overhead(5.0, cost=5.0, durable=0.0, mtbf=1e6) == 1
    assert expected_overhead(10.0, cost=0.0, durable=0.0, mtbf=1e9) == pytest.approx(5e-9, rel=1e-3)


def test_the_optimum_is_kept_since_the_last_save_and_explained() -> None:
    policy, facts = Optimal("6h"), {"costs": costs(0.31, durable=6.1)}
    best = optimal_interval(cost=0.31, durable=6.1, mtbf=21600)
    assert decide(policy, at(best - 1, **facts)) is None
    assert decide(policy, at(best + 1, in_flight=True, **facts)) is None
    assert decide(policy, at(best + 1, **facts)) == (
        "optimal: 117 s since the last save, optimum 116 s (one save costs 0.31 s, is durable after 6.1 s, "
        "mtbf 6 h given)"
    )


def test_a_learned_rate_counts_only_where_none_is_given() -> None:
    facts = {"costs": costs(), "failures": FailureRate(1e9, "2 failures in 41 h")}
    best = optimal_interval(cost=0.3, durable=6.0, mtbf=1e9)
    assert decide(Optimal(), at(best - 1, **facts)) is None
    assert decide(Optimal(), at(best, **facts)).endswith("2 failures in 41 h)")
    assert decide(Optimal("1h"), at(best / 10, **facts)).endswith("mtbf 3600 s given)")
    assert Optimal().needs_failures
    assert not Optimal("1h").needs_failures


def test_only_one_save_of_a_tier_is_under_way() -> None:
    facts = {"costs": costs(0.001, durable=60.0, uploaded=300.0)}
    assert decide(Optimal("1h"), at(59, **facts)) is None
    assert decide(Optimal("1h"), at(60, **facts))
    assert decide(Optimal("1h", tier="upload"), at(299, **facts)) is None
    assert "is uploaded after 300 s" in decide(Optimal("1h", tier="upload"), at(300, **facts))
    unknown = {"costs": costs(0.001, durable=60.0)}
    assert "is durable after 60 s" in decide(Optimal("1h", tier="upload"), at(60, **unknown))


def test_bounds_hold_for_measured_and_unmeasured_saves() -> None:
    facts = {"costs": costs()}
    assert decide(Optimal("6h", min_seconds="10m"), at(599, **facts)) is None
    assert "bounded to at least 600 s" in decide(Optimal("6h", min_seconds="10m"), at(600, **facts))
    assert "bounded to 0 s to 30 s" in decide(Optimal("6h", max_seconds=30), at(30, **facts))
    assert decide(Optimal("6h", min_seconds=90), at(89)) is None
    assert decide(Optimal("6h", min_seconds=90), at(90))
    assert decide(Optimal("6h", max_seconds=5), at(5))


@pytest.mark.parametrize("policy", [Optimal("6h"), Optimal(), MaxOverhead(0.01)])
def test_where_nothing_is_ever_measured_saves_become_rare_but_do_not_end(policy: SavePolicy) -> None:
    saves: list[float] = []
    for minute in range(1, 300):
        if decide(policy, at(60.0 * minute, 60 * saves[-1] if saves else None)):
            saves.append(minute)
    assert saves == [1, 2, 4, 8, 16, 32, *range(62, 300, 30)]


def test_the_second_save_comes_early_as_the_first_is_dearer() -> None:
    run = Run(Optimal("1d"), cost=0.5, durable=5.0)
    began = run.train(3000)
    best = optimal_interval(cost=0.5, durable=5.0, mtbf=86400)
    assert began[0] == 60
    gaps = [after - before for before, after in pairwise(began)]
    assert gaps[0] == pytest.approx(best / 2, abs=1)
    assert gaps[1:] == pytest.approx([best] * (len(gaps) - 1), abs=1)


@pytest.mark.parametrize("fraction", [0.005, 0.01, 0.05])
@pytest.mark.parametrize("cost", [0.02, 0.4, 3.0])
def test_a_run_spends_the_fraction_that_it_may(fraction: float, cost: float) -> None:
    run = Run(MaxOverhead(fraction), cost=cost, durable=cost)
    seconds = max(20 * cost / fraction, 600)
    run.train(seconds)
    assert 0.8 * fraction <= run.lost / run.now <= 1.001 * fraction


def test_after_a_change_of_the_cost_the_fraction_is_kept() -> None:
    run = Run(MaxOverhead(0.01), cost=0.2, durable=1.0)
    run.train(2000)
    run.cost = 1.0
    run.train(4000)
    assert run.lost / run.now == pytest.approx(0.01, rel=0.2)
    before = run.lost
    run.cost = 0.1
    run.train(1000)
    assert (run.lost - before) / 1000 <= 0.0151
    assert run.lost / run.now == pytest.approx(0.01, rel=0.2)


def test_a_save_whose_cost_is_not_yet_known_is_not_forgotten() -> None:
    facts = {"costs": costs(1.0, lost=0.0)}
    assert decide(MaxOverhead(0.01), at(1060, last=1000, **facts)) is None
    assert decide(MaxOverhead(0.01), at(1067, last=1000, **facts))
    assert decide(MaxOverhead(0.01), at(1067, last=1000, in_flight=True, **facts)) is None


def test_continuous_saves_follow_one_another() -> None:
    assert decide(Continuous(), at(9, in_flight=True)) is None
    assert decide(Continuous(), at(9)) == "continuous: the last save is durable, 9 s after it began"
    assert decide(Continuous("1m"), at(59)) is None
    assert decide(Continuous("1m"), at(60))
    began = Run(Continuous(), cost=0.5, durable=4.0).train(100)
    assert {after - before for before, after in pairwise(began)} == {4.0}


def test_needs_of_parts_are_needs_of_the_whole() -> None:
    plain = EverySteps(5)
    for whole in (plain | Optimal(), plain & Optimal(), ~Optimal()):
        assert whole.needs_agreement
        assert whole.needs_costs
        assert whole.needs_failures
    for whole in (plain | MaxOverhead(0.1), plain & Continuous(), ~Optimal(5)):
        assert whole.needs_costs
        assert not whole.needs_failures
    assert not (plain | ~EverySeconds(5)).needs_costs


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ({"optimal": True}, Optimal()),
        ({"optimal": "6h"}, Optimal(21600)),
        ({"optimal": {"max_seconds": "15m"}}, Optimal(max_seconds=900)),
        (
            {"optimal": {"mtbf": "2d", "min_seconds": 60, "tier": "upload"}},
            Optimal(172800, min_seconds=60, tier="upload"),
        ),
        ({"max_overhead": 0.01}, MaxOverhead(0.01)),
        ({"max_overhead": {"fraction": 0.05}}, MaxOverhead(0.05)),
        ({"continuous": True}, Continuous()),
        ({"continuous": {"min_seconds": "1.5m"}}, Continuous(90)),
        (
            {"any": {"every_steps": 5}, "all_of": [{"optimal": True}, {"continuous": 60}]},
            EverySteps(5) | (Optimal() & Continuous(60)),
        ),
    ],
)
def test_plain_values_name_these_policies(value: object, policy: SavePolicy) -> None:
    assert policy_from(value, "save") == policy


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"optimal": "6 hours"}, "mtbf must be seconds above 0"),
        ({"optimal": 0}, "mtbf must be seconds above 0"),
        ({"optimal": {"mtbf": True}}, "mtbf must be seconds above 0"),
        ({"optimal": {"mtfb": 5}}, "did you mean 'mtbf'"),
        ({"optimal": {"min_seconds": -1}}, "min_seconds must be seconds of at least 0"),
        ({"optimal": {"min_seconds": "nan"}}, "min_seconds must be seconds of at least 0"),
        (
            {"optimal": {"min_seconds": "2m", "max_seconds": 60}},
            "max_seconds must be at least min_seconds, 120",
        ),
        ({"optimal": {"tier": "moon"}}, "tier must be one of 'root', 'upload'"),
        ({"max_overhead": 1}, "fraction must be below 1, 0.01 for 1 %"),
        ({"max_overhead": "1%"}, "fraction must be a finite number above 0"),
        ({"max_overhead": True}, "fraction must be a finite number above 0"),
        ({"continuous": float("inf")}, "min_seconds must be seconds of at least 0"),
        ({"continuous": False}, "names no policy"),
    ],
)
def test_what_means_nothing_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        policy_from(value, "save")


# --- the interval that a policy tells -----------------------------------------------------------------------


def told(policy, *, mtbf=3600.0):
    costs = SaveCosts(stall=1.0, slowdown=1.0, durable=10.0, uploaded=None, saves=5, lost=10.0, step=0.1)
    context = CadenceContext(
        step=9, now=100.0, started=0.0, costs=costs, failures=FailureRate(mtbf, "learned")
    )
    assert policy.interval(context._replace(costs=None)) is None
    return policy.interval(context)


def test_the_interval_is_the_one_that_decides():
    best = optimal_interval(cost=2.0, durable=10.0, mtbf=3600.0)
    assert told(Optimal()) == (best, (3600.0, "learned"))
    assert told(Optimal(mtbf="1h"), mtbf=9.0) == (best, (3600.0, "given"))
    assert told(Optimal(max_seconds=7)).seconds == 7.0
    assert told(MaxOverhead(0.01)) == (200.0, None)
    assert told(EverySteps(3)) is None
    assert told(~Optimal()) is None


def test_of_several_rules_the_one_that_saves_counts():
    best = optimal_interval(cost=2.0, durable=10.0, mtbf=3600.0)
    assert told(EverySteps(3) | Optimal() | MaxOverhead(0.01)).seconds == min(best, 200.0)
    assert told(EverySteps(3) & Optimal() & MaxOverhead(0.01)).seconds == max(best, 200.0)
