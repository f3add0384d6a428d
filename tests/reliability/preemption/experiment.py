"""Preemption at every moment: real signals to real ranks, then a fresh pair of ranks that goes on."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.preemption.cases import RANKS, Case, cases, stock_cases
from tests.reliability.preemption.jobs import STOCK, Job
from tests.reliability.preemption.signalling import Director, Line, Run

Train = Callable[..., dict[str, Any]]


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Every case, or the chosen ones; what Lightning gets wrong by itself only if it is named."""

    wanted = choice.of([*cases(), *(stock_cases() if choice.named else ())])
    for case in wanted:
        train_under(case.job.host)  # before the first fork, so that no rank has to import it
    references = References(folder / "references")
    for number, case in enumerate(wanted):
        yield experiment(case, folder / str(number), references)


def train_under(host: str) -> Train:
    """What trains under a host."""
    name = {"loop": "jobs", STOCK: "host_lightning"}.get(host, f"host_{host}")
    module = importlib.import_module(f"tests.reliability.preemption.{name}")
    return module.train_stock if host == STOCK else module.train


def experiment(case: Case, folder: Path, reference: Callable[[Job], Run]) -> Outcome:
    """Preempt a run, look at what it left, and let fresh ranks go on to the end."""
    root = folder / "run"
    root.mkdir(parents=True)
    broken = (launch if case.launched else pair)(case.job, root, case, resume=False)
    storage = LocalStorage(root)
    committed = [info.step for info in Catalog(storage).committed()]
    problems = [*_conduct(case, broken, committed), *_damage(storage)]
    acknowledged, resumed = case.committed[-1] if case.committed else 0, None
    if not problems:
        rest = replace(case.job, save={})
        # The Trainer of transformers makes one step too many when it resumes what was over.
        over = case.job.host == "trainer" and case.committed[-1:] == (case.job.steps,)
        whole, after = reference(rest), broken if over else pair(rest, root, None, resume=True)
        problems += _resumed_inexactly(whole, broken, after)
        resumed = acknowledged if over else after.results[0].get("began")
    shutil.rmtree(folder)
    return Outcome(
        sweep=case.sweep,
        point=case.name,
        acknowledged=acknowledged,
        resumed=resumed,
        problem="; ".join(problems),
    )


def _conduct(case: Case, run: Run, committed: Sequence[int]) -> Iterator[str]:
    for rank, code in run.codes.items():
        if code != 0:
            hang = f"hung for {case.seconds:g} s" if code is None else f"ended with {code}"
            yield f"rank {rank} {hang}: {run.results.get(rank, {}).get('error', 'it told nothing')}"
            return
    if run.missed:
        yield f"never came to {run.missed[0].point}"
    for rank, result in run.results.items():
        if result["step"] != case.stopped_at:
            yield f"rank {rank} stopped at step {result['step']} instead of {case.stopped_at}"
        if result["preempted"] != case.preempted:
            yield f"rank {rank} says preempted={result['preempted']}"
    if tuple(committed) != case.committed:
        yield f"committed are {list(committed)} instead of {list(case.committed)}"


def _damage(storage: LocalStorage) -> Iterator[str]:
    for info in Catalog(storage).committed():
        for failure in verify(storage, info.name):
            yield f"{info.name} is damaged: {failure}"
    for name in Catalog(storage).torn():
        yield f"{name} was left behind"


def _resumed_inexactly(whole: Run, broken: Run, after: Run) -> Iterator[str]:
    for rank, code in after.codes.items():
        if code != 0:
            yield f"resumed rank {rank} ended with {code}: {after.results.get(rank, {}).get('error')}"
            return
    for rank in range(RANKS):
        losses = {**broken.results[rank]["losses"], **after.results[rank]["losses"]}
        if losses != whole.results[rank]["losses"]:
            yield f"rank {rank} has other losses: {losses} instead of {whole.results[rank]['losses']}"
        if after.results[rank]["weights"] != whole.results[rank]["weights"]:
            yield f"rank {rank} has other weights in the end"


def pair(job: Job, root: Path, case: Case | None, *, resume: bool) -> Run:
    """Two ranks of a job, forked; the store is in a process of its own, as under torchrun."""

    def be(rank: int, tell: forks.Tell) -> None:
        del tell
        os.dup2(2, 1)  # standard output is for outcomes
        line = Line(rank)
        if not _told(line, lambda: train_under(job.host)(job, root, line, resume=resume)):
            os._exit(1)

    with _director(case) as director, forks.ranks(RANKS, be, join=False) as ranks:
        return director.attend(ranks)


def launch(job: Job, root: Path, case: Case | None, *, resume: bool) -> Run:
    """A module, run in a fork, that Lightning runs once more, in a fresh interpreter, for the other rank."""
    told = json.dumps({"job": asdict(job), "root": str(root), "resume": resume})

    def be(tell: forks.Tell) -> None:
        del tell
        os.dup2(2, 1)
        sys.argv[1:] = [told]
        runpy.run_module("tests.reliability.preemption.host_lightning", run_name="__main__", alter_sys=True)

    with _director(case) as director:
        return director.attend([forks.fork(be)], results=RANKS)


def _director(case: Case | None) -> Director:
    return Director() if case is None else Director(case.shots, case.seconds)


def _told(line: Line, act: Callable[[], dict[str, Any]]) -> bool:
    try:
        line.end(act())
    except BaseException:
        line.end({"error": traceback.format_exc()})
        return False
    return True


@dataclass(frozen=True)
class References:
    """Uninterrupted runs, made when first needed."""

    folder: Path
    made: dict[str, Run] = field(default_factory=dict)

    def __call__(self, job: Job) -> Run:
        """What a job does if nothing happens to it."""
        key = json.dumps(asdict(job), sort_keys=True)
        if key not in self.made:
            root = self.folder / f"reference-{len(self.made)}"
            root.mkdir(parents=True)
            self.made[key] = pair(job, root, None, resume=False)
        return self.made[key]
