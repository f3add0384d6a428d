"""The upload tiers of a plan: when they have a checkpoint, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from ckpt_core.cadence import expected_overhead, optimal_interval
from ckpt_core.planning._known_storages import StorageProfile
from ckpt_core.planning._month import PlannedSave
from ckpt_core.planning._rank_layout import RankLayout
from ckpt_core.retention import KeepAll, RetentionPolicy
from ckpt_core.validation import integer, positive, require


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedUpload:
    """A further tier of the root.

    Attributes:
        name: as given, for users.
        storage: where it is.
        every: each n-th save is uploaded.
        keep: what a prune keeps there.
        keep_text: the same, for users.
        bandwidth: the most bytes per second of one rank; None for no limit.
    """

    name: str
    storage: StorageProfile
    every: int = 1
    keep: RetentionPolicy = field(default_factory=KeepAll)
    keep_text: str = "{all: true}"
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        require(
            f"upload {self.name}",
            integer("every", self.every, minimum=1),
            None if self.bandwidth is None else positive("bandwidth", self.bandwidth),
        )

    def rate(self, layout: RankLayout, source: StorageProfile) -> float:
        """Return bytes per second of all ranks, which read what they send from the root."""
        rates = [self.storage.write_rate(layout), source.read_rate(layout)]
        return min([*rates, *([] if self.bandwidth is None else [self.bandwidth * layout.writers])])


class UploadTimes(NamedTuple):
    """Seconds and rate of the uploads to one tier.

    Attributes:
        upload: of one upload.
        uploaded: from the decision to save until the tier has it.
        rate: bytes per second of all ranks together.
        restore: reading a checkpoint back from there.
    """

    upload: float
    uploaded: float
    rate: float
    restore: float


def uploads_of(saves: Sequence[PlannedSave], every: int, times: UploadTimes) -> list[PlannedSave]:
    """List the uploads of a month, each at the time when the tier has it.

    One runs at a time; of those that wait for it the newest is next, and overtakes the others.
    """
    durable = times.uploaded - times.upload
    found: list[PlannedSave] = []
    free, waiting = 0.0, None
    for save in saves[every - 1 :: every]:
        ready = save.time + durable
        if waiting is not None and free <= ready:
            free += times.upload
            found.append(PlannedSave(waiting.step, free))
            waiting = None
        if free <= ready:
            free = ready + times.upload
            found.append(PlannedSave(save.step, free))
        else:
            waiting = save
    return found


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierLosses:
    """What is lost where failures leave one upload tier only.

    Of so many saves one is uploaded: each `every`-th, or fewer, if an upload takes longer than that.

    Attributes:
        cost: seconds of training time that one save costs.
        times: of uploads.
        every: each n-th save is due.
        mtbf: mean seconds between failures.
        restart: seconds from a failure until training continues.
    """

    cost: float
    times: UploadTimes
    every: int
    mtbf: float
    restart: float

    @property
    def interval(self) -> float:
        """The seconds between saves that `Optimal(tier="upload")` chooses."""
        return optimal_interval(cost=self.cost, durable=self.times.uploaded, mtbf=self.mtbf)

    def overhead(self, interval: float) -> float:
        """Return the share of all time lost at an interval between saves."""
        # As if the saves from one upload to the next were one; the stalls of the others come before it.
        spacing = max(self.every, self.times.upload / interval)
        return expected_overhead(
            spacing * interval,
            cost=spacing * self.cost,
            durable=self.times.uploaded + (spacing - 1) * self.cost,
            mtbf=self.mtbf,
            restart=self.restart,
        )
