"""What the records of runs mean: which died, what was lost, what is summed up."""

from __future__ import annotations

import random

import pytest

from ckpt_core.journal._history import (
    compact,
    experience_of,
    loss,
    merge,
    seconds_at,
    trail_of,
    unclean,
    without_end,
)
from ckpt_core.journal._records import decode, encode, record
from ckpt_core.journal._run_log import RunLog, Training
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


def test_copies_that_lack_records_make_one_history():
    a, b, c = life("a", 1.0), life("b", 2.0), life("c", 3.0)
    assert merge([[*a, *c], [*a, *b]]) == [*a, *b, *c]
    assert merge([[], [*a]]) == a
    assert merge([]) == []


def test_the_newest_summary_counts_and_nothing_counts_twice():
    lives = [each for number in range(300) for each in life(f"r{number}", float(number))]
    once = compact(lives, most=400, left=200)
    twice = compact(
        [*once, *(e for n in range(300, 500) for e in life(f"r{n}", float(n)))], most=400, left=200
    )
    stale_copies = [lives, once, twice, lives[:10]]
    assert merge(stale_copies) == twice
    assert experience_of(twice).seconds == 500 * 10.0


@pytest.mark.parametrize("seed", range(5))
def test_a_summary_loses_no_count_and_no_run_without_an_end(seed):
    chance, history, time = random.Random(seed), [], 0.0
    for number in range(400):
        time += chance.choice([0.0, 1.0])
        lived = life(f"r{number}", time, chance.choice(["end", "unclean", "preempted"]))
        history += lived if chance.random() < 0.99 else lived[:1]
    history.sort(key=lambda each: each["time"])
    found = compact(history, most=400, left=200)
    assert len(found) < len(history)
    assert len(compact(found, most=400, left=200)) <= max(400, len(found))
    assert experience_of(found) == experience_of(history)
    assert {e["run"] for e in without_end(found)} == {e["run"] for e in without_end(history)}
    summary = found[0]
    ends = [each for each in history if each["event"] != "start"]
    kept = [each for each in found[1:] if each["event"] != "start"]
    assert summary["runs"] + len(kept) == len(ends)
    assert summary["lost_steps"] + sum(each["lost_steps"] for each in kept) == len(ends)
    assert decode(encode(found)) == found


def test_a_short_history_is_left_alone():
    history = life("a", 1.0)
    assert compact(history) == history


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
