"""How much of its training time `MaxOverhead(x)` costs, measured without our meter.

The calls of the manager are timed from outside. A step in flight has lost what it took longer than the mean
of the steps around it that no save touched.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.cadence.model import Training
from ckpt_core import AtSteps, CheckpointManager, MaxOverhead
from ckpt_core.saving import SaveHandle

_NEIGHBOURS = 64  # near, as a slow time of the machine has more of the saves than of the steps
_RARE = 0.02
"""Below, saves are a second or more apart, and steps of 80 ms are nearer to those of real trainings; above,
steps of 10 ms, as there must be some without a save between two saves."""
_AFTER_COMMIT = 3
"""Steps after a commit that still count as of the save: the thread ends, and caches fill."""


@final
@dataclass
class Lap:
    """One step of the training, and the call of the manager after it, in seconds."""

    step: float
    call: float
    in_flight: bool


@final
@dataclass
class Laps:
    """All steps of a run.

    A step after which a save was made counts as usual: a save is due by time, and so more often after a long
    step, which it has not made long.
    """

    laps: list[Lap] = field(default_factory=list[Lap])
    saves: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the training."""
        return sum(lap.step + lap.call for lap in self.laps)

    @property
    def usual(self) -> float:
        """Seconds of a step that no save touched."""
        return statistics.median(lap.step for lap in self.laps if not lap.in_flight)

    def lost(self) -> tuple[float, float]:
        """Return the seconds lost, and their standard error."""
        quiet = [at for at, lap in enumerate(self.laps) if not lap.in_flight]
        lost = sum(lap.call for lap in self.laps)
        variance = 0.0
        for at, lap in enumerate(self.laps):
            if lap.in_flight:
                middle = bisect_left(quiet, at)
                near = [self.laps[n].step for n in quiet[max(0, middle - _NEIGHBOURS // 2) :][:_NEIGHBOURS]]
                lost += lap.step - statistics.fmean(near)
                variance += statistics.variance(near) * (1 + 1 / len(near))
        return lost, math.sqrt(variance)


def measure(root: Path, fractions: Sequence[float], *, seconds: float) -> dict[str, Any]:
    """Train with each `MaxOverhead`; print a line for each."""
    found = []
    for fraction in fractions:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as folder:
            laps, metered = _run(Path(folder), fraction, seconds)
        lost, error = laps.lost()
        real = lost / laps.seconds
        row = {
            "fraction": fraction,
            "real": real,
            "standard_error": error / laps.seconds,
            "metered": metered / laps.seconds,
            "saves": laps.saves,
            "training_seconds": laps.seconds,
            "step_seconds": laps.usual,
            "passed": 0.8 * fraction <= real <= 1.2 * fraction,
        }
        found.append(row)
        print(
            f"MaxOverhead({fraction:g}): {100 * real:.3f} % lost (+- {100 * row['standard_error']:.3f}), "
            f"{real / fraction:.2f} of what is allowed; by our meter {100 * row['metered']:.3f} %; "
            f"{laps.saves} saves in {laps.seconds:.0f} s, step {1000 * laps.usual:.2f} ms",
            flush=True,
        )
    return {"rows": found, "passed": all(row["passed"] for row in found)}


def _run(folder: Path, fraction: float, seconds: float) -> tuple[Laps, float]:
    training = Training(1024, batch=256) if fraction < _RARE else Training(512)
    for _ in range(20):
        training.step()
    laps = Laps()
    # The first save measures; without it, it would be made after a minute.
    with CheckpointManager(folder / "run", save=AtSteps([1]) | MaxOverhead(fraction)) as manager:
        step, quiet = 0, 0
        handle: SaveHandle | None = None
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            step += 1
            in_flight = handle is not None and quiet < _AFTER_COMMIT
            if handle is not None and handle.done():
                quiet += 1
            start = time.perf_counter()
            training.step()
            stepped = time.perf_counter()
            new = manager.maybe_save(step, training.state)
            laps.laps.append(Lap(stepped - start, time.perf_counter() - stepped, in_flight))
            if new is not None:
                handle, quiet = new, 0
                laps.saves += 1
        costs = manager.costs
    return laps, 0.0 if costs is None else costs.lost
