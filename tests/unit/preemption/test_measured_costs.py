"""Every rank decides on the coordinator's figures, which travel in the exchange of a decision."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import pytest

from ckpt_core.cadence import EverySeconds
from ckpt_core.coordination import Solo
from ckpt_core.policies import CadenceContext, FailureRate, SaveCosts, SavePolicy
from ckpt_core.preemption import CadenceKeeper
from tests.kit.clock import FakeClock

COSTS = SaveCosts(stall=0.5, slowdown=0.0, durable=12.25, uploaded=None, saves=3, lost=1.75, step=0.2)
RATE = FailureRate(mtbf=3600.0, source="given")


@final
@dataclass
class Measured:
    costs: SaveCosts | None = None
    in_flight: bool = False


@dataclass(frozen=True)
class Recorder(SavePolicy):
    """Never saves, and keeps what it was given."""

    needs: bool = True
    seen: list[CadenceContext] = field(default_factory=list[CadenceContext], hash=False, repr=False)

    def decide(self, context: CadenceContext) -> str | None:
        self.seen.append(context)
        return None

    @property
    def needs_costs(self) -> bool:
        return self.needs

    @property
    def needs_failures(self) -> bool:
        return self.needs


class Unreachable(Solo):
    """A rank that must not be asked."""

    def gather_scatter(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the coordinator was asked")


class OneOfTwo(Solo):
    """A rank of two; the other one sends what it is given."""

    def __init__(self, rank: int, others: Sequence[int] = ()) -> None:
        super().__init__()
        self.rank = rank
        self.others = others
        self.sent: list[int] = []

    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        self.sent = list(flags)
        return tuple(map(max, flags, self.others)) if self.others else tuple(flags)

    def gather_scatter(self, value: Any, decide: Any, **_: Any) -> Any:
        return decide([value, value])[self.rank]


@pytest.mark.parametrize("costs", [None, COSTS, COSTS._replace(uploaded=40.0, slowdown=0.125, stall=0.0)])
def test_the_coordinators_costs_count_on_every_rank(costs):
    lead = OneOfTwo(0)
    CadenceKeeper(Recorder(), lead, FakeClock(), measured=Measured(costs)).due(1)
    other, policy = OneOfTwo(1, lead.sent), Recorder()
    CadenceKeeper(policy, other, FakeClock(7.0), measured=Measured(COSTS._replace(stall=9.0), True)).due(1)
    assert policy.seen[0].costs == costs
    assert policy.seen[0].in_flight
    assert len(other.sent) == len(lead.sent)


def test_a_save_is_in_flight_only_while_it_is_on_some_rank():
    lead, policy, measured = OneOfTwo(0), Recorder(), Measured(COSTS, in_flight=True)
    cadence = CadenceKeeper(policy, lead, FakeClock(), measured=measured)
    cadence.due(1)
    measured.in_flight = False
    cadence.due(2)
    assert [each.in_flight for each in policy.seen] == [True, False]


@pytest.mark.parametrize("policy", [EverySeconds(60), Recorder(needs=False)])
def test_a_policy_that_needs_no_costs_exchanges_what_it_always_did(policy):
    lead = OneOfTwo(0)
    CadenceKeeper(policy, lead, FakeClock(), measured=Measured(COSTS)).due(1)
    assert len(lead.sent) == 3


def test_parts_of_a_combination_get_what_they_need():
    policy = Recorder()
    combined = EverySeconds(60) | (policy & ~Recorder(needs=False))
    assert combined.needs_costs
    assert combined.needs_failures
    assert not (EverySeconds(60) | Recorder(needs=False)).needs_costs
    CadenceKeeper(combined, Solo(), FakeClock(), measured=Measured(COSTS)).due(1)
    assert policy.seen[0].costs == COSTS


def test_a_run_that_continues_begins_with_the_costs_of_the_one_before():
    before = CadenceKeeper(Recorder(), Solo(), FakeClock(), measured=Measured(COSTS))
    assert before.annotations == {}
    before.due(1)
    saved = json.loads(json.dumps(before.annotations))
    policy, measured = Recorder(), Measured()
    after = CadenceKeeper(policy, Solo(), FakeClock(), measured=measured)
    after.count_from(lambda: saved)
    after.due(2)
    assert policy.seen[0].costs == COSTS._replace(lost=0.0)
    assert after.annotations == {"costs": COSTS._replace(lost=0.0)._asdict()}
    for step, saves in enumerate((1, 2, 3, 4), start=3):
        measured.costs = COSTS._replace(stall=9.0, saves=saves, lost=5.0 * saves)
        after.due(step)
    assert [each.costs for each in policy.seen[1:]] == [
        COSTS._replace(lost=5.0),
        COSTS._replace(lost=10.0),
        COSTS._replace(stall=9.0, saves=3, lost=15.0),
        COSTS._replace(stall=9.0, saves=4, lost=20.0),
    ]


def test_what_one_save_of_the_run_before_cost_gives_way_to_the_first_of_this_one():
    policy, measured = Recorder(), Measured()
    cadence = CadenceKeeper(policy, Solo(), FakeClock(), measured=measured)
    cadence.count_from(lambda: {"costs": COSTS._replace(saves=1)._asdict()})
    measured.costs = COSTS._replace(stall=9.0, saves=1)
    cadence.due(1)
    assert policy.seen[0].costs == measured.costs


@pytest.mark.parametrize(
    "costs",
    [None, 3, {}, {"stall": 1.0}, COSTS._asdict() | {"stall": None}]
    + [COSTS._asdict() | {"durable": value} for value in (-1.0, math.nan, math.inf, "1", [1])],
)
def test_costs_that_a_user_wrote_wrongly_are_not_used(costs):
    policy = Recorder()
    cadence = CadenceKeeper(policy, Solo(), FakeClock(), measured=Measured())
    cadence.count_from(lambda: {"costs": costs})
    cadence.due(1)
    assert policy.seen[0].costs is None


def test_a_policy_that_needs_no_costs_records_none():
    cadence = CadenceKeeper(Recorder(needs=False), Unreachable(), FakeClock(), measured=Measured(COSTS))
    cadence.count_from(lambda: pytest.fail("read"))
    assert cadence.annotations == {}


def test_the_rate_of_failures_is_asked_once_when_the_root_is_taken():
    asked: list[int] = []

    def failures() -> FailureRate:
        asked.append(1)
        return RATE

    policy = Recorder()
    cadence = CadenceKeeper(policy, Solo(), FakeClock(), failures=failures)
    cadence.due(1)
    assert asked == []
    for step in (1, 2, 3):
        cadence.saved(step)
        cadence.due(step + 1)
    assert asked == [1]
    assert [each.failures for each in policy.seen] == [None, RATE, RATE, RATE]


def test_a_policy_that_needs_no_rate_of_failures_asks_nobody():
    cadence = CadenceKeeper(Recorder(needs=False), Solo(), FakeClock(), failures=lambda: pytest.fail("asked"))
    cadence.saved(1)
