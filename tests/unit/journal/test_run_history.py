"""What the records of runs mean: which died, what was lost, what is summed up."""

from __future__ import annotations

import pytest

from ckpt_core.journal._journal import RunLog, Training
from ckpt_core.journal._records import experience_of, loss, record, seconds_at, trail_of, unclean, without_end
from tests.kit.clock import FakeClock


def run(name, event, time, **fields):
    return record("run", time, name, {"event": event, "devices": 2, **fields})


def life(name, time, ending="end", **fields):
    """A run with its start and its end."""
    start = run(name, "start", time, step=0)
    fields = {"seconds": 10.0, "step": 5, "lost_steps": 1, "lost_seconds": 2.0, **fields}
    return [start, run(name, ending, time + 0.5, **fields)]


TRAIL = [(10, 0.0), (12, 4.0), (20, 12.0)]


@pytest.mark.parametrize(
    ("step", "seconds"), [(5, 0.0), (10, 0.0), (11, 2.0), (12, 4.0), (16, 8.0), (20, 12.0), (99, 12.0)]
)
def test_the_time_of_a_step_is_between_those_known(step, seconds):
    assert seconds_at(step, TRAIL) == seconds


def test_after_training_went_back_the_last_time_at_a_step_counts():
    assert seconds_at(15, [(10, 0.0), (20, 10.0), (12, 12.0), (18, 18.0)]) == 15.0


@pytest.mark.parametrize(
    ("resumed", "steps", "seconds"),
    [(20, 0, 0.0), (16, 4, 4.0), (10, 10, 12.0), (None, 10, 12.0), (7, 13, 12.0), (25, 0, 0.0)],
)
def test_lost_is_what_follows_the_checkpoint_resumed(resumed, steps, seconds):
    assert loss(TRAIL, resumed) == {"lost_steps": steps, "lost_seconds": seconds}


def test_a_run_without_steps_loses_nothing():
    assert loss([(3, 0.0)], None) == {"lost_steps": 0, "lost_seconds": 0.0}


def test_the_trail_of_a_run_is_its_own_progress():
    events = [
        record("progress", 1.0, "a", {"step": 12, "training_seconds": 4.0}),
        record("progress", 2.0, "b", {"step": 99, "training_seconds": 9.0}),
        record("progress", 3.0, "a", {"step": 20, "training_seconds": None}),
    ]
    assert trail_of("a", 10, events) == [(10, 0.0), (12, 4.0), (20, 0.0)]


def test_runs_without_an_end_are_found_whatever_ended():
    history = [*life("a", 1.0), run("b", "start", 2.0), *life("c", 3.0, "preempted"), run("d", "start", 4.0)]
    assert [each["run"] for each in without_end(history)] == ["b", "d"]
    (start, _) = without_end(history)
    dead = unclean(start, [(0, 0.0), (4, 2.0)], 3, time=9.0, found_by="e")
    assert (dead["run"], dead["step"], dead["seconds"], dead["lost_steps"]) == ("b", 4, 2.0, 1)
    assert [each["run"] for each in without_end([*history, dead])] == ["d"]


def test_an_end_counts_wherever_it_stands():
    a, b = life("a", 1.0), run("b", "start", 2.0)
    assert without_end([a[1], b, a[0]]) == [b]
    dead = run("b", "unclean", 9.0, seconds=5.0)
    assert without_end([dead, *a, b]) == []
    assert experience_of([dead, *a, b]) == (1, 15.0, 30.0)


@pytest.mark.parametrize("late", [0.0, 0.004, 0.3])
def test_of_a_run_that_dies_at_least_half_is_known(late):
    """However long after a step the journal's thread looks."""
    clock, training = FakeClock(0.0), Training()
    log = RunLog("root", training, clock)
    log.begin("a", 1)
    training.first = (1, clock(), clock())
    clock.advance(late)
    while clock() < 200.0:
        training.last = (1 + round(clock() * 10), clock(), clock())
        log.look(closing=False)
        known = trail_of("a", 0, log.lines)[-1][1]
        assert known >= max(clock() / 2, clock() - 60.0) - 1.1 - late
        clock.advance(0.1)
    assert len(log.lines) < 12
