"""`ckpt cp` killed at every system call on the target's disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ckpt_core.storage import LocalStorage
from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.copies.cases import NAME, Point, copied, digest, look, make_source, outcome_of
from tests.reliability.disk.traps import Call, Recorder, Trap
from tests.reliability.outcome import Choice, Outcome, seen, tried

_FREE: Final = "ckpt cp to a local disk, killed"
_JOBS: Final = 2
_ATTEMPTS: Final = 3


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of the sweep, or at the chosen ones."""
    source = folder / "source"
    forks.forked(lambda _tell: make_source(source))
    before = digest(source)
    if choice.may_name(_FREE):
        points = choice.of(_points(source, folder))
        yield from tried((partial(_case, point, source, folder, before) for point in points), _JOBS)


def _points(source: Path, folder: Path) -> list[Point]:
    """Every call on the target's disk, from a rehearsal."""
    target = folder / "rehearsal"
    target.mkdir()

    def rehearse() -> list[dict[str, Any]]:
        return [asdict(call) for call in Recorder(target).record(lambda: copied(source, str(target)))]

    calls = [Call(**fields) for fields in forks.answer(rehearse)]
    return [
        Point(sweep=_FREE, number=number, when=when, label=f"{call.method} {call.key}")
        for number, call in enumerate(calls)
        for when in call.moments
    ]


def _case(point: Point, source: Path, folder: Path, before: str) -> list[Outcome]:
    for attempt in range(_ATTEMPTS):
        target = folder / f"{point.when}-{point.number}-{attempt}"
        target.mkdir()
        child = forks.forked(partial(_killed, point, source, target))
        if child.killed or attempt == _ATTEMPTS - 1:
            return [_seen_after(point, child, source, target, before)]
        # Another order of threads may have fewer calls: aim earlier.
        point = replace(point, number=point.number * 9 // 10)
    return []


def _seen_after(point: Point, child: forks.Child, source: Path, target: Path, before: str) -> Outcome:
    resumed, problem = seen(partial(look, LocalStorage(target), source, before, str(target), ()))
    problem = problem or _strays(target) or ("" if child.killed else f"not killed: {child.told}")
    shutil.rmtree(target, ignore_errors=True)
    return outcome_of(point, child, resumed, problem)


def _killed(point: Point, source: Path, target: Path, tell: forks.Tell) -> None:
    trap = Trap(point.number, point.when, everyone=False)
    trap.spring(target, lambda: copied(source, str(target)))
    tell("copied")


def _strays(target: Path) -> str:
    """What was left behind."""
    strays = beside_own(target) - {NAME}
    return f"left behind: {sorted(strays)}" if strays else ""
