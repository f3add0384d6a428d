"""Cells on real ranks, many one after another in the same processes, and what became of each."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.exactness.cells import Cell
from tests.exactness.training import Job, Observed
from tests.exactness.verdicts import Runs, Verdict, judge
from tests.kit.ranks import RanksFailedError, run_ranks

HOSTS: Final = {
    "plain": "tests.exactness.hosts.plain_host",
    "lightning": "tests.exactness.hosts.lightning_host",
    "fabric": "tests.exactness.hosts.fabric_host",
    "accelerate": "tests.exactness.hosts.accelerate_host",
    "trainer": "tests.exactness.hosts.trainer_host",
}
"""Value on the axis -> module whose `train(job)` runs one training on this rank."""

_OURS: Final = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt")
_AT_ONCE: Final = 20
"""Trainings of one set of processes, so that a rank that hangs costs no more than these."""


def judged(
    cells: Sequence[Cell], root: Path, *, stock: bool = True, seconds_each: float = 5.0
) -> Iterator[Verdict]:
    """Run every cell, first whatever saves and then whatever resumes; yield a verdict for each.

    Args:
        cells: to run.
        root: an empty directory.
        stock: whether each is run without us, too, to see that saving changes nothing.
        seconds_each: how long a training may take, on average of some; then a rank counts as hanging.
    """
    folders = {cell: str(root / f"{number:04d}") for number, cell in enumerate(cells)}
    roles = ("stock", "saving") if stock else ("saving",)
    jobs = [Job(cell=cell, root=folders[cell], role=role) for cell in cells for role in roles]
    seen = dict(_run_all(jobs, seconds_each))
    # What a cell's save came to is known before it is resumed.
    saved = [job for job in jobs if job.saves and not any(each.error for each in seen[job])]
    seen |= dict(_run_all([replace(job, role="resumed") for job in saved], seconds_each))
    for cell in cells:
        of = (Job(cell=cell, root=folders[cell], role=role) for role in Runs._fields)
        yield judge(cell, Runs(*(seen.get(job, []) for job in of)))


def _run_all(jobs: Sequence[Job], seconds_each: float) -> Iterator[tuple[Job, list[Observed]]]:
    by_world: dict[int, list[Job]] = {}
    for job in jobs:
        by_world.setdefault(job.place.world, []).append(job)
    for world, of_world in sorted(by_world.items()):
        for first in range(0, len(of_world), _AT_ONCE):
            yield from _run(of_world[first : first + _AT_ONCE], world, seconds_each)
            done = min(first + _AT_ONCE, len(of_world))
            print(f"{done} of {len(of_world)} trainings on {world} ranks", file=sys.stderr, flush=True)


def _run(jobs: list[Job], world: int, seconds_each: float) -> Iterator[tuple[Job, list[Observed]]]:
    """Run on ranks of their own; if a rank dies or hangs, each again by itself to see which it was."""
    seconds = 60 + seconds_each * len(jobs)
    try:
        per_rank = run_ranks(in_turn, world, jobs, timeout_seconds=seconds, process_group=world > 1)
    except RanksFailedError as error:
        if len(jobs) == 1:
            yield jobs[0], [Observed(error=str(error))] * world
            return
        for job in jobs:
            yield from _run([job], world, seconds_each)
        return
    for number, job in enumerate(jobs):
        yield job, [of_rank[number] for of_rank in per_rank]


def in_turn(jobs: list[Job]) -> list[Observed]:
    """Several trainings one after another in this process."""
    # Ranks are daemons, which may have no children; loaders with workers need some.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # A rank comes from a fork server, and would start another one for them.
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    return [_train(job) for job in jobs]


def _train(job: Job) -> Observed:
    from ckpt_core.errors import CheckpointError

    began = time.process_time()
    Path(job.root).mkdir(parents=True, exist_ok=True)
    with _said() as said, _own_process():
        try:
            observed = import_module(HOSTS[job.cell.host]).train(job)
        # It becomes a verdict, whatever it is.
        except Exception as error:
            text = traceback.format_exc()
            refused = isinstance(error, CheckpointError)
            observed = Observed(error=str(error) if refused else text, refused=refused)
    observed.warnings = said
    observed.seconds = time.process_time() - began
    return observed


@contextmanager
def _own_process() -> Iterator[None]:
    """Undo what hosts take for granted: one training in a process."""
    from accelerate.state import PartialState

    from tests.adapters.accelerate_jobs import forget_accelerators

    variables = dict(os.environ)
    destroy = PartialState.destroy_process_group
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PartialState.destroy_process_group = destroy  # type: ignore[method-assign]
        forget_accelerators()
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def _said() -> Iterator[list[str]]:
    """What our packages warn of."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.funcName != "tell_restored":  # which warns of nothing
                said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).addHandler(listener)
    try:
        yield said
    finally:
        for name in _OURS:
            logging.getLogger(name).removeHandler(listener)
