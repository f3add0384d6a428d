"""The end of a job is planned: the last save begins early enough by what saves have cost."""

from __future__ import annotations

import logging
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, EverySteps, OnPreemption, Upload
from ckpt_core.coordination import Solo
from ckpt_core.policies import SaveCosts
from ckpt_core.preemption import CadenceKeeper
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.preemption.test_measured_costs import Measured, OneOfTwo

COSTS = SaveCosts(stall=1.0, slowdown=0.0, durable=1000.0, uploaded=3000.0, saves=3, lost=3.0, step=10.0)
PLANNED = 2 * (1000 + 10) + 1 + 10
"""Seconds for a last save of these costs: twice a save and a step, the agreement, the end of the program."""
SLACK = 100.0
"""More than a test takes."""
ends = [0.0]


def moment() -> float | None:
    return ends[0] or None


@pytest.fixture(autouse=True)
def _unknown_end():
    ends[0] = 0.0


def stopped(deadline: object, costs: SaveCosts | None = COSTS, **facts: object) -> bool:
    """Whether the job is to stop at its second step, with costs that all ranks know by then."""
    upload = facts.pop("upload_seconds", 0.0)
    measured = Measured(costs, **facts)
    cadence = CadenceKeeper(OnPreemption((), deadline=deadline), Solo(), measured=measured)
    cadence.upload_seconds = upload
    try:
        cadence.due(1)
        if costs is not None:
            assert not cadence.preempted, "costs are known from the first decision on"
        cadence.due(2)
        return cadence.preempted
    finally:
        cadence.close()


def as_slurm(monkeypatch: pytest.MonkeyPatch, seconds: float) -> str:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + seconds)))
    return "slurm"


KINDS = {
    "seconds": lambda _, seconds: seconds,
    "text": lambda _, seconds: f"{seconds:.0f}s",
    "duration": lambda _, seconds: timedelta(seconds=seconds),
    "moment": lambda _, seconds: datetime.now(UTC) + timedelta(seconds=seconds),
    "local moment": lambda _, seconds: datetime.now() + timedelta(seconds=seconds),  # noqa: DTZ005
    "slurm": as_slurm,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_stops_when_the_time_left_is_what_its_last_save_needs(kind, monkeypatch):
    assert stopped(KINDS[kind](monkeypatch, PLANNED))
    assert not stopped(KINDS[kind](monkeypatch, PLANNED + SLACK))


@pytest.mark.parametrize(
    ("facts", "needed"),
    [
        ({"in_flight": True}, PLANNED + 2 * 1000),
        ({"upload_seconds": 600.0}, PLANNED),  # by then the uploads are left, and the save took longer
        ({"upload_seconds": 9000.0}, PLANNED + 2 * 2000),
        ({"costs": COSTS._replace(durable=10.0)}, PLANNED - 2 * 990),
    ],
    ids=["save in flight", "upload that is not waited for", "upload", "cheap save"],
)
def test_a_save_in_flight_and_an_upload_that_is_waited_for_are_planned_too(facts, needed):
    assert stopped(needed, **facts)
    assert not stopped(needed + SLACK, **facts)


def test_before_a_save_was_measured_a_fixed_time_is_planned_and_at_most_a_quarter_of_the_job(monkeypatch):
    assert stopped(as_slurm(monkeypatch, 10.0), costs=None)
    assert not stopped(100.0, costs=None)
    assert not stopped(4000.0, costs=None)


def test_a_function_is_asked_on_a_thread_and_may_not_know_the_end_yet():
    cadence = CadenceKeeper(OnPreemption((), deadline=moment), Solo(), measured=Measured(COSTS))
    cadence.due(1)
    assert not cadence.preempted
    ends[0] = time.time() + 5
    until = time.monotonic() + 30
    step = 1
    while not cadence.preempted and time.monotonic() < until:
        step += 1
        cadence.due(step)
    cadence.close()
    assert cadence.preempted


def test_a_deadline_can_be_the_only_announcement_and_signals_stay_the_users():
    before = signal.getsignal(signal.SIGTERM)
    cadence = CadenceKeeper(OnPreemption((), deadline=9e7), Solo(), measured=Measured())
    assert signal.getsignal(signal.SIGTERM) is before
    cadence.close()


def test_the_clock_of_the_coordinator_counts_alone():
    ending = OnPreemption((), deadline=1.0)
    follower = CadenceKeeper(ending, OneOfTwo(1), measured=Measured(COSTS))
    follower.due(1)
    assert not follower.preempted
    lead = OneOfTwo(0)
    CadenceKeeper(ending, lead, measured=Measured(COSTS)).due(1)
    follower = CadenceKeeper(ending, OneOfTwo(1, lead.sent), measured=Measured(COSTS))
    assert follower.due(1) == "preemption"


def test_a_run_that_continues_plans_by_the_costs_of_the_one_before():
    first = CadenceKeeper(OnPreemption((), deadline=9e7), Solo(), measured=Measured(COSTS))
    first.due(1)
    second = CadenceKeeper(OnPreemption((), deadline=PLANNED), Solo(), measured=Measured())
    second.count_from(lambda: first.annotations)
    second.due(2)
    assert second.preempted


@pytest.mark.parametrize(
    "wrong", ["tomorrow", "", 0, -5, float("nan"), True, timedelta(0), b"12h", "slurm:"], ids=repr
)
def test_what_is_no_end_of_a_job_is_refused(wrong):
    with pytest.raises(ConfigError, match="deadline must be"):
        OnPreemption(deadline=wrong)


def test_a_time_since_the_epoch_is_no_number_of_seconds_from_the_start():
    with pytest.raises(ConfigError, match=r"datetime.fromtimestamp\(1800000000.0\)"):
        OnPreemption(deadline=1.8e9)


def test_a_save_that_goes_on_has_no_deadline():
    with pytest.raises(ConfigError, match="stop=False goes on"):
        OnPreemption(deadline="slurm", stop=False)


def test_a_deadline_is_written_as_plain_values():
    options = CheckpointOptions.from_mapping({"save": {"on_preemption": {"deadline": "12h"}}})
    assert options.save == OnPreemption(deadline=timedelta(hours=12)) == OnPreemption(deadline=43200)


def test_without_slurm_the_run_says_so_and_goes_on(monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert not stopped("slurm")
    assert "SLURM_JOB_END_TIME is not set" in caplog.text


def test_an_upload_that_cannot_end_in_time_is_left_to_the_next_run_and_told(tmp_path, caplog):
    """The root alone has the last save; a tier that hangs takes no more than what is left."""
    tier = FaultyStorage(LocalStorage(tmp_path / "tier"), [Fault(method="create", error=OSError("down"))])
    policy = EverySteps(5) | OnPreemption((), deadline=moment)
    caplog.set_level(logging.WARNING)
    began = time.monotonic()
    with CheckpointManager(
        tmp_path / "run", save=policy, upload=Upload(tier, deadline_seconds=500)
    ) as manager:
        ends[0] = time.time() + 12
        step = 0
        while not manager.preempted and time.monotonic() - began < 60:
            step += 1
            manager.maybe_save(step, {"weight": torch.ones(4)})
    assert manager.preempted
    assert time.monotonic() - began < 100
    assert "not yet in" in caplog.text
    with CheckpointManager(tmp_path / "run") as again:
        assert again.latest().step == step
