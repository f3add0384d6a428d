"""A job that uploads to a bucket is killed at every request that it sends there, before and after it is done.

S3, GCS and Azure, each with the client that users get. After each kill two jobs go on, each on a copy of
what was left: one with both tiers, one without the disk.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from ckpt_core import Upload
from tests.reliability import forks
from tests.reliability.disk.kills import start
from tests.reliability.disk.traps import When
from tests.reliability.disk.victims import Rank
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.uploads.upload_jobs import (
    OnDisks,
    Scene,
    judged,
    prepare,
    spoil,
    told_by,
    train,
)
from tests.support.clouds import Cloud
from tests.support.emulators import emulator, missing_for
from tests.support.service_faults import ServiceFault

KINDS: Final = ("s3", "gcs", "azure")
LARGE: Final = 200_000
"""Columns of two float32 matrices of eight rows: 12 MiB, more than two parts of an upload."""
SCENES: Final = (
    Scene(),
    Scene(waits=True),
    Scene(new_disk=True),
    Scene(world_size=2),
    Scene(damage="local"),
    Scene(damage="apart"),
    Scene(columns=LARGE),
    Scene(compressed=True),
)
_NAMES: Final = {"s3": "S3", "gcs": "GCS", "azure": "Azure"}
_ROOT: Final = "run"
_READS: Final = {"GET", "HEAD"}  # after one of them the bucket is as it was before
_PART_BYTES: Final = 5 * 2**20
_ATTEMPTS: Final = 3
_LIMIT_SECONDS: Final = 100.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InBucket:
    """A disk, and a bucket of this case alone.

    Attributes:
        local: the nearest tier.
        cloud: the bucket.
        options: further ones of its storage.
    """

    local: Path
    cloud: Cloud
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def upload(self, **options: Any) -> Upload:
        """Return the second tier, as a user gives it."""
        cloud = self.cloud
        storage = {**cloud.options, "write_block_bytes": _PART_BYTES, **self.options}
        return Upload(f"{cloud.scheme}://{cloud.bucket}/{_ROOT}", storage_options=storage, **options)

    def content(self) -> Path:
        """Return a directory with what the bucket holds now; a begun upload is in it, too."""
        folder = Path(tempfile.mkdtemp(dir=self.local.parent))
        for name in self.cloud.names():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.cloud.read(name))
        (folder / _ROOT).mkdir(exist_ok=True)
        for name in self.cloud.begun():
            (folder / f"{name}.tmp").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.tmp").touch()
        return folder / _ROOT

    def fill(self, folder: Path) -> None:
        """Make the bucket, with the files of a directory."""
        self.cloud.make()
        for path in folder.rglob("*"):
            # An upload that was begun cannot be copied.
            if path.is_file() and path.suffix != ".tmp":
                self.cloud.write(f"{_ROOT}/{path.relative_to(folder)}", path.read_bytes())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Before or after which request of all ranks together."""

    kind: str
    scene: Scene
    number: int
    when: When
    request: str

    def __str__(self) -> str:
        return f"{self.sweep}: {self.where}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        return f"{_NAMES[self.kind]}, {self.scene}"

    @property
    def where(self) -> str:
        """The place without the scene."""
        return f"{self.when} {self.number}, {self.request}"


