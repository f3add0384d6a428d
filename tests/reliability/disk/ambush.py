"""A job that saves in a tight loop is killed at random moments; the next one goes on from there."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ckpt_core.names import step_name
from tests.reliability import forks
from tests.reliability.disk.findings import AHEAD, Expected, ids_of, inspect
from tests.reliability.disk.victims import ALONE, SOUND, SWEPT, loop, prepare
from tests.reliability.outcome import Choice, Outcome, seen, tried

KILLS: Final = 1000
_LANES: Final = 20
_JOBS: Final = 2
_LONGEST_SECONDS: Final = 0.15
_FROM_THE_START: Final = 0.25
"""Share of the kills whose moment counts from the start of the process, so that they may hit the resume."""

_NEVER: Final = 1 << 30


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill a thousand times, or as often as is chosen, on several roots, each of which sees many kills."""
    total = choice.least(KILLS)
    lanes = min(_LANES, total)
    _warm_up(folder)
    tasks = (
        partial(_lane, folder / f"lane-{lane}", choice.seed + lane, len(range(lane, total, lanes)))
        for lane in range(lanes)
    )
    yield from tried(tasks, _JOBS)


def _warm_up(folder: Path) -> None:
    def act() -> list[str]:
        before = set(sys.modules)
        root = folder / "warm"
        prepare(root, ALONE)
        inspect(root, _expected([], SOUND, ids_of(root)[step_name(SWEPT)]))
        shutil.rmtree(root)
        return sorted(set(sys.modules) - before)

    forks.adopt(forks.answer(act))


def _lane(root: Path, seed: int, count: int) -> list[Outcome]:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    forks.forked(lambda _tell: prepare(root, ALONE))
    damaged = forks.answer(lambda: ids_of(root))[step_name(SWEPT)]
    last, found = SOUND, list[Outcome]()
    for number in range(count):
        delay = chance.uniform(0.0, _LONGEST_SECONDS)
        child = _ambushed(root, last, delay, resumes_first=chance.random() > _FROM_THE_START)
        expected = _expected(child.told, last, damaged)
        resumed, problem = seen(partial(inspect, root, expected))
        found.append(
            Outcome(
                sweep="local disk, 1 rank: random moments of a tight save loop",
                point=f"root {root.name}, kill {number}, after {delay * 1000:.1f} ms",
                kills=int(child.killed),
                acknowledged=expected.acknowledged,
                resumed=resumed,
                problem=problem,
            )
        )
        if resumed is None:
            break
        last = resumed + AHEAD
    shutil.rmtree(root)
    return found


def _ambushed(root: Path, last: int, delay_seconds: float, *, resumes_first: bool) -> forks.Child:
    """A job that was killed after some time, counted from its start or from its resume."""
    child = forks.fork(partial(loop, root, range(last + 1, _NEVER)))
    if resumes_first:
        child.listen()
    time.sleep(delay_seconds)  # the random moment is what is tried
    child.kill()
    forks.gather([child])
    return child


def _expected(told: list[Any], last: int, damaged: str) -> Expected:
    committed = [message["committed"] for message in told if "committed" in message]
    # Retention goes by steps, so that `last.ckpt` may be gone between a save and its replacement.
    return Expected(acknowledged=max([last, *committed]), replaced=None, damaged=frozenset({damaged}))
