"""The learned rate of failures, against its closed form."""

from __future__ import annotations

import math
import random

import pytest

from ckpt_core.journal import PRIOR, Prior, failure_rate
from ckpt_core.journal._records import record

HOUR = 3600.0


def ended(event, seconds, devices, **fields):
    own = {"event": event, "seconds": seconds, "devices": devices, **fields}
    return record("run", 1.0, f"{event}{seconds}", own)


@pytest.mark.parametrize("devices", [1, 8, 16_384])
def test_without_a_history_it_is_the_published_rate_for_this_many_devices(devices):
    rate = failure_rate([], devices)
    assert math.isclose(rate.mtbf, 50_700 * HOUR / devices)


def test_the_prior_is_that_of_llama_3_within_a_hundredth():
    published = 54 * 24 * 16_384 / 419  # hours of a GPU between two interruptions
    assert math.isclose(PRIOR.device_seconds / HOUR, published, rel_tol=0.01)


@pytest.mark.parametrize("failures", [0, 1, 2, 30])
@pytest.mark.parametrize("weight", [0.02, 1.0, 5.0])
def test_it_is_the_mean_of_the_posterior(failures, weight):
    devices, exposure, prior = 8, 41 * HOUR * 8, Prior(50_700 * HOUR, weight)
    history = [ended("unclean", 41 * HOUR / 31, 8) for _ in range(failures)]
    history += [ended("end", 41 * HOUR / 31, 8) for _ in range(31 - failures)]
    shape, rate = weight + failures, weight * 50_700 * HOUR + exposure
    assert math.isclose(failure_rate(history, devices, prior=prior).mtbf, rate / shape / devices)


def test_exposure_on_other_numbers_of_devices_counts_by_device():
    few = failure_rate([ended("unclean", 64 * HOUR, 1)], 4)
    many = failure_rate([ended("unclean", HOUR, 64)], 4)
    assert math.isclose(few.mtbf, many.mtbf)


def test_much_of_its_own_history_outweighs_the_prior():
    history = [ended("unclean", 2 * HOUR, 8) for _ in range(100)]
    assert math.isclose(failure_rate(history, 8).mtbf, 2 * HOUR, rel_tol=0.65)
    # The interval follows the root of it.
    assert math.isclose(math.sqrt(failure_rate(history, 8).mtbf), math.sqrt(2 * HOUR), rel_tol=0.3)


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (ended("end", 10.0, 1, lost_steps=3), False),
        (ended("unclean", 10.0, 1, lost_steps=0), True),
        (ended("unclean", 0.0, 1, lost_steps=1), False),
        (ended("unclean", None, 1), False),
        (ended("preempted", 10.0, 1, lost_steps=0), False),
        (ended("preempted", 10.0, 1, lost_steps=7), True),
        (ended("resume", 10.0, 1, lost_steps=7), False),
        (ended("start", None, 1), False),
        (ended("unclean", -5.0, 1), False),
    ],
)
def test_what_counts_as_a_failure(end, counts):
    assert failure_rate([end], 1).source.startswith("1 failure in" if counts else "0 failures in")


def test_it_tells_its_numbers():
    history = [ended("unclean", 20 * HOUR, 8), ended("unclean", 21 * HOUR, 8)]
    source = failure_rate(history, 8).source
    assert source == "2 failures in 41 h of this root, prior 1 in 50,700 h of a GPU, 8 devices"
    assert failure_rate([ended("end", 90.0, 1)], 1).source.startswith("0 failures in 0.025 h of")


@pytest.mark.parametrize("devices", [0, -1])
def test_a_job_has_a_device_at_least(devices):
    assert failure_rate([], devices).mtbf == failure_rate([], 1).mtbf


@pytest.mark.parametrize("too_long", [0.1, 1.0, 10.0, 100.0, 1000.0])
def test_learning_costs_at_most_a_fiftieth_of_the_goodput(too_long):
    """The table of docs/measurements.md, by the estimate itself."""
    chance, true, stall = random.Random(7), 6 * HOUR, 5.0
    prior = PRIOR._replace(device_seconds=too_long * true)
    best = math.sqrt(2 * stall * true)
    trained = lost = lost_at_best = 0.0
    for _ in range(150):
        history = []
        for _ in range(20):
            interval = math.sqrt(2 * stall * failure_rate(history, 1, prior=prior).mtbf)
            lived = chance.expovariate(1 / true)
            trained += lived
            lost += lived / interval * stall + lived % interval
            lost_at_best += lived / best * stall + lived % best
            history.append(ended("unclean", lived, 1))
    assert (trained - lost) / (trained - lost_at_best) >= 0.975
