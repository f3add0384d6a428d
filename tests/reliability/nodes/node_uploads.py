"""Jobs whose nodes have disks of their own, and a durable tier, killed at every system call on any of them.

Two nodes with one rank each or two, each node a directory under one path. After each kill two jobs go on,
each on a copy of what was left: one with all of it, one after the loss of a node, of the other, or of both.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, Upload
from ckpt_core.commit import Catalog, verify
from ckpt_core.errors import CheckpointError
from ckpt_core.names import MANIFEST, MARKER, METADATA, step_name
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import FaultyStorage
from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.kills import start
from tests.reliability.disk.traps import RankCall, Recorder, Trap, rank_calls
from tests.reliability.disk.victims import Rank, state_of, values
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.uploads.upload_jobs import require_tidy, steps_in

_ROOT: Final = "/disk/of/the/node/run"
_TIER: Final = "tier"
_NODES: Final = 2
_HISTORY: Final = (1, 2)
_SAVED: Final = (3, 4)
_NEXT: Final = 2
_KEPT: Final = 2
_ATTEMPTS: Final = 3
_LIMIT_SECONDS: Final = 100.0
_LOSSES: Final = ((0,), (1,), (0, 1))
_ON_EVERY_DISK: Final = (MARKER, MANIFEST, METADATA)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NodeScene:
    """A job on two nodes; all of it is killed.

    Attributes:
        per_node: how many ranks on each.
        replicas: of every file.
        lost: the nodes whose disks are empty when it starts.
    """

    per_node: int = 1
    replicas: int = 1
    lost: Sequence[int] = ()

    def __str__(self) -> str:
        twins = f", replicas={self.replicas}" if self.replicas > 1 else ""
        lost = "".join(f", node {node} new" for node in self.lost)
        return f"{_NODES} x {self.per_node} ranks with uploads{twins}{lost}"

    @property
    def world_size(self) -> int:
        """Of the job."""
        return _NODES * self.per_node


SCENES: Final = (
    NodeScene(),
    NodeScene(per_node=2),
    NodeScene(lost=(1,)),
    NodeScene(lost=(0, 1)),
    NodeScene(replicas=2),
)


NodePoint: TypeAlias = RankCall[NodeScene]


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every scene, or at the chosen ones of each."""
    for scene in SCENES:
        if not choice.may_name(str(scene)):
            continue
        template = folder / f"template-{SCENES.index(scene)}"
        points = _rehearse(scene, template)
        for number, point in enumerate(choice.of(points)):
            yield from _case(point, number, template, folder / "case")
        shutil.rmtree(template)


def _manager(base: Path, scene: NodeScene, rank: Rank) -> CheckpointManager:
    disk = FaultyStorage(LocalStorage(base / f"node-{rank.number // scene.per_node}"), url=_ROOT)
    return CheckpointManager(
        disk,
        save=EverySteps(1),
        keep=KeepLatest(_KEPT),
        replicas=scene.replicas,
        upload=Upload(base / _TIER, keep=KeepLatest(_KEPT), when_busy="queue"),
    )


def _live(base: Path, scene: NodeScene, rank: Rank, steps: Sequence[int], tell: forks.Tell) -> int:
    """Resume, save every step, and say what was committed and what was uploaded. Collective."""
    state = state_of(0, rank)
    with _manager(base, scene, rank) as checkpoints:
        resumed = checkpoints.resume(state) or 0
        tell({"resumed": resumed, "right": not resumed or values(state) == values(state_of(resumed, rank))})
        checkpoints._repairer.wait()  # kills hit all of it, and no later save makes it pointless
        if resumed and not rank.number:
            tell({"lacking": _lacking(checkpoints.storage, resumed)})
        for step in steps or range(resumed + 1, resumed + _NEXT + 1):
            handle = checkpoints.maybe_save(step, state_of(step, rank))
            if handle is None:
                raise PromiseBrokenError(f"step {step} was not due")
            handle.uploaded.add_done_callback(
                lambda uploaded: uploaded.result() and tell({"uploaded": uploaded.result().step})
            )
            handle.result()
            tell({"committed": step})
    return resumed


def _lacking(root: Storage, step: int) -> list[str]:
    """What the disks of all nodes together lack of the checkpoint resumed, and each of what all have."""
    name = Catalog(root).find(step=step).name
    places = [
        f"{part.url}: no {path}"
        for part in root.parts
        for path in _ON_EVERY_DISK
        if not part.exists(f"{name}/{path}")
    ]
    return [*map(str, verify(root, name)), *places]


