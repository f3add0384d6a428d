"""The benchmarks of a cadence that decides itself compute what they say."""

from __future__ import annotations

import random

import pytest

from benchmarks.cadence.kills import Schedule
from benchmarks.cadence.share import PausableClock, Turns


def test_what_saves_cost_is_found_among_the_noise_of_steps():
    chance, turns, lost = random.Random(0), Turns(), 0.0
    drift = 1.0
    for number in range(20_000):
        drift *= chance.uniform(0.9995, 1.0005)  # the machine becomes faster and slower
        ours, twin = (0.01 * drift * chance.lognormvariate(0.0, 0.1) for _ in range(2))
        if number % 100 < 5:
            turns.busy.append((len(turns.pairs), ours * 1.4))
            lost += ours * 0.4
        else:
            turns.pairs.append((ours, twin))
    found, error, decisions = turns.lost()
    assert found == pytest.approx(lost, rel=0.2)
    assert abs(found - lost) < 3 * error < lost
    assert abs(decisions) < 3 * error
    assert turns.training == pytest.approx(0.01 * 20_000, rel=0.2)


def test_every_contender_is_killed_at_the_same_moments():
    schedule = Schedule(number=2000, mtbf=4.0, seed=1)
    assert schedule.lives() == schedule.lives()
    assert sum(schedule.lives()) / 2000 == pytest.approx(4.0, rel=0.1)
    assert schedule.lives() != Schedule(number=2000, mtbf=4.0, seed=2).lives()


def test_no_time_passes_for_the_manager_while_its_twin_trains():
    clock = PausableClock()
    began = clock()
    with clock.paused():
        sum(range(2_000_000))
    assert clock() - began < 0.01
