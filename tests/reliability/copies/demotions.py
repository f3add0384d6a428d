"""A demotion killed at every system call on the disk of its root.

Whatever is left, the whole state or its weights count, and verify; the newest stays whole; and the same
demotion then completes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.commit import Catalog, Inventory, Lease, collect_orphans, remove, verify
from ckpt_core.convert import weights_bytes, write_weights
from ckpt_core.root import Demoter
from ckpt_core.storage import LocalStorage, Storage
from tests.kit.own_files import beside_own
from tests.reliability import forks
from tests.reliability.copies.cases import Point, outcome_of
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.traps import Call, Recorder, Trap
from tests.reliability.outcome import Choice, Outcome, seen, tried

_SWEEP: Final = "a demotion on a local disk, killed"
_OLD, _NEW = 1, 2


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of the sweep, or at the chosen ones."""
    source = folder / "source"
    forks.forked(lambda _tell: make_run(source))
    if choice.may_name(_SWEEP):
        points = choice.of(_points(source, folder))
        yield from tried((partial(_case, point, source, folder) for point in points), 2)


def make_run(place: Path | Storage, **options: Any) -> None:
    """Two steps of a training, the second the newest."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(place, journal=False, **options) as manager:
        for step in (_OLD, _NEW):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            manager.save(step, TrainState(model=model, optimizer=optimizer))


def demote(storage: Storage) -> None:
    """Do what the owner of a root does, in this process."""
    with Lease.acquire(storage, "demotion") as lease:
        collect_orphans(storage, keep=())
        whole = [info for info in Catalog(storage).committed() if info.step == _OLD]
        there = {info.weights_of.save_id for info in Catalog(storage).survey().weights if info.weights_of}
        demoter = Demoter(
            storage,
            draft=lambda info, dtype, _stop: write_weights(storage, info, dtype),
            size=partial(weights_bytes, storage),
            close=lambda: None,
        )
        demoter.begin([(info, "bf16") for info in whole if info.save_id not in there])
        while demoter.is_busy:
            demoter.wait()
        if (error := demoter.take(lease.check)) is not None:
            raise error
        for info in Inventory(storage).droppable(lambda _history: whole):
            remove(storage, info)


def look(storage: Storage) -> int:
    """What can be resumed; then the demotion completes."""
    survey = Catalog(storage).survey()
    steps = {info.step for info in survey.everything}
    if [info.step for info in survey.committed][-1:] != [_NEW] or steps != {_OLD, _NEW} or survey.unreadable:
        raise PromiseBrokenError(f"lost: {survey}")
    _require_whole(storage, survey.everything)
    demote(storage)
    survey = Catalog(storage).survey()
    if [info.step for info in survey.committed] != [_NEW] or len(survey.weights) != 1:
        raise PromiseBrokenError(f"not completed: {survey}")
    _require_whole(storage, survey.everything)
    return _NEW


def _require_whole(storage: Storage, infos: Any) -> None:
    broken = {info.name: found for info in infos if (found := verify(storage, info.name))}
    if broken:
        raise PromiseBrokenError(f"what counts is damaged: {broken}")


def _points(source: Path, folder: Path) -> list[Point]:
    target = folder / "rehearsal"
    shutil.copytree(source, target)

    def rehearse() -> list[dict[str, Any]]:
        return [asdict(call) for call in Recorder(target).record(lambda: demote(LocalStorage(target)))]

    calls = [Call(**fields) for fields in forks.answer(rehearse)]
    return [
        Point(sweep=_SWEEP, number=number, when=when, label=f"{call.method} {call.key}")
        for number, call in enumerate(calls)
        for when in call.moments
    ]


def _case(point: Point, source: Path, folder: Path) -> list[Outcome]:
    target = folder / f"{point.when}-{point.number}"
    shutil.copytree(source, target)

    def be(tell: forks.Tell) -> None:
        trap = Trap(point.number, point.when, everyone=False)
        trap.spring(target, lambda: demote(LocalStorage(target)))
        tell("copied")

    child = forks.forked(be)
    resumed, problem = seen(lambda: look(LocalStorage(target)))
    strays = beside_own(target) - {info.name for info in Catalog(LocalStorage(target)).survey().everything}
    problem = problem or (f"left behind: {sorted(strays)}" if strays else "")
    problem = problem or ("" if child.killed or child.told else "it neither ended nor was killed")
    shutil.rmtree(target, ignore_errors=True)
    return [outcome_of(point, child, resumed, problem)]