def _rehearse(scene: NodeScene, template: Path) -> list[NodePoint]:
    """Make a history, and return every point of a job that goes on from there and that nobody kills."""
    rehearsal = template.with_name(f"{template.name}-rehearsal")

    def history(rank: Rank, tell: forks.Tell) -> None:
        before = set(sys.modules)
        _live(template, scene, rank, _HISTORY, lambda _said: None)
        tell(sorted(set(sys.modules) - before))

    def act(rank: Rank, tell: forks.Tell) -> None:
        job = partial(_live, rehearsal, scene, rank, _SAVED, lambda _said: None)
        tell([asdict(call) for call in Recorder(rehearsal).record(job)])

    forks.adopt(forks.answered(_run_job(scene, history)[0]))
    for node in scene.lost:
        shutil.rmtree(template / f"node-{node}")
    shutil.copytree(template, rehearsal)
    children = _run_job(scene, act)
    shutil.rmtree(rehearsal)
    return rank_calls(scene, [forks.answered(child) for child in children])


def _run_job(scene: NodeScene, act: Any) -> list[forks.Child]:
    with start(scene.world_size, act) as children:
        forks.gather(children, _LIMIT_SECONDS)
    return children


def _case(point: NodePoint, number: int, template: Path, folder: Path) -> list[Outcome]:
    """Kill there, and go on twice: with what is left, and without some nodes' disks."""
    for attempt in range(_ATTEMPTS):
        base = folder / f"{attempt}"
        shutil.copytree(template, base)
        children = _killed(point, base)
        if any(child.killed for child in children):
            break
        # Another order of threads may have fewer calls: aim earlier.
        point = replace(point, number=point.number * 9 // 10)
    told = [message for child in children for message in child.told]
    problem = "" if any(child.killed for child in children) else f"not killed: {told}"
    uploaded = max([_HISTORY[-1], *(message.get("uploaded", 0) for message in told)])
    committed = max([uploaded, *(message.get("committed", 0) for message in told)])
    losses = _LOSSES[number % len(_LOSSES)]
    found = []
    for lost in ((), losses):
        left = folder / "left"
        shutil.copytree(base, left)
        for node in lost:
            shutil.rmtree(left / f"node-{node}", ignore_errors=True)
        survives = not lost or (point.scene.replicas > 1 and len(lost) < _NODES and not point.scene.lost)
        acknowledged = committed if survives else uploaded
        resumed, broken = _seen(point.scene, left, acknowledged)
        kind = "killed" + "".join(f", node {node} lost" for node in lost)
        found.append(
            Outcome(
                sweep=f"{point.scene}: {kind}",
                point=point.where,
                kills=0 if lost else sum(child.killed for child in children),
                acknowledged=acknowledged,
                resumed=resumed,
                problem=problem or broken,
            )
        )
        shutil.rmtree(left)
    shutil.rmtree(folder)
    return found


def _killed(point: NodePoint, base: Path) -> list[forks.Child]:
    def act(rank: Rank, tell: forks.Tell) -> None:
        job = partial(_live, base, point.scene, rank, _SAVED, tell)
        if rank.number == point.rank:
            Trap(point.number, point.when, everyone=True).spring(base, job)
        else:
            job()

    return _run_job(point.scene, act)


def _seen(scene: NodeScene, base: Path, acknowledged: int) -> tuple[int | None, str]:
    """The step from which a fresh job on the same nodes resumes, and which promise was broken, "" if none."""

    def act(rank: Rank, tell: forks.Tell) -> None:
        tell({"done": _live(base, scene, rank, (), tell)})

    children = _run_job(scene, act)
    for child in children:
        if not any("done" in message for message in child.told):
            return None, f"the next job ended with {child.status}: {child.told[-1:]}"
    begun = [child.told[0] for child in children]
    steps = {message["resumed"] for message in begun}
    if len(steps) > 1:
        return None, f"the ranks resumed from different steps: {sorted(steps)}"
    (resumed,) = steps
    if not all(message["right"] for message in begun):
        return resumed, f"step {resumed} holds other values"
    if lacking := [
        each for child in children for message in child.told for each in message.get("lacking", [])
    ]:
        return resumed, f"step {resumed} is not whole on the disks after its repair: {lacking[:3]}"
    if resumed < acknowledged:
        return resumed, f"step {acknowledged} was acknowledged, {resumed} was resumed"
    return resumed, _problem_after(base, resumed + _NEXT)


def _problem_after(base: Path, last: int) -> str:
    """What is wrong on the disks after the next job, "" if nothing."""
    try:
        there = forks.answer(lambda: sorted(_durable(base / _TIER)))
    except (RuntimeError, CheckpointError) as error:
        return str(error)
    if max(there) != last or len(there) > _KEPT:
        return f"the durable tier has the steps {there} after step {last}"
    expected = {step_name(step) for step in range(last - _KEPT + 1, last + 1)}
    for node in range(_NODES):
        names = beside_own(base / f"node-{node}")
        # A save whose name a part has gets one of its lineage.
        if len(names) != _KEPT or {name[: len(step_name(0))] for name in names} != expected:
            return f"on the disk of node {node} are {sorted(names)}, not {sorted(expected)}"
    return ""


def _durable(tier: Path) -> set[int]:
    found = steps_in(tier, state_of)
    require_tidy(tier)
    return found
