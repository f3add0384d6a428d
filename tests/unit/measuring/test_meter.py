"""The meter against trainings whose costs are known, on a clock that only they move."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ckpt_core import AtSteps, MaxOverhead
from ckpt_core.coordination import Solo
from ckpt_core.errors import SaveError
from ckpt_core.measuring import CostMeter
from ckpt_core.preemption import CadenceKeeper
from ckpt_core.saving import SaveHandle
from ckpt_core.telemetry import InMemorySink, Telemetry
from ckpt_core.types import CheckpointInfo, Lineage
from tests.kit.clock import FakeClock

INFO = CheckpointInfo(
    step=1,
    name="step-1",
    created=0.0,
    size_bytes=123,
    world_size=1,
    save_id="s",
    metrics={},
    lineage=Lineage(),
)


class Rank(Solo):
    """A rank that need not be the coordinator."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.rank = number


@dataclass
class Work:
    idle: bool = True
    waited_seconds: float = 0.0
    optimizers: tuple[Any, ...] = ()


def steady(_: int) -> float:
    return 0.1


@dataclass
class Training:
    """A training on a clock of its own, with a save in flight now and then.

    `lost` is what the saves have really cost.
    """

    seconds: Callable[[int], float] = steady
    stall: float = 0.05
    durable: float = 2.0
    factor: float = 1.3
    noise: float = 0.0
    seed: int = 0
    coordinator: Any = field(default_factory=Solo)

    def __post_init__(self) -> None:
        self.clock, self.work, self.sink = FakeClock(), Work(), InMemorySink()
        self.meter = CostMeter(Telemetry(self.sink), self.coordinator, self.work, self.clock)
        self.random = random.Random(self.seed)
        self.handle: SaveHandle | None = None
        self.ends = -math.inf
        self.lost = 0.0
        self.started = self.clock()

    @property
    def in_flight(self) -> bool:
        return self.clock() < self.ends

    def train(self, step: int) -> None:
        """One step, which is slower for the part of it in which a save is in flight."""
        todo = self.seconds(step) * self.random.lognormvariate(0.0, self.noise)
        while todo > 0:
            if not self.in_flight:
                self.clock.advance(todo)
                break
            part = min(todo * self.factor, self.ends - self.clock())
            self.clock.advance(part)
            self.lost += part * (1 - 1 / self.factor)
            todo -= part / self.factor
            if self.clock() >= self.ends - 1e-9:
                self.land()

    def rest(self, seconds: float) -> None:
        """Something else than a step, while a save may come to its end."""
        if self.in_flight and self.ends <= self.clock() + seconds:
            seconds -= self.ends - self.clock()
            self.clock.advance(self.ends - self.clock())
            self.land()
        self.clock.advance(seconds)

    def land(self, error: SaveError | None = None) -> None:
        assert self.handle is not None
        self.ends = -math.inf
        if error is None:
            self.handle.committed.set_result(INFO)
        else:
            self.handle.committed.set_exception(error)
        self.work.idle = True

    def save(self, step: int, reason: str = "every 50 steps") -> None:
        waited = self.ends - self.clock() if self.in_flight else 0.0  # by back-pressure
        with self.meter.save(step, f"step-{step}", {"reason": reason}) as measured:
            self.clock.advance(waited)
            if waited:
                self.land()
            self.clock.advance(self.stall)
            self.lost += self.stall + waited
            measured.handle = self.handle = SaveHandle(step, f"step-{step}", 0.0)
            self.work.idle = False
            self.ends = self.clock() + self.durable

    def fail(self, step: int, seconds: float) -> None:
        with self.meter.save(step, f"step-{step}", {}):
            self.clock.advance(seconds)
            raise SaveError("refused")

    def run(self, steps: int, every: int, after: Callable[[int], None] = lambda step: None) -> CostMeter:
        for step in range(1, steps + 1):
            self.train(step)
            self.meter.step(step)
            if step % every == 0:
                self.save(step)
            after(step)
        return self.meter


def costs(meter: CostMeter) -> Any:
    assert meter.costs is not None
    return meter.costs


