"""A job that saves to a disk and uploads to a second one is killed at every system call on either.

After each kill two jobs go on, each on a copy of what was left: one with both tiers, one without the first.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, TrainState, Upload
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.kills import start
from tests.reliability.disk.traps import Call, Recorder, Trap, When
from tests.reliability.disk.victims import ALONE, Rank, state_of, values
from tests.reliability.outcome import Choice, Outcome, tried

EVERY: Final = 2
KEPT: Final = 2
HISTORY: Final = 5
"""Steps 1 to 5 were saved before, of which the tier has 2, 4 and, as the last one, 5."""
LAST: Final = 8
"""The victim saves 6, 7 and 8."""
NEXT: Final = 2
"""How many steps the job after the crash saves."""

_LOCAL: Final = "local"
_TIER: Final = "tier"
_JOBS: Final = 2
_ATTEMPTS: Final = 3
_LIMIT_SECONDS: Final = 100.0
_KNOWN: Final = {"writer.json.lock", "tiers.json", "damaged.json.lock", "pins.json.lock"}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the victim finds, and how it saves.

    Attributes:
        world_size: how many ranks; all of them are killed.
        new_disk: whether the local tier is gone when it starts.
        waits: whether it waits for each upload before it saves again; else both go on at the same time.
    """

    world_size: int = 1
    new_disk: bool = False
    waits: bool = False

    def __str__(self) -> str:
        disk = "on a new disk" if self.new_disk else "on its disk"
        saves = "one after the other" if self.waits else "during saves"
        return f"uploads {saves}, {disk}, {self.world_size} rank{'s' * (self.world_size > 1)}"


