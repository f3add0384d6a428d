"""The first save of all, into a root that is not there yet: killed, or cut off, at every system call."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.power import FATES
from tests.reliability.disk.traps import Call, Recorder, Trap, When
from tests.reliability.disk.victims import manager, state_of, values
from tests.reliability.outcome import Choice, Outcome, seen, tried
from tests.support.power import PowerLog, power_cut
from tests.support.system_calls import SystemCalls

ROOT: Final = "runs/a"
"""Below a directory that is there: two directories have to be made."""

FIRST: Final = 1
SECOND: Final = 2
_JOBS: Final = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where the job ends: before or after its nth call."""

    call: Call
    number: int
    when: When

    def __str__(self) -> str:
        return f"{self.when} {self.number}, {self.call.method} {self.call.key}"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill and cut at every point, or at the chosen ones."""
    points = [
        Point(call=call, number=number, when=when)
        for number, call in enumerate(_rehearse(folder))
        for when in call.moments
    ]
    tasks = (
        partial(_case, folder / f"{point.when}-{point.number}", point, choice.seed)
        for point in choice.of(points)
    )
    yield from tried(tasks, _JOBS)


def begin(place: Path, tell: forks.Tell) -> None:
    """Save for the first time."""
    torch.set_num_threads(1)
    with manager(place / ROOT, journal=False) as checkpoints:
        checkpoints.resume(state_of(0))
        checkpoints.save(FIRST, state_of(FIRST)).result()
        tell({"committed": FIRST})


def inspect(place: Path, acknowledged: int) -> int:
    """Resume, if there is something, and save; the step that was resumed, 0 if there was none.

    Raises:
        PromiseBrokenError: what was acknowledged is not there, or not what it was, or the next save is not.
    """
    torch.set_num_threads(1)
    state = state_of(0)
    with manager(place / ROOT) as checkpoints:
        step = checkpoints.resume(state) or 0
        if step < acknowledged:
            raise PromiseBrokenError(f"step {acknowledged} was acknowledged, {step} was resumed")
        if values(state) != values(state_of(step)):
            raise PromiseBrokenError(f"step {step} holds other values")
        checkpoints.save(step + SECOND, state_of(step + SECOND)).result()
        checkpoints.wait()  # for the prune behind it
        failures = [checkpoints.verify(info.step) for info in checkpoints.checkpoints()]
        if failures != [[]] * (1 + bool(step)):
            raise PromiseBrokenError(f"not all that is committed is sound: {failures}")
    left = {name for name in beside_own(place / ROOT) if not name.startswith("step-00000000")}
    if left:
        raise PromiseBrokenError(f"left over: {sorted(left)}")
    return step


def _rehearse(folder: Path) -> list[Call]:
    """Every call of the job; what it and its heir import is there afterwards for all."""

    def act() -> list[Any]:
        before = set(sys.modules)
        place = folder / "rehearsal"
        place.mkdir()
        calls = Recorder(place).record(lambda: begin(place, lambda _said: None))
        inspect(place, FIRST)
        return [[asdict(call) for call in calls], sorted(set(sys.modules) - before)]

    calls, modules = forks.answer(act)
    forks.adopt(modules)
    return [Call(**call) for call in calls]


def _case(place: Path, point: Point, seed: int) -> list[Outcome]:
    root, log = place / "disk", place / "log"
    root.mkdir(parents=True)
    PowerLog.begin(root, log)

    def act(tell: forks.Tell) -> None:
        witness = [PowerLog(root, log).fault]
        trap = Trap(point.number, point.when, everyone=False, witness=witness)
        trap.spring(root, partial(begin, root, tell))

    child = forks.forked(act)
    acknowledged = FIRST if {"committed": FIRST} in child.told else 0
    drawn = random.Random(f"{seed} {point}").randrange(1 << 30)
    found = []
    # The cuts first: what they are made of is the disk as the victim left it.
    for index, fate in enumerate(FATES):
        left = place / f"left-{index}"
        power_cut(log, root, left, fate=fate, seed=drawn + index)
        found.append((f"power cut: {fate}", *seen(partial(inspect, left, acknowledged))))
    found.append(("kill", *seen(partial(_heir, root, log, acknowledged))))
    left = place / "left"
    power_cut(log, root, left)
    found.append(("kill, and a power cut after the next save", *seen(partial(inspect, left, SECOND))))
    shutil.rmtree(place)
    problem = "" if child.killed else f"it was not killed: {child.status}, {child.told}"
    return [
        Outcome(
            sweep=f"the first save, 1 rank: {kind.partition(': ')[0]}",
            point=f"{point}; {kind}",
            kills=int(kind == "kill"),
            acknowledged=SECOND if "next" in kind else acknowledged,
            resumed=resumed,
            problem=problem or broken,
        )
        for kind, resumed, broken in found
    ]


def _heir(root: Path, log: Path, acknowledged: int) -> int:
    with SystemCalls(root, [PowerLog(root, log).fault]):
        return inspect(root, acknowledged)
