"""Kills of jobs whose nodes have disks of their own, and the loss of whole nodes.

Two nodes with one rank each, simulated by a directory per node under one path. A job is killed before and
after everything that it does to either disk; then, in some sweeps, the directory of a node is removed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from ckpt_core import CheckpointError, CheckpointManager, KeepLatest
from ckpt_core.errors import PartialCheckpointError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage, Operation
from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome

_ROOT: Final = "/disk/of/the/node/run"
_NODES: Final = 2
_STEPS: Final = (1, 2, 3)
_CHANGES: Final = {
    *("create", "write", "close", "replace", "make_directory", "sync_directory"),
    *("rename", "exchange", "delete", "try_lock"),
}
_IDS: Final = re.compile(r"-[0-9a-f]{8,32}-|\.probe-[0-9a-f]{16}")
_DEADLINE_SECONDS: Final = 4.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSweep:
    """A job, who of it is killed, and what is lost with it.

    Attributes:
        name: for people.
        together: whether all ranks die; else the one at whose disk the point is.
        lost: the node whose disk is lost; None if all are kept.
        replicas: of every file.
        replaces: whether the last step is saved again under its name.
    """

    name: str
    together: bool = True
    lost: int | None = None
    replicas: int = 1
    replaces: bool = False


SWEEPS: Final = (
    NodeSweep(name="2 nodes, all killed"),
    NodeSweep(name="2 nodes, all killed, a checkpoint is replaced", replaces=True),
    NodeSweep(name="2 nodes, one killed", together=False),
    NodeSweep(name="2 nodes, all killed, node 0 lost", lost=0),
    NodeSweep(name="2 nodes, all killed, node 0 lost, replicas=2", lost=0, replicas=2),
    NodeSweep(name="2 nodes, all killed, node 1 lost, replicas=2", lost=1, replicas=2),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _NodePoint:
    """Before or after which operation on which node's disk."""

    sweep: NodeSweep
    node: int
    method: str
    key: str
    nth: int
    when: str

    def __str__(self) -> str:
        return f"{self.sweep.name}: {self.label}"

    @property
    def label(self) -> str:
        return f"{self.when} {self.method} {self.key} ({self.nth}) on node {self.node}"

    def fault(self) -> Fault:
        def kill(_: Operation) -> None:
            os.kill(0 if self.sweep.together else os.getpid(), signal.SIGKILL)

        key = self.key.replace("[", "?")
        hit = {self.when: kill}
        return Fault(method=self.method, key=key, nth=self.nth, **hit)


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every sweep, or at the chosen ones of each."""
    for sweep in SWEEPS:
        if not choice.may_name(sweep.name):
            continue
        points = _points(sweep, folder / "rehearsal")
        for number, point in enumerate(choice.of(points)):
            yield _kill(point, folder / f"{SWEEPS.index(sweep)}-{number}")


def _points(sweep: NodeSweep, base: Path) -> list[_NodePoint]:
    """Every point of a sweep, from a rehearsal in which nobody dies."""
    points: list[_NodePoint] = []
    for node, child in enumerate(_job(sweep, base)):
        operations, seen = child.told[-1]["operations"], Counter[tuple[str, str]]()
        for method, key in operations:
            place = method, _IDS.sub(lambda found: found[0][: found[0].find("-") + 1] + "*", key)
            points += (
                _NodePoint(sweep=sweep, node=node, method=method, key=place[1], nth=seen[place], when=when)
                for when in ("before", "after")
            )
            seen[place] += 1
    shutil.rmtree(base)
    return points


def _state(rank: int, step: int) -> dict[str, Any]:
    return {
        "model": {f"stage{rank}": torch.full((3000,), float(10 * step + rank))},
        "numbers": {"step": step},
    }


def _is_of(state: dict[str, Any], rank: int, step: int) -> bool:
    return (
        bool((state["model"][f"stage{rank}"] == 10 * step + rank).all()) and state["numbers"]["step"] == step
    )


def _manager(storage: FaultyStorage, sweep: NodeSweep) -> CheckpointManager:
    # Operations are numbered, and a journal would make its own among them.
    return CheckpointManager(
        storage,
        keep=KeepLatest(1),
        replicas=sweep.replicas,
        deadline_seconds=_DEADLINE_SECONDS,
        journal=False,
    )


def _disk(base: Path, node: int, faults: Sequence[Fault] = ()) -> FaultyStorage:
    return FaultyStorage(LocalStorage(base / f"node-{node}"), faults, url=_ROOT)


def _job(sweep: NodeSweep, base: Path, point: _NodePoint | None = None) -> list[forks.Child]:
    """The ranks of a job, when they have ended."""

    def be(rank: int, tell: forks.Tell) -> None:
        faults = [point.fault()] if point is not None and point.node == rank else []
        storage = _disk(base, rank, faults)
        try:
            checkpoints = _manager(storage, sweep)
            checkpoints.resume(_state(rank, 0))
            for step in _STEPS:
                checkpoints.save(step, _state(rank, step))
                checkpoints.wait()
                tell({"committed": step})
            if sweep.replaces:
                checkpoints.save(_STEPS[-1], _state(rank, _STEPS[-1]), name=f"step-{_STEPS[-1]:09d}")
            checkpoints.close()
        except (CheckpointError, RuntimeError) as error:
            # The others of one that was killed: gloo raises RuntimeError for those who were in a collective.
            tell({"failed": f"{type(error).__name__}: {error}"})
            return
        done = [[each.method, each.key] for each in storage.operations if each.method in _CHANGES]
        tell({"operations": done})

    with forks.ranks(_NODES, be) as children:
        forks.gather(children)
    return children


def _heirs(sweep: NodeSweep, base: Path) -> list[forks.Child]:
    """The next job: it resumes, saves, and resumes again."""

    def be(rank: int, tell: forks.Tell) -> None:
        with _manager(_disk(base, rank), sweep) as checkpoints:
            state = _state(rank, 0)
            try:
                step = checkpoints.resume(state)
            except PartialCheckpointError:
                tell({"resumed": "parts"})
                return
            tell({"resumed": step, "right": step is None or _is_of(state, rank, step)})
            checkpoints.save((step or 0) + 10, _state(rank, (step or 0) + 10))
        with _manager(_disk(base, rank), sweep) as checkpoints:
            state = _state(rank, 0)
            again = checkpoints.resume(state)
            tell({"again": again == (step or 0) + 10 and _is_of(state, rank, again)})

    with forks.ranks(_NODES, be) as children:
        forks.gather(children)
    return children


def _kill(point: _NodePoint, base: Path) -> Outcome:
    sweep = point.sweep
    ended = _job(sweep, base, point)
    told = [message for child in ended for message in child.told]
    acknowledged = max((message.get("committed", 0) for message in told), default=0)
    problem = "" if any(child.killed for child in ended) else "the point was not reached: this shows nothing"
    problem = next((message["error"] for message in told if "error" in message), problem)
    if sweep.lost is not None:
        shutil.rmtree(base / f"node-{sweep.lost}", ignore_errors=True)
    heirs = _heirs(sweep, base)
    resumed, broken = _judged(sweep, heirs, base)
    if sweep.lost is not None and sweep.replicas == 1:
        # What a lost node had cannot be resumed; it must not be passed for something else, either.
        acknowledged, resumed = 0, resumed or 0
    shutil.rmtree(base)
    return Outcome(
        sweep=sweep.name,
        point=point.label,
        kills=sum(child.killed for child in ended),
        acknowledged=acknowledged,
        resumed=resumed,
        problem=problem or broken,
    )


def _judged(sweep: NodeSweep, heirs: Sequence[forks.Child], base: Path) -> tuple[int | None, str]:
    """Return what the heirs resumed from, and which promise was broken, "" if none."""
    found = [{key: value for message in child.told for key, value in message.items()} for child in heirs]
    for each in found:
        if "error" in each:
            return None, each["error"]
    steps = [each.get("resumed") for each in found]
    if len(set(steps)) > 1:
        return None, f"the ranks resumed from different steps: {steps}"
    if steps[0] == "parts":
        whole = sweep.lost is None or sweep.replicas > 1
        return 0, "no disk is lost, but only parts were found" if whole else ""
    if not all(each.get("right") and each.get("again") for each in found):
        return steps[0], f"wrong values, or the next save was not found: {found}"
    left = [
        f"node-{node}/{name}"
        for node in range(_NODES)
        for name in beside_own(base / f"node-{node}")
        if name.startswith(".") and not name.startswith(".replaced-")
    ]
    return steps[0] or 0, f"left behind: {', '.join(left)}" if left else ""
