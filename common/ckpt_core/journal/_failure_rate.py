"""How often a job fails: a Gamma prior, updated by what its root has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from ckpt_core.cadence import FailureRate
from ckpt_core.journal._history import Experience, experience_of
from ckpt_core.journal._records import Record

_HOUR: Final = 3600.0


class Prior(NamedTuple):
    """A Gamma distribution of failures per second of a device.

    Attributes:
        device_seconds: from one failure to the next, on one device.
        weight: how many failures it counts as, its shape; its rate is `weight * device_seconds`.
    """

    device_seconds: float
    weight: float


PRIOR: Final = Prior(device_seconds=50_700 * _HOUR, weight=0.02)
"""Llama 3: 419 interruptions in 54 days on 16,384 GPUs; see docs/journal.md for the weight."""


def failure_rate(history: Sequence[Record], devices: int, *, prior: Prior = PRIOR) -> FailureRate:
    """Estimate the mean time between failures of a job.

    The posterior mean of the rate is (weight + failures) / (weight * device_seconds + exposure), where the
    exposure is in seconds of training times devices. It minimises the expected cost of an interval, which is
    linear in the rate.

    Args:
        history: as `read_history` returns it.
        devices: of the job.
        prior: what is believed without a history.
    """
    seen = experience_of(history)
    rate = (prior.weight + seen.failures) / (prior.weight * prior.device_seconds + seen.device_seconds)
    devices = max(1, devices)
    return FailureRate(mtbf=1.0 / (rate * devices), source=_source(seen, devices, prior))


def _source(seen: Experience, devices: int, prior: Prior) -> str:
    failures = f"{seen.failures} failure{'' if seen.failures == 1 else 's'}"
    hours = math.floor(prior.device_seconds / _HOUR)
    many = f"{devices} device{'' if devices == 1 else 's'}"
    return f"{failures} in {_hours(seen.seconds)} h of this root, prior 1 in {hours:,} h of a GPU, {many}"


def _hours(seconds: float) -> str:
    hours = seconds / _HOUR
    return f"{hours:.0f}" if hours >= 10 or hours == 0 else f"{hours:.2g}"
