"""What measuring, events and history cost: per step, and per save."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cadence.model import Training
from benchmarks.timing import Spread
from ckpt_core import CheckpointManager, EverySteps

_NEVER = EverySteps(10**9)
_STEPS_AT_ONCE = 2000
STEP_BAR, SAVE_BAR = 20e-6, 5e-3


def measure(root: Path, *, rounds: int = 20, saves: int = 40) -> dict[str, Any]:
    """Compare managers with and without a journal, in turns; print three lines.

    The cost of a step is the CPU time of the process for the whole decision with the journal, measuring
    included; that of a save is the difference, in CPU time of all threads, from its call to the end of its
    background work, and in the stall.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as folder:
        steps = [_step_seconds(Path(folder) / f"steps-{number}") for number in range(rounds)]
        processor, stall = _save_seconds(Path(folder), saves)
    step, cost = statistics.median(steps), statistics.median(processor)
    print(f"a step that saves nothing: {_spread(steps, 1e6)} us with decision, meter and journal")
    print(f"a save: {_spread(processor, 1e3)} ms of CPU time more with a journal")
    print(f"its stall: {_spread(stall, 1e3)} ms more with a journal")
    return {
        "step_seconds": step,
        "save_cpu_seconds": cost,
        "save_stall_seconds": statistics.median(stall),
        "passed": step <= STEP_BAR and cost <= SAVE_BAR and statistics.median(stall) <= SAVE_BAR,
    }


def _step_seconds(root: Path) -> float:
    """Return the CPU seconds of a decision in a run that has saved and is being recorded."""
    with CheckpointManager(root, save=_NEVER, journal=True) as manager:
        manager.save(0, {"a": 1})
        manager.wait()
        began = time.process_time()
        for step in range(1, _STEPS_AT_ONCE + 1):
            manager.due(step)
        return (time.process_time() - began) / _STEPS_AT_ONCE


def _save_seconds(folder: Path, saves: int) -> tuple[list[float], list[float]]:
    """Return how much more CPU time, and stall, pairs of saves took with a journal than without."""
    training = Training(64)
    training.step()
    with ExitStack() as open_managers:
        managers = [
            open_managers.enter_context(
                CheckpointManager(folder / str(journal), journal=journal, save=_NEVER)
            )
            for journal in (False, True)
        ]
        found = []
        for number in range(saves + 3):  # the first saves plan, and claim the root
            pair = [_timed(lambda each=each, at=number: _save(each, training, at)) for each in managers]
            found.append(pair)
    more = [(ours[0] - plain[0], ours[1] - plain[1]) for plain, ours in found[3:]]
    return [cpu for cpu, _ in more], [stall for _, stall in more]


def _save(manager: CheckpointManager, training: Training, number: int) -> float:
    """Save, and decide for some steps until everything about the save is known; return the stall."""
    began = time.perf_counter()
    manager.save(20 * number, training.state)
    stall = time.perf_counter() - began
    manager.wait()
    for step in range(1, 20):
        manager.due(20 * number + step)
    time.sleep(0.05)  # the thread of the journal writes a little later
    return stall


def _timed(save: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    stall = save()
    return time.process_time() - began, stall


def _spread(values: list[float], unit: float) -> str:
    return str(Spread.of(value * unit for value in values))