def test_the_costs_of_a_steady_training_are_found():
    training = Training()
    found = costs(training.run(545, 50))
    assert found.saves == 10
    assert found.stall == pytest.approx(0.05)
    assert found.durable == pytest.approx(2.05)
    assert found.slowdown == pytest.approx(2.0 * (1 - 1 / 1.3), rel=0.02)
    assert found.step == pytest.approx(0.1)
    assert found.uploaded is None
    assert found.lost == pytest.approx(training.lost, rel=0.02)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "training",
    [
        {"noise": 0.1},
        {"noise": 0.2, "durable": 1.0},
        {"noise": 0.1, "seconds": lambda step: 0.1 * (1 + step / 1000)},  # steps become three times as long
        {"noise": 0.1, "seconds": lambda step: 0.2 / (1 + step / 1000)},
        {"noise": 0.1, "seconds": lambda step: 0.1 if step % 4 else 0.25},  # gradients exchanged
        {"noise": 0.1, "seconds": lambda step: 0.1 if step < 1000 else 0.2},
        {"noise": 0.1, "factor": 4.0, "durable": 0.5},
        {"noise": 0.1, "factor": 1.0, "stall": 0.5},
        {"noise": 0.05, "seconds": lambda step: 0.001, "durable": 0.05, "stall": 0.002},
        {"noise": 0.1, "seconds": lambda step: 8.0, "durable": 6.0},  # few steps for each save
    ],
)
def test_what_was_lost_is_right_within_a_few_percent(training, seed):
    run = Training(**training, seed=seed)
    found = costs(run.run(2020, 50))
    elapsed = run.clock() - run.started
    assert found.lost == pytest.approx(run.lost, rel=0.1, abs=0.0015 * elapsed)


@pytest.mark.parametrize("pause", [1.0, 30.0, 500.0])
@pytest.mark.parametrize("every", [7, 45, 100])
def test_a_pause_of_the_training_is_no_slowdown(pause, every):
    """An evaluation, a stall of the data, the end of an epoch: in flight of a save or not."""
    run = Training(noise=0.05)
    found = costs(run.run(1020, 50, lambda step: None if step % every else run.rest(pause)))
    assert found.slowdown <= 2.0 * (1 - 1 / 1.3) * 1.2
    assert found.lost <= run.lost * 1.1


def test_an_evaluation_that_looks_for_preemptions_is_left_out_however_short():
    run = Training()

    def evaluate(step: int) -> None:
        if step % 50 == 0:
            run.rest(0.3)
            run.meter.pause()

    found = costs(run.run(545, 50, evaluate))
    # The rest of the step that the evaluation has interrupted is left out, too.
    assert (1.7 - 0.13) * (1 - 1 / 1.3) - 0.001 <= found.slowdown <= 1.7 * (1 - 1 / 1.3)


def test_a_step_that_is_decided_again_after_an_evaluation_begins_a_new_lap():
    run = Training()

    def evaluate(step: int) -> None:
        if step % 50 == 3:
            run.rest(0.3)
            run.meter.step(step)

    assert costs(run.run(545, 50, evaluate)).slowdown == pytest.approx(1.7 * (1 - 1 / 1.3), rel=0.05)


def test_decisions_after_several_steps_count_by_steps():
    run = Training(seconds=lambda step: 0.1 * 5)
    for number in range(1, 200):
        run.train(number)
        run.meter.step(5 * number)
        if number % 20 == 0:
            run.save(5 * number)
    assert costs(run.meter).step == pytest.approx(0.1)
    assert costs(run.meter).slowdown == pytest.approx(2.0 * (1 - 1 / 1.3), rel=0.1)


def test_saves_one_after_another_are_compared_with_what_was_known_before():
    """As with `Continuous`: no step is without a save in flight, and steps become twice as long."""
    run = Training(seconds=lambda step: 0.1 if step < 300 else 0.2, durable=1.0)
    for step in range(1, 1001):
        run.train(step)
        run.meter.step(step)
        if step > 30 and not run.meter.in_flight:
            run.save(step)
    found = costs(run.meter)
    assert found.saves > 80
    assert found.lost == pytest.approx(run.lost, rel=0.1)


def test_without_one_step_to_compare_with_no_slowdown_is_claimed():
    run = Training(noise=0.2)
    for step in range(1, 200):
        run.train(step)
        run.meter.step(step)
        run.save(step)
    found = costs(run.meter)
    assert found.slowdown == 0.0
    assert found.stall == pytest.approx(run.lost / 199, rel=0.3)


