"""The disk of a job that uploads is lost while the job trains on: before or after any call that changes it.

Nobody is killed: the job may fail, but must end. The next one finds what the disk has by then, and the tier.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from ckpt_core import CheckpointError
from ckpt_core.testing import Fault, Operation
from tests.reliability import forks
from tests.reliability.disk.kills import start
from tests.reliability.disk.victims import Rank
from tests.reliability.outcome import Choice, Outcome, tried
from tests.reliability.uploads.upload_jobs import OnDisks, Scene, prepare, seen, train
from tests.reliability.uploads.upload_kills import Point, ground, rehearse
from tests.support.system_calls import CHANGING, SystemCalls

SCENES: Final = (Scene(), Scene(waits=True))
_JOBS: Final = 2
_LIMIT_SECONDS: Final = 100.0


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Lose the disk at every point of every scene, or at the chosen ones of each."""
    template = OnDisks(folder=folder / "template")
    prepare(template, SCENES[0])
    for number, scene in enumerate(SCENES):
        if choice.may_name(str(scene)):
            points = choice.of(rehearse(scene, template, folder / f"rehearsal-{number}"))
            tasks = (
                partial(_case, point, template, folder / f"{number}-{index}")
                for index, point in enumerate(points)
            )
            yield from tried(tasks, _JOBS)


def _case(point: Point, template: OnDisks, folder: Path) -> list[Outcome]:
    place = ground(point.scene, template, folder)

    def act(rank: Rank, tell: forks.Tell) -> None:
        with SystemCalls(place.folder, [_loss(point, place, tell)]):
            try:
                train(place, rank, point.scene, tell)
            except (CheckpointError, OSError) as error:
                tell({"failed": f"{type(error).__name__}: {error}"})

    with start(1, act) as children:
        late = forks.gather(children, _LIMIT_SECONDS)
    told = children[0].told
    problem = f"it still ran after {_LIMIT_SECONDS:g} s" if late else ""
    problem = problem or next((message["error"] for message in told if "error" in message), "")
    uploaded, committed = acknowledged_despite(told, point.scene)
    resumed, broken = seen(place, point.scene, max(uploaded, committed))
    shutil.rmtree(folder)
    return [
        Outcome(
            sweep=f"{point.scene}: disk lost while it trains",
            point=point.where,
            acknowledged=max(uploaded, committed),
            resumed=resumed,
            problem=problem or broken,
        )
    ]


def acknowledged_despite(told: list[dict[str, Any]], scene: Scene) -> tuple[int, int]:
    """Return the newest step in the tier, and the newest committed to the disk after it was lost."""
    lost = next((index for index, message in enumerate(told) if "lost" in message), len(told))
    uploaded = max([scene.acknowledged[1], *(message.get("uploaded", 0) for message in told)])
    return uploaded, max([0, *(message.get("committed", 0) for message in told[lost:])])


def _loss(point: Point, place: OnDisks, tell: forks.Tell) -> Fault:
    """Lose the disk at the nth call that changes anything, as the rehearsal counted them."""
    left = [point.number]

    def lose() -> None:
        shutil.rmtree(place.local, ignore_errors=True)
        tell({"lost": True})

    def before(operation: Operation) -> None:
        if operation.method in CHANGING:
            left[0] -= 1
            if left[0] == -1 and point.when == "before":
                lose()

    def after(operation: Operation) -> None:
        if operation.method in CHANGING and left[0] == -1 and point.when == "after":
            left[0] -= 1
            lose()

    return Fault(before=before, after=after)
