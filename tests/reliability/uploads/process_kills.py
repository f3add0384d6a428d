"""A job that uploads by processes of its own is killed at any time, or those processes are.

The calls of such a process cannot be trapped from outside: the moments are drawn by chance. Two jobs go on at
once, while what has lost its parent may still be ending.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, final

import psutil

from tests.reliability import forks
from tests.reliability.disk.kills import start
from tests.reliability.disk.victims import Rank
from tests.reliability.outcome import Choice, Outcome, tried
from tests.reliability.uploads.upload_jobs import (
    LAST,
    OnDisks,
    Scene,
    acknowledged_by,
    judged,
    prepare,
    seen,
    told_by,
    train,
)
from tests.reliability.uploads.upload_kills import ground

Victim = Literal["job", "process"]

_COLUMNS: Final = 1_100_000
"""Makes 70 MB a rank, which is worth a process."""
SCENES: Final = (
    Scene(columns=_COLUMNS),
    Scene(columns=_COLUMNS, waits=True),
    Scene(columns=_COLUMNS, new_disk=True),
    Scene(columns=2 * _COLUMNS, world_size=2),
)
_POINTS: Final = 400
_ATTEMPTS: Final = 3
_LIMIT_SECONDS: Final = 100.0
_LOOK_SECONDS: Final = 0.002


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When who is killed.

    Attributes:
        scene: what the job does.
        victim: all of its ranks, or every process that copies for one of them.
        seconds: after its start; a process, as soon as there is one after that.
    """

    scene: Scene
    victim: Victim
    seconds: float

    def __str__(self) -> str:
        return f"{self.sweep}: {self.where}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        killed = "the job" if self.victim == "job" else "what copies for it"
        return f"{self.scene}, by processes, {killed} killed"

    @property
    def where(self) -> str:
        """The moment."""
        return f"after {self.seconds:.3f} s"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at drawn moments of every scene, or at the chosen ones of each."""
    for number, scene in enumerate(SCENES):
        if choice.may_name(str(scene)):
            template = OnDisks(folder=folder / f"template-{number}")
            prepare(template, scene)
            points = choice.of(_moments(scene, template, folder / f"rehearsal-{number}", choice.seed))
            tasks = (
                partial(_case, moment, template, folder / f"{number}-{index}")
                for index, moment in enumerate(points)
            )
            yield from tried(tasks, 1)
            shutil.rmtree(template.folder)


def _moments(scene: Scene, template: OnDisks, folder: Path, seed: int) -> list[Moment]:
    """Draw moments of a job that nobody kills."""
    drawn, began = random.Random(seed), time.monotonic()
    _job(scene, ground(scene, template, folder), None)
    shutil.rmtree(folder)
    longest = time.monotonic() - began
    victims: Sequence[Victim] = ("job", "process")
    return [
        Moment(scene=scene, victim=victims[number % 2], seconds=drawn.uniform(0.05, 0.9) * longest)
        for number in range(_POINTS)
    ]


def _case(moment: Moment, template: OnDisks, folder: Path) -> list[Outcome]:
    seconds = moment.seconds
    for attempt in range(_ATTEMPTS):
        place = ground(moment.scene, template, folder / f"{attempt}")
        children, kills, problem = _job(moment.scene, place, moment, seconds)
        if kills:
            break
        seconds *= 0.7  # the job was faster this time
    found = (
        _after_the_job(moment, children, place, folder / "lost", problem)
        if moment.victim == "job"
        else _after_a_process(moment, children, place, kills, problem)
    )
    if not any(outcome.problem for outcome in found):
        shutil.rmtree(folder)
    return found


def _after_the_job(
    moment: Moment, children: Sequence[forks.Child], place: OnDisks, lost: Path, problem: str
) -> list[Outcome]:
    without = OnDisks(folder=lost)
    shutil.copytree(place.tier, without.tier)
    return judged(moment, children, (place, without), problem)


def _after_a_process(
    moment: Moment, children: Sequence[forks.Child], place: OnDisks, kills: int, problem: str
) -> list[Outcome]:
    """The job must not notice, but for a warning."""
    told = told_by(children)
    if not problem and any({"ended": True} not in child.told for child in children):
        problem = f"the job did not end: {told}"
    if not problem and {"uploaded": LAST} not in told:
        problem = f"the last checkpoint was not uploaded: {told}"
    acknowledged = max(acknowledged_by(moment.scene, children))
    resumed, broken = seen(place, moment.scene, acknowledged)
    return [
        Outcome(
            sweep=moment.sweep,
            point=moment.where,
            kills=kills,
            acknowledged=acknowledged,
            resumed=resumed,
            problem=problem or ("" if kills else "no process was killed") or broken,
        )
    ]


def _job(
    scene: Scene, place: OnDisks, moment: Moment | None, seconds: float = 0.0
) -> tuple[list[forks.Child], int, str]:
    """Run the job and kill; return its ranks, the number of kills, and what went wrong."""

    def act(rank: Rank, tell: forks.Tell) -> None:
        train(place, rank, scene, tell)

    kills = 0
    with start(scene.world_size, act) as children:
        if moment is not None:
            time.sleep(seconds)
            if moment.victim == "process":
                kills = _kill_copying([child.pid for child in children])
            else:
                for child in children:
                    child.kill()
        late = forks.gather(children, _LIMIT_SECONDS)
    kills = kills or sum(child.killed for child in children)
    return children, kills, f"still running: {told_by(children)}" if late else ""


def _kill_copying(parents: Sequence[int]) -> int:
    """Kill what copies for these, once there is something; return how many."""
    kills = 0
    while not kills and any(map(_is_running, parents)):
        for parent in parents:
            for each in _children(parent):
                each.kill()
                kills += 1
        time.sleep(_LOOK_SECONDS)
    return kills


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
