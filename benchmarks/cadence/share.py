"""How much of its training time `MaxOverhead(x)` costs, measured without our meter.

Steps with the manager and the same steps without it take turns while no save is in flight; the manager's
clock does not run during the latter. What the former took longer is lost, a save in flight included.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.cadence.model import Training
from ckpt_core import CheckpointManager, FirstStep, MaxOverhead
from ckpt_core.saving import SaveHandle

_NEIGHBOURS = 32  # near, as a slow time of the machine has more of the saves than of the steps
_OUTLIER = 5.0
_RARE = 0.02
"""Below, saves are a second or more apart, and steps of 80 ms are nearer to those of real trainings; above,
steps of 10 ms, as there must be some without a save between two saves."""
_AFTER_COMMIT = 3
"""Steps after a commit that still count as of the save: the thread ends, and caches fill."""


@final
class PausableClock:
    """Seconds that pass only while the training with the manager runs."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def __call__(self) -> float:
        """Return the present."""
        return time.perf_counter() - self._left_out

    @contextmanager
    def paused(self) -> Generator[None]:
        """Let no time pass."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left_out += time.perf_counter() - began


@final
@dataclass
class Turns:
    """The times of steps with the manager, and of their twins without it.

    `busy` are steps with a save in flight: the number of pairs before it, and its seconds. `calls` are steps
    after which a save was made, and the seconds of its call. Such a step counts as usual: a save is due by
    time, and so more often after a long step, which it has not made long.
    """

    pairs: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    busy: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    calls: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    @property
    def training(self) -> float:
        """Seconds of the training with the manager."""
        calls = sum(map(sum, self.calls))
        return sum(ours for ours, _ in self.pairs) + sum(seconds for _, seconds in self.busy) + calls

    def lost(self) -> tuple[float, float, float]:
        """Return the seconds lost, their standard error, and those of them lost to decisions."""
        usual = statistics.median(twin for _, twin in self.pairs)
        fair = [(ours, twin) for ours, twin in self.pairs if max(ours, twin) < _OUTLIER * usual]
        # The same is done at each of these steps, so the middle of the differences tells, with less noise.
        more = sorted(ours - twin for ours, twin in fair)[len(fair) // 10 : -len(fair) // 10]
        # Steps in flight are compared with all twins, or what else the machine does would count as lost.
        noise = statistics.stdev(twin for _, twin in self.pairs)
        lost = decisions = len(self.pairs) * statistics.fmean(more)
        variance = len(self.pairs) ** 2 * statistics.variance(more) / len(more)
        lost += sum(call for _, call in self.calls)
        for at, seconds in self.busy:
            near = self.pairs[max(0, at - _NEIGHBOURS // 2) : at + _NEIGHBOURS // 2]
            lost += seconds - statistics.fmean(twin for _, twin in near)
            variance += noise**2
        return lost, math.sqrt(variance), decisions


def measure(root: Path, fractions: Sequence[float], *, seconds: float) -> dict[str, Any]:
    """Train with each `MaxOverhead`; print a line for each."""
    found = []
    for fraction in fractions:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as folder:
            turns, metered = _run(Path(folder), fraction, seconds)
        lost, error, decisions = turns.lost()
        real = lost / turns.training
        row = {
            "fraction": fraction,
            "real": real,
            "standard_error": error / turns.training,
            "decisions": decisions / turns.training,
            "metered": metered / turns.training,
            "saves": len(turns.calls),
            "training_seconds": turns.training,
            "step_seconds": statistics.median(twin for _, twin in turns.pairs),
            "passed": 0.8 * fraction <= real <= 1.2 * fraction,
        }
        found.append(row)
        print(
            f"MaxOverhead({fraction:g}): {100 * real:.3f} % lost (+- {100 * row['standard_error']:.3f}), "
            f"{real / fraction:.2f} of what is allowed, {100 * row['decisions']:.3f} % in steps without a "
            f"save; by our meter {100 * row['metered']:.3f} %; "
            f"{len(turns.calls)} saves in {turns.training:.0f} s, step {1000 * row['step_seconds']:.2f} ms",
            flush=True,
        )
    return {"rows": found, "passed": all(row["passed"] for row in found)}


def _run(folder: Path, fraction: float, seconds: float) -> tuple[Turns, float]:
    training = Training(1024, batch=256) if fraction < _RARE else Training(512)
    turns, clock = Turns(), PausableClock()
    for _ in range(20):
        training.step()
    # The first save measures; without it, it would be made after a minute.
    with CheckpointManager(folder / "run", save=FirstStep() | MaxOverhead(fraction)) as manager:
        _set_clock(manager, clock)
        began, step, quiet = clock(), 0, 0
        handle: SaveHandle | None = None
        while clock() - began < seconds:
            step += 1
            start = time.perf_counter()
            training.step()
            stepped = time.perf_counter()
            new = manager.maybe_save(step, training.state)
            taken = time.perf_counter() - start
            if new is not None:
                handle, quiet = new, 0
                turns.calls.append((stepped - start, start + taken - stepped))
                continue
            if handle is None or handle.done():
                quiet += 1
            if quiet <= _AFTER_COMMIT:
                turns.busy.append((len(turns.pairs), taken))
                continue
            with clock.paused():
                start = time.perf_counter()
                training.step()
                turns.pairs.append((taken, time.perf_counter() - start))
        costs = manager.costs
    return turns, 0.0 if costs is None else costs.lost


def _set_clock(manager: Any, clock: PausableClock) -> None:
    """Let the manager see no time of the twins; it has no option for that, as no job needs one."""
    for part in (manager._cadence, manager._meter):
        part._clock, part._started = clock, clock()