def test_the_wait_of_an_optimizer_step_for_copies_is_slowdown_of_the_save():
    """However long it is: it is measured, and needs no comparison."""
    run = Training(factor=1.0, durable=1.0)
    for step in range(1, 201):
        if run.in_flight and step % 50 == 1:
            run.rest(3.0)
            run.work.waited_seconds += 3.0
            run.lost += 3.0
        run.train(step)
        run.meter.step(step)
        if step % 50 == 0:
            run.save(step)
    found = costs(run.meter)
    assert found.slowdown == pytest.approx(3.0, rel=0.01)


def test_calls_that_wait_for_the_save_in_flight_are_its_stall():
    run = Training(durable=1.0)
    for step in range(1, 101):
        run.train(step)
        run.meter.step(step)
        if step % 20 == 0:
            run.save(step)
            with run.meter.wait():
                run.clock.advance(1.0)
                run.land()
    assert costs(run.meter).stall == pytest.approx(1.05)
    assert costs(run.meter).slowdown == 0.0


def test_back_pressure_is_stall():
    run = Training(durable=10.0, factor=1.0)
    found = costs(run.run(1000, 50))
    assert found.stall == pytest.approx(10.0 - 50 * 0.1 + 0.05, rel=0.02)
    assert found.lost == pytest.approx(run.lost, rel=0.02)


def test_a_save_that_is_left_out_does_not_end_the_measuring_of_the_one_in_flight():
    run = Training()
    for step in range(1, 546):
        run.train(step)
        run.meter.step(step)
        if run.meter.in_flight:
            with run.meter.save(step, f"step-{step}", {}) as measured:
                measured.skipped = True
        elif step % 50 == 0:
            run.save(step)
    found = costs(run.meter)
    assert found.saves == 10
    assert found.slowdown == pytest.approx(2.0 * (1 - 1 / 1.3), rel=0.05)


def test_one_save_is_reported_once_with_what_it_cost():
    run = Training()
    run.run(100, 50)
    (event,) = run.sink.finished("save.cost")
    assert event.attributes == {
        "step": 50,
        "name": "step-50",
        "reason": "every 50 steps",
        "stall_seconds": pytest.approx(0.05),
        "slowdown_seconds": pytest.approx(2.0 * (1 - 1 / 1.3), rel=0.05),
        "durable_seconds": pytest.approx(2.05),
        "uploaded_seconds": None,
        "size_bytes": 123,
        "overhead": pytest.approx((0.05 + 2.0 * (1 - 1 / 1.3)) / (run.clock() - run.started), rel=0.4),
        "outcome": "committed",
        "began": pytest.approx(time.time(), abs=600),
    }
    run.land()
    run.meter.close()
    run.meter.close()
    assert [each.attributes["step"] for each in run.sink.finished("save.cost")] == [50, 100]


def test_a_rank_that_is_not_the_coordinator_measures_and_reports_nothing():
    run = Training(coordinator=Rank(1))
    assert costs(run.run(545, 50)).saves == 10
    assert run.sink.events == []


def test_saves_that_fail_or_are_left_out_are_reported_and_their_time_is_lost():
    run = Training(factor=1.0)
    run.train(1)
    run.meter.step(1)
    run.save(1)
    run.land(SaveError("the disk is full"))
    with run.meter.save(2, "step-2", {}) as measured:
        run.clock.advance(0.25)
        measured.skipped = True
    with pytest.raises(SaveError):
        run.fail(3, 0.5)
    run.meter.close()
    events = [each.attributes for each in run.sink.finished("save.cost")]
    assert [(e["step"], e["outcome"], e["durable_seconds"], e["size_bytes"]) for e in events] == [
        (1, "failed", None, None),
        (2, "skipped", None, None),
        (3, "failed", None, None),
    ]
    assert [e["stall_seconds"] for e in events] == pytest.approx([0.05, 0.25, 0.5])
    assert events[-1]["overhead"] == pytest.approx(0.8 / (run.clock() - run.started))
    assert run.meter.costs is None


def test_the_same_save_asked_for_twice_is_one_save():
    run = Training()
    run.train(1)
    run.meter.step(1)
    run.save(1)
    with run.meter.save(1, "step-1", {}) as measured:
        run.clock.advance(0.5)
        measured.handle = run.handle
    run.land()
    run.meter.close()
    (event,) = run.sink.finished("save.cost")
    assert event.attributes["stall_seconds"] == pytest.approx(0.55)