Cases: TypeAlias = Callable[[Cloud, Scene, OnDisks, Choice], Iterator[Outcome]]
"""A service, what the job does, the history, which cases -> what comes of them."""


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every scene on every service, or at the chosen ones of each."""
    yield from sweep(choice, folder, _cases)


def sweep(choice: Choice, folder: Path, cases: Cases) -> Iterator[Outcome]:
    """Try the cases of every scene on every service, or the chosen ones of each."""
    with ExitStack() as stack:
        for kind in KINDS:
            scenes = [scene for scene in SCENES if choice.may_name(f"{_NAMES[kind]}, {scene}")]
            if not scenes:
                continue
            if missing := missing_for(kind):
                raise RuntimeError(missing)
            endpoint = stack.enter_context(emulator(kind))
            for scene in scenes:
                template = OnDisks(folder=folder / f"template-{scene.columns}")
                if not template.folder.exists():
                    prepare(template, scene)
                yield from cases(Cloud(kind=kind, endpoint=endpoint), scene, template, choice)


def _cases(cloud: Cloud, scene: Scene, template: OnDisks, choice: Choice) -> Iterator[Outcome]:
    folder = template.folder.parent
    for point in choice.of(rehearse(cloud, scene, template, folder / "rehearsal")):
        yield from _case(cloud, point, template, folder / "case")


def fresh(cloud: Cloud) -> Cloud:
    """Return a bucket that does not exist yet, in the same service."""
    return Cloud(kind=cloud.kind, endpoint=cloud.endpoint, bucket=f"bucket-{uuid.uuid4().hex}")


def ground(cloud: Cloud, scene: Scene, template: OnDisks, folder: Path) -> InBucket:
    """A disk and a bucket with a copy of the history, as the victim finds them."""
    history = OnDisks(folder=folder)
    shutil.copytree(template.folder, folder)
    spoil(scene, history.local, history.tier)
    place = InBucket(local=history.local, cloud=fresh(cloud))
    forks.answer(lambda: place.fill(history.tier))
    return place


def rehearse(cloud: Cloud, scene: Scene, template: OnDisks, folder: Path) -> list[Point]:
    """Every point of a job that nobody kills."""
    place = ground(cloud, scene, template, folder)
    begun = len(cloud.control.log())

    def act(rank: Rank, tell: forks.Tell) -> None:
        train(place, rank, scene, tell)

    with start(scene.world_size, act) as children:
        late = forks.gather(children, _LIMIT_SECONDS)
    if late or any({"ended": True} not in child.told for child in children):
        raise RuntimeError(f"{cloud.kind}, {scene}: the rehearsal told {told_by(children)}")
    log = [each for each in cloud.control.log(begun) if place.cloud.bucket in each.target]
    shutil.rmtree(folder)
    return [
        Point(
            kind=cloud.kind,
            scene=scene,
            number=number,
            when=when,
            request=f"{request.method} {request.target.replace(place.cloud.bucket, '*')}",
        )
        for number, request in enumerate(log)
        for when in _moments(request.method)
    ]


def _moments(method: str) -> tuple[When, ...]:
    return ("before",) if method in _READS else ("before", "after")


def _case(cloud: Cloud, point: Point, template: OnDisks, folder: Path) -> list[Outcome]:
    """Kill there, and go on twice: with what is left, and without the disk."""
    scene = point.scene
    for attempt in range(_ATTEMPTS):
        place = ground(cloud, scene, template, folder / f"{attempt}")
        children = _killed(point, place)
        if any(child.killed for child in children):
            break
        # Another order of threads may have fewer requests: aim earlier.
        point = replace(point, number=point.number * 9 // 10)
    lost = without_disk(cloud, place, folder / "lost")
    found = judged(point, children, (place, lost))
    for each in (place, lost):
        forks.answer(each.cloud.empty)
    shutil.rmtree(folder)
    return found


def without_disk(cloud: Cloud, place: InBucket, folder: Path) -> InBucket:
    """Return an empty disk, and a copy of the bucket."""
    lost = InBucket(local=folder / "local", cloud=fresh(cloud))
    folder.mkdir()
    forks.answer(lambda: lost.fill(place.content()))
    return lost


def _killed(point: Point, place: InBucket) -> list[forks.Child]:
    begin = forks.Gate()

    def act(rank: Rank, tell: forks.Tell) -> None:
        begin.wait()
        train(place, rank, point.scene, tell)

    with start(point.scene.world_size, act) as children:
        action: Final = "kill" if point.when == "before" else "kill_after"
        pids = [child.pid for child in children]
        target = f"*{place.cloud.bucket}*"
        fault = ServiceFault(action=action, target=target, nth=point.number, count=1, pids=pids)
        place.cloud.control.set(fault)
        begin.open()
        forks.gather(children, _LIMIT_SECONDS)
    begin.discard()
    place.cloud.control.clear()
    return children
