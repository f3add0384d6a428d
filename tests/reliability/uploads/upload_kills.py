"""A job that saves to a disk and uploads to a second one is killed at every system call on either.

After each kill two jobs go on, each on a copy of what was left: one with both tiers, one without the first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from tests.reliability import forks
from tests.reliability.disk.kills import start
from tests.reliability.disk.traps import RankCall, Recorder, Trap, rank_calls
from tests.reliability.disk.victims import Rank
from tests.reliability.outcome import Choice, Outcome, tried
from tests.reliability.uploads.upload_jobs import (
    OnDisks,
    Scene,
    judged,
    prepare,
    spoil,
    told_by,
    train,
)
from tests.support.power import PowerLog

_COLUMNS: Final = 8192
"""Entries so large that they are compressed."""
SCENES: Final = (
    Scene(),
    Scene(waits=True),
    Scene(new_disk=True),
    Scene(world_size=2),
    Scene(damage="local"),
    Scene(damage="apart"),
    Scene(damage="same"),
    Scene(compressed=True, columns=_COLUMNS),
)
_JOBS: Final = 2
_ATTEMPTS: Final = 3
_LIMIT_SECONDS: Final = 100.0


Point: TypeAlias = RankCall[Scene]
Case: TypeAlias = Callable[[Point, OnDisks, Path], Sequence[Outcome]]
"""A point, the history, a folder of its own -> what comes of it."""


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every scene, or at the chosen ones of each."""
    yield from sweep(choice, folder, _case)


def sweep(choice: Choice, folder: Path, case: Case) -> Iterator[Outcome]:
    """Try a case at every point of every scene, or at the chosen ones of each."""
    templates: dict[bool, OnDisks] = {}
    for scene in SCENES:
        if choice.may_name(str(scene)):
            template = templates.get(scene.compressed)
            if template is None:
                template = OnDisks(folder=folder / f"template-{len(templates)}")
                templates[scene.compressed] = template
                prepare(template, replace(SCENES[0], compressed=scene.compressed, columns=scene.columns))
            points = choice.of(rehearse(scene, template, folder / f"rehearsal-{SCENES.index(scene)}"))
            tasks = (partial(case, point, template, folder / f"{i}") for i, point in enumerate(points))
            yield from tried(tasks, _JOBS // scene.world_size)
            for number in range(len(points)):
                shutil.rmtree(folder / f"{number}", ignore_errors=True)


def ground(scene: Scene, template: OnDisks, folder: Path) -> OnDisks:
    """A fresh copy of the history, as the victim finds it."""
    place = OnDisks(folder=folder)
    shutil.copytree(template.folder, folder)
    spoil(scene, place.local, place.tier)
    return place


def rehearse(scene: Scene, template: OnDisks, folder: Path) -> list[Point]:
    """Every point of a job that nobody kills."""
    place = ground(scene, template, folder)

    def act(rank: Rank, tell: forks.Tell) -> None:
        calls = Recorder(place.folder).record(lambda: train(place, rank, scene, lambda _said: None))
        tell([asdict(call) for call in calls])

    with start(scene.world_size, act) as children:
        forks.gather(children, _LIMIT_SECONDS)
    return rank_calls(scene, [forks.answered(child) for child in children])


def _case(point: Point, template: OnDisks, folder: Path) -> list[Outcome]:
    """Kill there, and go on twice: with what is left, and without the local disk."""
    place, children, problem = struck(point, template, folder)
    lost = OnDisks(folder=folder / "lost")
    shutil.copytree(place.tier, lost.tier)
    found = judged(point, children, (place, lost), problem)
    if not any(outcome.problem for outcome in found):
        shutil.rmtree(folder)
    return found


def struck(
    point: Point, template: OnDisks, folder: Path, log: Path | None = None
) -> tuple[OnDisks, list[forks.Child], str]:
    """Kill there; return the disks as they were left, the ranks, and what they did instead, if anything.

    Args:
        point: where.
        template: the history.
        folder: for the disks of every attempt.
        log: where to note what reaches the disks, if anywhere: see `PowerLog`.
    """
    for attempt in range(_ATTEMPTS):
        place = ground(point.scene, template, folder / f"{attempt}")
        if log is not None:
            shutil.rmtree(log, ignore_errors=True)
            PowerLog.begin(place.folder, log)
        children, late = _killed(point, place, log)
        if any(child.killed for child in children):
            break
        # Another order of threads may have fewer calls: aim earlier.
        point = replace(point, number=point.number * 9 // 10)
    return place, children, f"still running: {told_by(children)}" if late else ""


def _killed(point: Point, place: OnDisks, log: Path | None) -> tuple[list[forks.Child], list[int]]:
    def act(rank: Rank, tell: forks.Tell) -> None:
        nth = point.number if rank.number == point.rank else None
        witness = [] if log is None else [PowerLog(place.folder, log).fault]
        trap = Trap(nth, point.when, everyone=True, witness=witness)
        trap.spring(place.folder, partial(train, place, rank, point.scene, tell))

    with start(point.scene.world_size, act) as children:
        return children, forks.gather(children, _LIMIT_SECONDS)
