"""`ckpt cp` killed at every system call on the target's disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from ckpt_core.storage import LocalStorage
from tests.reliability import forks
from tests.reliability.copies.cases import NAME, Point, copied, digest, look, make_source, outcome_of
from tests.reliability.disk.traps import Call, Recorder, Trap
from tests.reliability.outcome import Choice, Outcome, seen, tried

_FREE: Final = "ckpt cp to a local disk, killed"
_THEIRS: Final = "ckpt cp to a local disk, into a user's directory, killed"
_JOBS: Final = 2
_ATTEMPTS: Final = 3


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of both sweeps, or at the chosen ones of each."""
    source = folder / "source"
    forks.forked(lambda _tell: make_source(source))
    before = digest(source)
    for sweep in (_FREE, _THEIRS):
        if choice.may_name(sweep):
            points = choice.of(_points(sweep, source, folder))
            yield from tried((partial(_case, point, source, folder, before) for point in points), _JOBS)


def _prepare(target: Path, sweep: str) -> Path:
    target.mkdir(parents=True)
    if sweep == _THEIRS:
        (target / NAME).mkdir()
        (target / NAME / "notes.txt").write_text("mine")
        (target / NAME / "pytorch_model_fsdp_0").write_text("mine, by that name")
    return target


def _points(sweep: str, source: Path, folder: Path) -> list[Point]:
    """Every call on the target's disk, from a rehearsal."""
    target = _prepare(folder / f"rehearsal-{sweep == _THEIRS}", sweep)

    def rehearse() -> list[dict[str, Any]]:
        return [asdict(call) for call in Recorder(target).record(lambda: copied(source, str(target)))]

    calls = [Call(**fields) for fields in forks.answer(rehearse)]
    return [
        Point(sweep=sweep, number=number, when=when, label=f"{call.method} {call.key}")
        for number, call in enumerate(calls)
        for when in call.moments
    ]


def _case(point: Point, source: Path, folder: Path, before: str) -> list[Outcome]:
    for attempt in range(_ATTEMPTS):
        name = f"{point.sweep == _THEIRS}-{point.when}-{point.number}-{attempt}"
        target = _prepare(folder / name, point.sweep)
        child = forks.forked(partial(_killed, point, source, target))
        # Another order of threads may have fewer calls.
        if child.killed or attempt == _ATTEMPTS - 1:
            return [_seen_after(point, child, source, target, before)]
    return []


def _seen_after(point: Point, child: forks.Child, source: Path, target: Path, before: str) -> Outcome:
    resumed, problem = seen(partial(look, LocalStorage(target), source, before, str(target), ()))
    problem = problem or _strays(target, point.sweep) or ("" if child.killed else f"not killed: {child.told}")
    shutil.rmtree(target, ignore_errors=True)
    return outcome_of(point, child, resumed, problem)


def _killed(point: Point, source: Path, target: Path, tell: forks.Tell) -> None:
    trap = Trap(point.number, point.when, everyone=False)
    trap.spring(target, lambda: copied(source, str(target)))
    tell("copied")


def _strays(target: Path, sweep: str) -> str:
    """What was left behind, or of the user's was lost."""
    strays = {path.name for path in target.iterdir()} - {NAME, "writer.json.lock"}
    if strays:
        return f"left behind: {sorted(strays)}"
    texts = sorted(
        path.read_text()
        for path in (target / NAME).iterdir()
        if path.suffix == ".txt" or "yours" in path.name
    )
    expected = ["mine", "mine, by that name"] if sweep == _THEIRS else []
    return "" if texts == expected else f"of the user's files there are {texts}"