SCENES: Final = (
    Scene(),
    Scene(waits=True),
    Scene(new_disk=True),
    Scene(world_size=2),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where the victim is killed: at the nth call of one rank, before it or after it."""

    scene: Scene
    rank: int
    number: int
    when: When
    call: Call

    def __str__(self) -> str:
        return f"{self.scene}: {self.where}"

    @property
    def where(self) -> str:
        """The place without the scene."""
        return f"rank {self.rank}, {self.when} {self.number}, {self.call.method} {self.call.key}"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every scene, or at the chosen ones of each."""
    template = folder / "template"
    _prepare(template)
    for scene in SCENES:
        if choice.may_name(str(scene)):
            points = choice.of(_rehearse(scene, template, folder))
            tasks = (partial(_case, point, template, folder / f"{i}") for i, point in enumerate(points))
            yield from tried(tasks, _JOBS // scene.world_size)
            for number in range(len(points)):
                shutil.rmtree(folder / f"{number}", ignore_errors=True)


def _manager(place: Path) -> CheckpointManager:
    # With a queue, the number of uploads does not depend on which thread is faster.
    upload = Upload(place / _TIER, every=EVERY, keep=KeepLatest(KEPT), when_busy="queue")
    # Calls are numbered, and a journal would make its own among them.
    options = {"save": EverySteps(1), "keep": KeepLatest(KEPT), "upload": upload, "journal": False}
    return CheckpointManager(place / _LOCAL, **options)


def train(place: Path, rank: Rank, scene: Scene, tell: forks.Tell) -> None:
    """Resume, save every step, and say what was committed and what was uploaded. Collective."""
    with _manager(place) as checkpoints:
        checkpoints.resume(state_of(0, rank))
        for step in range(HISTORY + 1, LAST + 1):
            handle = checkpoints.maybe_save(step, state_of(step, rank))
            if handle is None:
                raise PromiseBrokenError(f"step {step} was not due")
            handle.uploaded.add_done_callback(
                lambda uploaded: uploaded.result() and tell({"uploaded": uploaded.result().step})
            )
            handle.result()
            tell({"committed": step})
            if scene.waits:
                handle.uploaded.result()
    tell({"ended": True})


def go_on(place: Path, acknowledged: int) -> int:
    """Resume, save on, and let everything be uploaded, as a job of one rank; the step that was resumed.

    Raises:
        PromiseBrokenError: with what was promised, and what is there.
    """
    newest = max(max(_steps(place / tier), default=0) for tier in (_LOCAL, _TIER))
    state = state_of(0)
    with _manager(place) as checkpoints:
        resumed = checkpoints.resume(state) or 0
        _require(resumed >= acknowledged, f"step {acknowledged} was acknowledged, {resumed} was resumed")
        _require(resumed == newest, f"step {resumed} was resumed, but there was {newest}")
        _require(values(state) == values(state_of(resumed)), f"step {resumed} holds other values")
        handles = [checkpoints.save(step, state_of(step)) for step in range(resumed + 1, resumed + NEXT + 1)]
        uploads = [handle.uploaded for handle in handles if handle.result()]
    last = resumed + NEXT
    _require(any(upload.result() for upload in uploads), "neither of two saves was uploaded")
    for tier in (_LOCAL, _TIER):
        steps = _steps(place / tier)
        _require(max(steps) == last, f"the last save is not in {tier}: {sorted(steps)}")
        _require(len(steps) <= KEPT, f"retention was not applied in {tier}: {sorted(steps)}")
        _require_tidy(place / tier)
    return resumed


def _steps(root: Path) -> set[int]:
    """Steps of all committed checkpoints; each must verify, and hold what was saved at its step."""
    storage, found = LocalStorage(root), set()
    if root.exists():
        for info in Catalog(storage).committed(abandoned=True):
            failures = verify(storage, info.name)
            _require(not failures, f"{root.name}/{info.name} is committed and damaged: {failures}")
            _require(_holds(root / info.name, info.step), f"{root.name}/{info.name} holds other values")
            found.add(info.step)
    return found


def _holds(folder: Path, step: int) -> bool:
    """Whether stock DCP reads from a checkpoint what was saved at a step."""
    state, expected = state_of(0), _tensors(state_of(step))
    read = _tensors(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(read, checkpoint_id=folder)
    return all(torch.equal(read[key], expected[key]) for key in expected)


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Each tensor of a state by its key in DCP."""
    found = dict[str, torch.Tensor]()

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, torch.Tensor):
            found[path] = tree
        elif isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}.{key}" if path else str(key))

    walk(state.capture().sharded[""], "")
    return found


def _require_tidy(root: Path) -> None:
    """Nothing is left but checkpoints, their files, and the files of the root."""
    names = {info.name for info in Catalog(LocalStorage(root)).committed(abandoned=True)}
    left = {path.name for path in root.iterdir()} - names - _KNOWN
    for name in names:
        # What a checkpoint may hold is in its manifest, but for what a copy or a replacement forgot.
        left |= {f"{name}/{path.name}" for path in (root / name).glob(".*") if path.name != ".metadata"}
        left |= {f"{name}/{path.name}" for path in (root / name).rglob("*.tmp")}
    _require(not left, f"left behind in {root.name}: {sorted(left)}")


def _prepare(template: Path) -> None:
    """A history in both tiers; whatever a job imports is there afterwards for all."""

    def act() -> list[str]:
        before = set(sys.modules)
        with _manager(template) as checkpoints:
            for step in range(1, HISTORY + 1):
                handle = checkpoints.maybe_save(step, state_of(step))
                if handle is not None:
                    handle.uploaded.result()
        warm = template.with_name("warm")
        shutil.copytree(template, warm)
        train(warm, ALONE, Scene(), lambda _said: None)
        go_on(warm, LAST)
        return sorted(set(sys.modules) - before)

    forks.adopt(forks.answer(act))


def _ground(scene: Scene, template: Path, place: Path) -> Path:
    shutil.copytree(template, place)
    if scene.new_disk:
        shutil.rmtree(place / _LOCAL)
    return place


def _rehearse(scene: Scene, template: Path, folder: Path) -> list[Point]:
    """Every point of a job that nobody kills."""
    place = _ground(scene, template, folder / f"rehearsal-{SCENES.index(scene)}")

    def act(rank: Rank, tell: forks.Tell) -> None:
        calls = Recorder(place).record(lambda: train(place, rank, scene, lambda _said: None))
        tell([asdict(call) for call in calls])

    with start(scene.world_size, act) as children:
        forks.gather(children, _LIMIT_SECONDS)
    return [
        Point(scene=scene, rank=rank, number=number, when=when, call=call)
        for rank, child in enumerate(children)
        for number, call in enumerate(Call(**fields) for fields in _answer(child))
        for when in call.moments
    ]


def _answer(child: forks.Child) -> list[dict[str, Any]]:
    told = child.told[-1] if child.told else None
    if not isinstance(told, list):
        raise RuntimeError(f"the rehearsal ended with {child.status}: {told}")
    return told


def _case(point: Point, template: Path, folder: Path) -> list[Outcome]:
    """Kill there, and go on twice: with what is left, and without the local disk."""
    for attempt in range(_ATTEMPTS):
        place = _ground(point.scene, template, folder / f"{attempt}")
        children, late = _killed(point, place)
        # Another order of threads may have fewer calls.
        if any(child.killed for child in children):
            break
    problem = "" if any(child.killed for child in children) and not late else f"not killed: {_told(children)}"
    uploaded = max([HISTORY, *(message.get("uploaded", 0) for message in _told(children))])
    committed = max([uploaded, *(message.get("committed", 0) for message in _told(children))])
    lost = folder / "lost"
    shutil.copytree(place / _TIER, lost / _TIER)
    found = []
    for kind, left, acknowledged in (("killed", place, committed), ("killed, disk lost", lost, uploaded)):
        resumed, broken = _seen(left, acknowledged)
        found.append(
            Outcome(
                sweep=f"{point.scene}: {kind}",
                point=point.where,
                kills=sum(child.killed for child in children) if kind == "killed" else 0,
                acknowledged=acknowledged,
                resumed=resumed,
                problem=problem or broken,
            )
        )
    if not any(outcome.problem for outcome in found):
        shutil.rmtree(folder)
    return found


def _killed(point: Point, place: Path) -> tuple[list[forks.Child], list[int]]:
    def act(rank: Rank, tell: forks.Tell) -> None:
        job = partial(train, place, rank, point.scene, tell)
        if rank.number == point.rank:
            Trap(point.number, point.when, everyone=True).spring(place, job)
        else:
            job()

    with start(point.scene.world_size, act) as children:
        return children, forks.gather(children, _LIMIT_SECONDS)


def _told(children: Sequence[forks.Child]) -> list[dict[str, Any]]:
    return [message for child in children for message in child.told]


def _seen(place: Path, acknowledged: int) -> tuple[int | None, str]:
    """What a fresh process makes of it; one that hangs is killed, and that is a problem."""
    child = forks.fork(lambda tell: tell(go_on(place, acknowledged)))
    if forks.gather([child], _LIMIT_SECONDS):
        return None, f"the next job still ran after {_LIMIT_SECONDS:g} s"
    told = child.told[-1] if child.told else f"it ended with {child.status}"
    return (told, "") if isinstance(told, int) else (None, str(told))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PromiseBrokenError(otherwise)
