"""The benchmarks of a cadence that decides itself compute what they say."""

from __future__ import annotations

import random

import pytest

from benchmarks.cadence.kills import Schedule
from benchmarks.cadence.share import Lap, Laps


def test_what_saves_cost_is_found_among_the_noise_of_steps():
    chance, laps, lost = random.Random(0), Laps(), 0.0
    drift = 1.0
    for number in range(20_000):
        drift *= chance.uniform(0.9995, 1.0005)  # the machine becomes faster and slower
        step = 0.01 * drift * chance.lognormvariate(0.0, 0.1)
        in_flight = number % 100 < 5
        lost += 0.0001 + 0.4 * step * in_flight
        laps.laps.append(Lap(step * (1.4 if in_flight else 1.0), 0.0001, in_flight))
    found, error = laps.lost()
    assert found == pytest.approx(lost, rel=0.1)
    assert abs(found - lost) < 3 * error < 0.1 * lost
    assert laps.seconds == pytest.approx(0.01 * 20_000, rel=0.2)


def test_every_contender_is_killed_at_the_same_moments():
    schedule = Schedule(number=2000, mtbf=4.0, seed=1)
    assert schedule.lives() == schedule.lives()
    assert sum(schedule.lives()) / 2000 == pytest.approx(4.0, rel=0.1)
    assert schedule.lives() != Schedule(number=2000, mtbf=4.0, seed=2).lives()