def test_an_upload_is_part_of_the_save_until_it_is_there():
    run = Training(factor=1.0, durable=1.0)
    uploads: list[Future[CheckpointInfo | None]] = []
    for step in range(1, 200):
        run.train(step)
        if uploads and step % 50 == 30:
            uploads[-1].set_result(INFO)
        run.meter.step(step)
        if step % 50 == 0:
            with run.meter.save(step, f"step-{step}", {}) as measured:
                handle = measured.handle = run.handle = SaveHandle(step, f"step-{step}", 0.0)
                handle.uploaded = Future()
                uploads.append(handle.uploaded)
                run.ends = run.clock() + 1.0
        if step % 50 == 29 and uploads:
            assert len(run.sink.finished("save.cost")) == len(uploads) - 1
    found = costs(run.meter)
    assert found.durable == pytest.approx(1.0)
    assert found.uploaded == pytest.approx(3.0)


def test_an_upload_that_never_ends_does_not_keep_saves_from_being_reported():
    run = Training(factor=1.0, durable=1.0)
    for step in range(1, 1001):
        run.train(step)
        run.meter.step(step)
        if step % 50 == 0:
            with run.meter.save(step, f"step-{step}", {}) as measured:
                handle = measured.handle = run.handle = SaveHandle(step, f"step-{step}", 0.0)
                handle.uploaded = Future()
                run.ends = run.clock() + 1.0
    assert len(run.sink.finished("save.cost")) >= 10
    assert costs(run.meter).uploaded is None


@pytest.mark.parametrize("fraction", [0.005, 0.01, 0.05])
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"noise": 0.1},
        {"noise": 0.1, "stall": 1.0},
        {"noise": 0.1, "stall": 0.001, "factor": 1.5, "durable": 5.0},
    ],
)
def test_the_share_of_time_that_may_be_lost_is_lost(fraction, training):
    """The policy, the keeper and the meter together: the bar is 20 %, and never 1.5 times."""
    run = Training(**training)
    keeper = CadenceKeeper(
        AtSteps([1]) | MaxOverhead(fraction), run.coordinator, run.clock, measured=run.meter
    )
    for step in range(1, 20_001):
        run.train(step)
        run.meter.step(step)
        if (reason := keeper.due(step)) is not None:
            run.save(step, reason)
            keeper.saved(step)
    assert run.lost / (run.clock() - run.started) == pytest.approx(fraction, rel=0.2)


@pytest.mark.parametrize(("decision", "least_saves"), [(0.0, 24), (0.004, 24), (0.03, 10)])
def test_decisions_are_part_of_what_may_be_lost_and_never_end_the_saves(decision, least_saves):
    """A decision takes that part of a step; with 0.03 decisions alone lose more than is allowed."""
    run, saves = Training(), 0
    keeper = CadenceKeeper(AtSteps([1]) | MaxOverhead(0.01), run.coordinator, run.clock, measured=run.meter)
    for step in range(1, 20_001):
        run.train(step)
        run.meter.step(step)
        reason = keeper.due(step)
        run.clock.advance(decision * run.seconds(step))
        run.lost += decision * run.seconds(step)
        run.meter.decided()
        if reason is not None:
            saves += 1
            run.save(step, reason)
            keeper.saved(step)
    lost = run.lost / (run.clock() - run.started)
    assert costs(run.meter).lost == pytest.approx(run.lost, rel=0.1)
    assert saves >= least_saves
    if decision < 0.01:
        assert lost == pytest.approx(0.01, rel=0.2)
    else:
        assert lost < decision + 0.0075  # of the saves half of what is allowed, or little more


def test_steps_of_the_optimizer_stand_in_where_nobody_decides():
    """As with `save_state` called without a policy."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Training()
    run.work.optimizers = (optimizer,)
    for step in range(1, 546):
        run.train(step)
        optimizer.step()
        if step % 50 == 0:
            run.save(step)
    found = costs(run.meter)
    assert found.slowdown == pytest.approx(2.0 * (1 - 1 / 1.3), rel=0.05)
    assert found.lost == pytest.approx(run.lost, rel=0.05)
    run.land() if run.in_flight else None
    run.meter.close()
    assert not optimizer._optimizer_step_post_hooks
