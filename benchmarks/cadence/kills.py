"""Real trainings that are killed again and again: `Optimal` against fixed intervals.

Every contender is killed at the same moments of its lives, one life of each contender after another, so that
what else the machine does meets all of them. A life begins as a fork of a process that has torch, and counts
from there: its start, its resume and its steps. What a contender has lost is the time of all its lives, less
the steps that its last checkpoint holds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, final

from benchmarks.cadence.model import Training
from ckpt_core import CheckpointManager, EverySeconds, Optimal
from ckpt_core.cadence import optimal_interval
from ckpt_core.policies import SavePolicy

_BAR = 1.05
_LONG = 10**9
_STEPS_EVERY, _STEPS = 4, 60


@final
@dataclass(frozen=True)
class Schedule:
    """The seconds of every life: exponential, the same for every contender."""

    number: int
    mtbf: float
    seed: int

    def lives(self) -> list[float]:
        """Return the lives; none is too short to start in."""
        chance = random.Random(self.seed)
        return [max(0.2, chance.expovariate(1 / self.mtbf)) for _ in range(self.number)]


def measure(root: Path, schedule: Schedule, *, width: int) -> dict[str, Any]:
    """Run all lives of all contenders; print a line for each contender."""
    lives = schedule.lives()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as folder:
        cost, durable, step = _in_child(lambda: _calibrate(Path(folder) / "first", width))
        best = optimal_interval(cost=cost, durable=durable, mtbf=schedule.mtbf)
        print(
            f"step {1000 * step:.2f} ms, a save costs {1000 * cost:.1f} ms, optimum {best:.3f} s", flush=True
        )
        contenders: Mapping[str, SavePolicy] = {
            # Without the bound, the first save that measures would be made after a minute.
            "Optimal": Optimal(mtbf=schedule.mtbf, max_seconds=1.0),
            **{f"EverySeconds({best * factor:.3f})": EverySeconds(best * factor) for factor in (0.25, 1, 4)},
        }
        steps = [_in_child(lambda: _step_seconds(width))]
        for number, life in enumerate(lives):
            order = list(contenders)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                _live(Path(folder) / name, contenders[name], life, width)
            if number % _STEPS_EVERY == 0:
                steps.append(_in_child(lambda: _step_seconds(width)))
        step = sorted(steps)[len(steps) // 2]
        done = {name: _in_child(lambda at=Path(folder) / name: _last_step(at)) for name in contenders}
    total = sum(lives)
    lost = {name: total - count * step for name, count in done.items()}
    fixed = min(seconds for name, seconds in lost.items() if name != "Optimal")
    for name, seconds in lost.items():
        print(f"{name:22} {done[name]:7} steps kept, {seconds:.1f} s of {total:.1f} s lost", flush=True)
    ratio = lost["Optimal"] / fixed
    print(f"Optimal has lost {ratio:.3f} times as much as the best fixed interval, in {len(lives)} kills")
    return {"lost": lost, "steps": done, "total": total, "ratio": ratio, "passed": ratio <= _BAR}


def _live(root: Path, policy: SavePolicy, seconds: float, width: int) -> None:
    """Fork a training, and kill it after so many seconds."""
    child = os.fork()
    if not child:
        try:
            _train(root, policy, width)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"the training in {root} has ended by itself, status {status}")


def _train(root: Path, policy: SavePolicy, width: int) -> None:
    training = Training(width)
    with CheckpointManager(root, save=policy) as manager:
        for step in range((manager.resume(training.state) or 0) + 1, _LONG):
            training.step()
            manager.maybe_save(step, training.state)


def _calibrate(root: Path, width: int) -> tuple[float, float, float]:
    """Return what a save costs, when it is durable, and the time of a step."""
    training = Training(width)
    with CheckpointManager(root, save=EverySeconds(0.3)) as manager:
        began, step = time.monotonic(), 0
        while time.monotonic() - began < 4.0:
            step += 1
            training.step()
            manager.maybe_save(step, training.state)
        costs = manager.costs
    if costs is None:
        raise RuntimeError("no save was measured in 4 s")
    return costs.stall + costs.slowdown, costs.durable, costs.step


def _step_seconds(width: int) -> float:
    """Return the mean seconds of a step without saves."""
    training = Training(width)
    for _ in range(20):
        training.step()
    began = time.perf_counter()
    for _ in range(_STEPS):
        training.step()
    return (time.perf_counter() - began) / _STEPS


def _last_step(root: Path) -> int:
    with CheckpointManager(root) as manager:
        latest = manager.latest()
    return 0 if latest is None else latest.step


def _in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a fork: this process must never start a thread of torch."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            theirs.send(work())
        finally:
            sys.stderr.flush()
            os._exit(0)
    theirs.close()
    try:
        return ours.recv()
    finally:
        os.waitpid(child, 0)
