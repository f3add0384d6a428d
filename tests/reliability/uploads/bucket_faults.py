"""A bucket fails at every request of a job that uploads to it, and is well again.

The job must end by itself, with everything uploaded, whichever request it was and whatever became of it. Then
two jobs go on as after a kill: one with both tiers, one without the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from tests.reliability import forks
from tests.reliability.disk.kills import start
from tests.reliability.disk.victims import Rank
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.uploads.bucket_kills import InBucket, Point, ground, rehearse, sweep, without_disk
from tests.reliability.uploads.upload_jobs import (
    LAST,
    OnDisks,
    Scene,
    acknowledged_by,
    seen,
    told_by,
    train,
)
from tests.support.clouds import Cloud
from tests.support.service_faults import ServiceFault

TROUBLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "fails once": {"action": "error", "code": "InternalError", "count": 1},
    "throttles three requests": {"action": "error", "code": "SlowDown", "count": 3},
    "drops a request": {"action": "drop", "count": 1},
    "loses an answer": {"action": "lose", "count": 1},
    "cuts an answer short": {"action": "truncate", "count": 1},
}
_LIMIT_SECONDS: Final = 100.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Weakness:
    """What the service does at which request."""

    trouble: str
    point: Point

    def __str__(self) -> str:
        return f"{self.sweep}: {self.where}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        return f"{self.point.sweep}, {self.trouble}"

    @property
    def where(self) -> str:
        """Which request."""
        return f"{self.point.number}, {self.point.request}"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Try every trouble at every request of every scene on every service, or the chosen ones."""
    yield from sweep(choice, folder, _cases)


def _cases(cloud: Cloud, scene: Scene, template: OnDisks, choice: Choice) -> Iterator[Outcome]:
    folder = template.folder.parent
    points = rehearse(cloud, scene, template, folder / "rehearsal")
    first = [point for point in points if point.when == "before"]
    for trouble in TROUBLES:
        for case in choice.of(Weakness(trouble=trouble, point=point) for point in first):
            yield from _case(cloud, case, template, folder / "case")


def _case(cloud: Cloud, case: Weakness, template: OnDisks, folder: Path) -> list[Outcome]:
    """Fail there; the job ends; two others go on."""
    scene = case.point.scene
    place = ground(cloud, scene, template, folder / "0")
    children, problem = _ended(case, place)
    lost = without_disk(cloud, place, folder / "lost")
    kinds = ("went on", "went on, disk lost")
    found = []
    for kind, each, acknowledged in zip(kinds, (place, lost), acknowledged_by(scene, children), strict=True):
        resumed, broken = seen(each, scene, acknowledged)
        found.append(
            Outcome(
                sweep=f"{case.sweep}: {kind}",
                point=case.where,
                kills=0,
                acknowledged=acknowledged,
                resumed=resumed,
                problem=problem or broken,
            )
        )
        forks.answer(each.cloud.empty)
    shutil.rmtree(folder)
    return found


def _ended(case: Weakness, place: InBucket) -> tuple[list[forks.Child], str]:
    """Run the job; return its ranks, and what is wrong with their ends."""
    scene, begin = case.point.scene, forks.Gate()

    def act(rank: Rank, tell: forks.Tell) -> None:
        begin.wait()
        train(place, rank, scene, tell)

    with start(scene.world_size, act) as children:
        target = f"*{place.cloud.bucket}*"
        place.cloud.control.set(ServiceFault(target=target, nth=case.point.number, **TROUBLES[case.trouble]))
        begin.open()
        late = forks.gather(children, _LIMIT_SECONDS)
    begin.discard()
    place.cloud.control.clear()
    told = told_by(children)
    if late or any({"ended": True} not in child.told for child in children):
        return children, f"the job did not end: {told}"
    if {"uploaded": LAST} not in told:
        return children, f"the last checkpoint was not uploaded: {told}"
    return children, ""
