"""A job that saves to a disk and uploads to a second tier, and the one that goes on after it was broken.

The second tier is a directory or a bucket. The state is a function of the step, so that a checkpoint is
recognised by its values; stock DCP must read them, too.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, final

import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, TrainState, Upload
from ckpt_core.commit import Catalog, verify
from ckpt_core.names import data_name, step_name
from ckpt_core.storage import LocalStorage
from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.victims import ALONE, Rank, state_of, values
from tests.reliability.outcome import Outcome

Damage = Literal["", "local", "apart", "same"]

EVERY: Final = 2
KEPT: Final = 2
HISTORY: Final = 5
"""Steps 1 to 5 were saved before, of which the tier has 2, 4 and, as the last one, 5."""
LAST: Final = 8
"""The victim saves 6, 7 and 8."""
NEXT: Final = 2
"""How many steps the job after the crash saves."""

_LIMIT_SECONDS: Final = 100.0
_HIDDEN: Final = {".metadata", ".metadata.replica"}
_SPOILED: Final = step_name(HISTORY)
_FLIPPED: Final = 5000
_COLUMNS: Final = 3


class Killed(Protocol):
    """Where a job was killed."""

    @property
    def scene(self) -> Scene:
        """What the job does."""
        ...

    @property
    def sweep(self) -> str:
        """The row of the table."""
        ...

    @property
    def where(self) -> str:
        """The place without the scene."""
        ...


class Place(Protocol):
    """Where the job of one case saves.

    Attributes:
        local: the nearest tier.
    """

    local: Path

    def upload(self, **options: Any) -> Upload:
        """Return the second tier, as a user gives it."""
        ...

    def content(self) -> Path:
        """Return a directory with what the second tier holds now, a copy or not."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisks:
    """Both tiers in one directory: its name is all there is to know."""

    folder: Path

    @property
    def local(self) -> Path:
        """The nearest tier."""
        return self.folder / "local"

    @property
    def tier(self) -> Path:
        """The second one."""
        return self.folder / "tier"

    def upload(self, **options: Any) -> Upload:
        """Return the second tier, as a user gives it."""
        return Upload(self.tier, **options)

    def content(self) -> Path:
        """Return a directory with what the second tier holds."""
        return self.tier


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the victim finds, and how it saves.

    Attributes:
        world_size: how many ranks; all of them are killed.
        new_disk: whether the local tier is gone when it starts.
        waits: whether it waits for each upload before it saves again; else both go on at the same time.
        damage: what is damaged of the newest checkpoint: the copy on the disk; both copies, in different
            files; or both in the same file.
        columns: how large the state is.
        compressed: whether uploads are compressed.
    """

    world_size: int = 1
    new_disk: bool = False
    waits: bool = False
    damage: Damage = ""
    columns: int = _COLUMNS
    compressed: bool = False

    def __str__(self) -> str:
        disk = "on a new disk" if self.new_disk else "on its disk"
        saves = "one after the other" if self.waits else "during saves"
        damage = {"": "", "local": "damaged, ", "apart": "both damaged, ", "same": "both damaged alike, "}
        parts = "in parts, " if self.columns > _COLUMNS else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        parts = "compressed, " if self.compressed else parts
        return f"uploads {saves}, {parts}{disk}, {damage[self.damage]}{ranks}"

    @property
    def acknowledged(self) -> tuple[int, int]:
        """What was acknowledged and is whole before the victim begins: with both tiers, with the second."""
        return {"": (5, 5), "local": (5, 5), "apart": (5, 4), "same": (4, 4)}[self.damage]

    def state_of(self, step: int, rank: Rank = ALONE) -> TrainState:
        """Return a state whose every value depends on the step."""
        return state_of(step, rank, columns=self.columns)

    def damaged(self, *, local: bool) -> Collection[str]:
        """Return the names of the checkpoints of a tier that may be damaged."""
        return {_SPOILED} if self.damage and (local or self.damage != "local") else ()


def spoil(scene: Scene, local: Path, tier: Path) -> None:
    """Lose or damage what the scene says; `tier` holds what the second tier will."""
    if scene.new_disk:
        shutil.rmtree(local)
    if scene.damage:
        _flip(local / _SPOILED / data_name(0, 0))
    if scene.damage == "apart":
        (tier / _SPOILED / ".metadata").write_bytes(b"lost")
    if scene.damage == "same":
        path = tier / _SPOILED / data_name(0, 0)
        path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[min(_FLIPPED, len(content) - 1)] ^= 1
    path.write_bytes(content)


def manager(place: Place, scene: Scene, **options: Any) -> CheckpointManager:
    """Return what the victims save with, and those who come after them."""
    # With a queue, the number of uploads does not depend on which thread is faster.
    compress = "zstd" if scene.compressed else None
    upload = place.upload(every=EVERY, keep=KeepLatest(KEPT), when_busy="queue", compress=compress)
    # Calls are numbered, and a journal would make its own among them.
    options = {"save": EverySteps(1), "keep": KeepLatest(KEPT), "journal": False, **options}
    return CheckpointManager(place.local, upload=upload, **options)


def train(place: Place, rank: Rank, scene: Scene, tell: forks.Tell) -> None:
    """Resume, save every step, and say what was committed and what was uploaded. Collective."""
    with manager(place, scene) as checkpoints:
        begun = checkpoints.resume(scene.state_of(0, rank)) or 0
        _require(begun >= scene.acknowledged[0], f"step {begun} was resumed before anybody was killed")
        for step in range(HISTORY + 1, LAST + 1):
            handle = checkpoints.maybe_save(step, scene.state_of(step, rank))
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


def go_on(place: Place, scene: Scene, acknowledged: int) -> int:
    """Resume, save on, and let everything be uploaded, as a job of one rank; the step that was resumed.

    Raises:
        PromiseBrokenError: with what was promised, and what is there.
    """
    newest = max(max(_both(place, scene)[0], default=0), max(_both(place, scene)[1], default=0))
    state = scene.state_of(0)
    with manager(place, scene) as checkpoints:
        resumed = checkpoints.resume(state) or 0
        _require(resumed >= acknowledged, f"step {acknowledged} was acknowledged, {resumed} was resumed")
        _require(resumed >= newest, f"step {resumed} was resumed, but there was {newest}")
        _require(values(state) == values(scene.state_of(resumed)), f"step {resumed} holds other values")
        after = range(resumed + 1, resumed + NEXT + 1)
        handles = [checkpoints.save(step, scene.state_of(step)) for step in after]
        uploads = [handle.uploaded for handle in handles if handle.result()]
    _require(any(upload.result() for upload in uploads), "neither of two saves was uploaded")
    for where, steps in zip(("local", "tier"), _both(place, scene), strict=True):
        _require(max(steps) == resumed + NEXT, f"the last save is not in {where}: {sorted(steps)}")
        _require(len(steps) <= KEPT, f"retention was not applied in {where}: {sorted(steps)}")
    for root in (place.local, place.content()):
        require_tidy(root)
    return resumed


def _both(place: Place, scene: Scene) -> tuple[set[int], set[int]]:
    """Steps of the whole checkpoints of both tiers."""
    here = steps_in(place.local, scene.state_of, damaged=scene.damaged(local=True))
    return here, steps_in(place.content(), scene.state_of, damaged=scene.damaged(local=False))


def steps_in(root: Path, expected: Callable[[int], TrainState], *, damaged: Collection[str] = ()) -> set[int]:
    """Return the steps of all committed checkpoints.

    Each must verify, and hold what was saved at its step, but for those that were damaged on purpose: they
    are left out while they do not verify, or are marked: a kill after a repair leaves the mark.
    """
    storage, found = LocalStorage(root), set[int]()
    if root.exists():
        for info in Catalog(storage).committed(abandoned=True):
            failures = verify(storage, info.name)
            if info.name in damaged and (failures or info.damaged is not None):
                continue
            _require(not failures, f"{root.name}/{info.name} is committed and damaged: {failures}")
            exact = _holds(root / info.name, expected(0), expected(info.step))
            _require(exact, f"{root.name}/{info.name} holds other values")
            found.add(info.step)
    return found


def _holds(folder: Path, state: TrainState, wanted: TrainState) -> bool:
    """Whether stock DCP reads from a checkpoint what was saved."""
    read, expected = _tensors(state), _tensors(wanted)
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


def require_tidy(root: Path) -> None:
    """Nothing is left but checkpoints, their files, and the files of the root."""
    names = {info.name for info in Catalog(LocalStorage(root)).committed(abandoned=True)}
    # What was damaged and in the way is kept for a person to look at.
    there = {name for name in beside_own(root) if not name.startswith(".replaced-")}
    left = there - names
    for name in names:
        # What a checkpoint may hold is in its manifest, but for what a copy or a replacement forgot.
        left |= {f"{name}/{path.name}" for path in (root / name).glob(".*") if path.name not in _HIDDEN}
        left |= {f"{name}/{path.name}" for path in (root / name).rglob("*.tmp")}
    _require(not left, f"left behind in {root.name}: {sorted(left)}")


def prepare(template: OnDisks, scene: Scene) -> None:
    """Make a history in both tiers; whatever a job imports is there afterwards for all."""

    def act() -> list[str]:
        before = set(sys.modules)
        with manager(template, scene) as checkpoints:
            for step in range(1, HISTORY + 1):
                handle = checkpoints.maybe_save(step, scene.state_of(step))
                if handle is not None:
                    handle.uploaded.result()
        warm = OnDisks(folder=template.folder.with_name(f"{template.folder.name}-warm"))
        shutil.copytree(template.folder, warm.folder)
        train(warm, ALONE, scene, lambda _said: None)
        go_on(warm, scene, LAST)
        return sorted(set(sys.modules) - before)

    forks.adopt(forks.answer(act))


def seen(place: Place, scene: Scene, acknowledged: int) -> tuple[int | None, str]:
    """What a fresh process makes of it; one that hangs is killed, and that is a problem."""
    child = forks.fork(lambda tell: tell(go_on(place, scene, acknowledged)))
    if forks.gather([child], _LIMIT_SECONDS):
        return None, f"the next job still ran after {_LIMIT_SECONDS:g} s"
    told = child.told[-1] if child.told else f"it ended with {child.status}"
    return (told, "") if isinstance(told, int) else (None, str(told))


def told_by(children: Sequence[forks.Child]) -> list[dict[str, Any]]:
    """Everything that the ranks said."""
    return [message for child in children for message in child.told]


def judged(
    point: Killed, children: Sequence[forks.Child], places: tuple[Place, Place], problem: str = ""
) -> list[Outcome]:
    """Go on twice after a kill: with what is left, and without the local disk."""
    kills = sum(child.killed for child in children)
    problem = problem or ("" if kills else f"not killed: {told_by(children)}")
    found = []
    for kind, place, acknowledged in zip(
        ("killed", "killed, disk lost"), places, acknowledged_by(point.scene, children), strict=True
    ):
        resumed, broken = seen(place, point.scene, acknowledged)
        found.append(
            Outcome(
                sweep=f"{point.sweep}: {kind}",
                point=point.where,
                kills=kills if kind == "killed" else 0,
                acknowledged=acknowledged,
                resumed=resumed,
                problem=problem or broken,
            )
        )
    return found


def acknowledged_by(scene: Scene, children: Sequence[forks.Child]) -> tuple[int, int]:
    """The newest step that the ranks had been told of: with both tiers, with the second alone."""
    told, (committed, uploaded) = told_by(children), scene.acknowledged
    uploaded = max([uploaded, *(message.get("uploaded", 0) for message in told)])
    return max([committed, uploaded, *(message.get("committed", 0) for message in told)]), uploaded


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PromiseBrokenError(otherwise)
