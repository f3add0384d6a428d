"""A job to simulate: its length, what its saves cost, and how it comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from ckpt_core.cadence import FailureRate
from ckpt_core.validation import duration, integer, positive, require

LearnedRate: TypeAlias = Callable[[int, float], FailureRate]
"""What a run believes when it begins: failures so far, seconds of training so far -> rate."""

_MOST_SPREAD: Final = 100
STEPS_TO_MEASURE: Final = 8
"""Steps after a save is durable until a manager knows what it cost."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """A training, its saves and its failures, in seconds.

    Attributes:
        work: training time without a save or a failure.
        step: of that, one step.
        stall: a save blocks training for so long.
        slowdown: further training time lost while one save is in flight.
        durable: from the decision to save until the root has the checkpoint.
        uploaded: until the upload tier has it; None without one.
        node_loss: the share of failures that lose the root, so that only the upload tier is left.
        spread: by which factor two of three saves cost at most more, or less, than the medians above; 1 for
            none. What one costs is drawn from a logarithmic normal distribution.
        down: from a failure until the job runs again.
        restore: to load the checkpoint.
        restore_upload: to load it from the upload tier; None for the same.
        tokens_per_step: for `EveryTokens`.
        steps_per_epoch: for `EveryEpochs`.
    """

    work: float
    step: float = 1.0
    stall: float = 0.0
    slowdown: float = 0.0
    durable: float = 0.0
    uploaded: float | None = None
    node_loss: float = 0.0
    spread: float = 1.0
    down: float = 0.0
    restore: float = 0.0
    restore_upload: float | None = None
    tokens_per_step: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        names = ("stall", "slowdown", "durable", "down", "restore")
        optional = [name for name in ("uploaded", "restore_upload") if getattr(self, name) is not None]
        counts = [name for name in ("tokens_per_step", "steps_per_epoch") if getattr(self, name) is not None]
        require(
            "a simulated job",
            positive("work", self.work),
            positive("step", self.step),
            *(duration(name, getattr(self, name), minimum=0) for name in (*names, *optional)),
            *(integer(name, getattr(self, name), minimum=1) for name in counts),
        )
        require("a simulated job", *self._contradictions())

    def _contradictions(self) -> list[str]:
        found: list[str] = []
        if not 0 <= self.node_loss <= 1:
            found.append(f"node_loss must be between 0 and 1, not {self.node_loss!r}")
        if not 1 <= self.spread <= _MOST_SPREAD:
            found.append(f"spread must be a factor from 1 to {_MOST_SPREAD}, not {self.spread!r}")
        if self.node_loss and self.uploaded is None:
            found.append("failures that lose a node leave nothing without an upload tier: give `uploaded`")
        if self.durable < self.stall:
            found.append(f"durable, {self.durable:g}, includes the stall and cannot be less, {self.stall:g}")
        elif self.slowdown and self.slowdown >= self.durable - self.stall:
            found.append(
                f"slowdown, {self.slowdown:g}, must be less than the {self.durable - self.stall:g} seconds "
                "for which a save is in flight after its stall"
            )
        if self.uploaded is not None and self.uploaded < self.durable:
            found.append(f"uploaded, {self.uploaded:g}, cannot be less than durable, {self.durable:g}")
        return found

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return max(1, math.ceil(self.work / self.step - 1e-9))

    @property
    def in_flight(self) -> float:
        """Seconds for which a save is in flight after its stall."""
        return self.durable - self.stall

    @property
    def work_in_flight(self) -> float:
        """Training done in that time."""
        return self.in_flight - self.slowdown


@final
@dataclass(kw_only=True, slots=True)
class RunParts:
    """Where the time of one simulated run went; the seconds add up to `wall`.

    Attributes:
        useful: training that counted.
        stall: training blocked by saves.
        slowdown: slower steps while saves were in flight.
        lost: training that was done again, or never counted.
        restore: checkpoints were loaded.
        down: no job ran.
        failures: how many struck.
        saves: how many began.
    """

    useful: float = 0.0
    stall: float = 0.0
    slowdown: float = 0.0
    lost: float = 0.0
    restore: float = 0.0
    down: float = 0.0
    failures: int = 0
    saves: int = 0

    @property
    def wall(self) -> float:
        """All of it."""
        return self.useful + self.stall + self.slowdown + self.lost + self.restore + self.down
