"""A month of saves through the real policies: what is kept, and what it costs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, final

from ckpt_core.cadence import CadenceContext, FailureRate, SaveCosts, SavePolicy, decide
from ckpt_core.errors import ConfigError
from ckpt_core.planning._known_storages import StorageProfile
from ckpt_core.planning._numbers import MONTH
from ckpt_core.retention import RetentionPolicy, plan_prune, unknown_metrics
from ckpt_core.types import CheckpointInfo

GB: Final = 1e9
_MOST_STEPS: Final = 1_000_000
_MOST_SAVES: Final = 300_000
_GRAIN: Final = 32
"""Large histories are pruned when they have grown by one part in so many: 3 % too much at the most."""


class PlannedSave(NamedTuple):
    """One save of the month: its step, and its time in seconds."""

    step: int
    time: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeptMonth:
    """What a retention policy keeps of a month.

    Attributes:
        policy: for users.
        at_end: checkpoints kept when the month ends.
        peak: most checkpoints at the same time, the one just saved included.
        mean: checkpoints kept on average over the month.
    """

    policy: str
    at_end: int
    peak: int
    mean: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionCost:
    """What one retention policy costs in a month.

    Attributes:
        kept: checkpoints.
        peak_bytes: most bytes at the same time.
        mean_bytes: bytes kept on average over the month.
        storage_dollars: for keeping them.
        request_dollars: for the requests of saves and restores.
        egress_dollars: for the bytes of restores.
    """

    kept: KeptMonth
    peak_bytes: float
    mean_bytes: float
    storage_dollars: float
    request_dollars: float
    egress_dollars: float


def saves_at(interval: float, step_seconds: float) -> list[PlannedSave]:
    """List the saves of a month at a fixed interval.

    Raises:
        ConfigError: there are too many.
    """
    count = int(MONTH / interval)
    _refuse_too_many(count)
    times = [number * interval for number in range(1, count + 1)]
    return [PlannedSave(max(round(time / step_seconds), 1), time) for time in times]


def _refuse_too_many(count: int) -> None:
    if count > _MOST_SAVES:
        raise ConfigError(
            f"these are more than the {_MOST_SAVES:,} saves of a month that a plan goes through: give a "
            "longer interval, such as --save 60s"
        )


def saves_of(policy: SavePolicy, costs: SaveCosts, failures: FailureRate) -> list[PlannedSave]:
    """List the saves of a month that a policy decides on, step by step.

    Args:
        policy: when to save.
        costs: of one save, and the seconds of a step.
        failures: of the job.

    Raises:
        ConfigError: the policy needs what a plan does not know, or steps are too short.
    """
    if MONTH / costs.step > _MOST_STEPS:
        raise ConfigError(
            f"a month has more than {_MOST_STEPS:,} steps of {costs.step:g} s: give --step-seconds, or an "
            "interval in seconds: --save 30m"
        )
    if policy.counts:
        named = ", ".join(sorted(policy.counts))
        raise ConfigError(f"--save: the policy counts {named}, which a plan does not know: give an interval")
    found = list(islice(_decided(policy, costs, failures), _MOST_SAVES + 1))
    _refuse_too_many(len(found))
    return found


def _decided(policy: SavePolicy, costs: SaveCosts, failures: FailureRate) -> Iterator[PlannedSave]:
    last: PlannedSave | None = None
    cost, made = costs.stall + costs.slowdown, 0
    known: SaveCosts | None = None  # until the first save, as in a job
    step, now = 0, 0.0
    while now + costs.step <= MONTH:
        step, now = step + 1, now + costs.step
        context = CadenceContext(
            step=step,
            now=now,
            started=0.0,
            previous_step=step - 1 if step > 1 else None,
            last_save_step=None if last is None else last.step,
            last_save_time=None if last is None else last.time,
            costs=known,
            failures=failures,
            in_flight=last is not None and now < last.time + costs.durable,
        )
        if decide(policy, context) is not None:
            last = PlannedSave(step, now)
            now, made = now + cost, made + 1
            known = costs._replace(lost=made * cost, saves=made)
            yield last


def kept_of(policy: RetentionPolicy, name: str, saves: Sequence[PlannedSave]) -> KeptMonth:
    """Prune after every save of the month, as a job does, and count what is kept.

    Metrics that the policy ranks by are random: each checkpoint is as likely to be the best.
    """
    metrics = unknown_metrics(policy, ())
    chance = random.Random(0)
    held: list[CheckpointInfo] = []
    area, peak, before, due = 0.0, 0, 0.0, 1
    for save in saves:
        area += len(held) * (save.time - before)
        before = save.time
        values = {metric: chance.random() for metric in metrics}
        held.append(CheckpointInfo(step=save.step, name=str(save.step), created=save.time, metrics=values))
        peak = max(peak, len(held))
        if len(held) >= due:
            dropped = {info.step for info in plan_prune(policy, held, save.time).drop}
            held = [info for info in held if info.step not in dropped] if dropped else held
            due = len(held) + 1 + len(held) // _GRAIN
    area += len(held) * max(MONTH - before, 0.0)
    return KeptMonth(policy=name, at_end=len(held), peak=peak, mean=area / MONTH)


def retention_cost(
    keep: tuple[str, RetentionPolicy],
    storage: StorageProfile,
    saves: Sequence[PlannedSave],
    *,
    restores: float,
    size_bytes: int,
    restored_bytes: int,
) -> RetentionCost:
    """Count what a policy, with its text, keeps of the saves that come to a storage."""
    kept = kept_of(keep[1], keep[0], saves)

    def parts(size: int) -> int:
        return math.ceil(size / storage.part_bytes) if storage.part_bytes else 0

    puts, gets = parts(size_bytes) * len(saves), parts(restored_bytes) * restores
    return RetentionCost(
        kept=kept,
        peak_bytes=float(kept.peak) * size_bytes,
        mean_bytes=kept.mean * size_bytes,
        storage_dollars=kept.mean * size_bytes / GB * storage.gb_month,
        request_dollars=(puts * storage.put_price + gets * storage.get_price) / 1000,
        egress_dollars=restores * restored_bytes / GB * storage.egress,
    )
