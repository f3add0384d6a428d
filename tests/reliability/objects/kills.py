"""Kills and faults on an object store: at every request of a job, before and after it is done.

`run` gives what happened, one `Outcome` after another. The work is done by a process of its own, which forks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch

from benchmarks.crashing.object_faults import faults
from benchmarks.crashing.object_jobs import (
    LARGE,
    Child,
    Service,
    Tell,
    fault_at,
    forked,
    inspect,
    join,
    litter,
    service,
    state_of,
    sweep_away,
    train,
    values,
)
from benchmarks.crashing.outcome import Outcome
from ckpt_core import CheckpointError, CheckpointManager, KeepLatest

_STEPS: Final = (1, 2)
_READS: Final = {"GET", "HEAD"}  # after one of them the store is as it was before
_DEADLINE_SECONDS: Final = 6.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A job, and who of it is killed.

    Attributes:
        name: for people.
        world_size: of the job.
        victims: ranks that are killed.
        columns: how large its state is.
        sampled: whether a sample has points of it; each sweep that is looked at costs a rehearsal.
    """

    name: str
    world_size: int
    victims: tuple[int, ...]
    columns: int = 8
    sampled: bool = False


SWEEPS: Final = (
    Sweep(name="S3, 1 rank, killed", world_size=1, victims=(0,)),
    Sweep(
        name="S3, 1 rank, uploads in parts, killed", world_size=1, victims=(0,), columns=LARGE, sampled=True
    ),
    Sweep(name="S3, 2 ranks, all killed", world_size=2, victims=(0, 1), sampled=True),
    Sweep(name="S3, 2 ranks, the coordinator killed", world_size=2, victims=(0,)),
    Sweep(name="S3, 2 ranks, the other killed", world_size=2, victims=(1,)),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """Before or after which request, counted among those that the killed ranks send."""

    sweep: Sweep
    number: int
    when: str
    label: str


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Kill at every request of every sweep, and meet every fault; or a sample of `count` of each kind.

    Args:
        seed: of the sample.
        folder: for what processes need to find one another.
        count: how many kills, and how many faults; None for all of them.
    """
    command = [sys.executable, "-m", "benchmarks.crashing.objects", str(seed), str(folder), str(count or 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Outcome(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")


def kills(found: Service, *, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """One kill after another, each in a root of its own."""
    sweeps = [sweep for sweep in SWEEPS if sweep.sampled or count is None or count > len(SWEEPS)]
    points = [point for sweep in sweeps for point in _points(found, sweep, folder)]
    if count is not None:
        points = random.Random(seed).sample(points, min(count, len(points)))
    for number, point in enumerate(points):
        yield _kill(found, point, f"kill-{number}", folder)


def _points(found: Service, sweep: Sweep, folder: Path) -> list[_Point]:
    """Every point of a sweep, from a rehearsal in which nobody dies."""
    before = len(found.control.log())
    root = f"rehearsal-{SWEEPS.index(sweep)}"
    forked(lambda _tell: litter(found, root))
    for child in _started(found, sweep, root, folder=folder):
        status, told = child.wait()
        assert told == list(_STEPS), f"{sweep.name}: the rehearsal ended with {status}, told {told}"
    senders = {f"rank{rank}" for rank in sweep.victims}
    log = [
        request
        for request in found.control.log(before)
        if request.who in senders and f"{root}/" in request.target
    ]
    forked(lambda _tell: sweep_away(found, root))
    return [
        _Point(
            sweep=sweep, number=number, when=when, label=f"{when} {number}, {request.method} {request.target}"
        )
        for number, request in enumerate(log)
        for when in (("before",) if request.method in _READS else ("before", "after"))
    ]


def _started(
    found: Service, sweep: Sweep, root: str, *, folder: Path, point: _Point | None = None
) -> list[Child]:
    """The ranks of a job, running; if there is a point, they are killed there."""
    meeting = Path(tempfile.mkdtemp(dir=folder))

    def rank_of(rank: int) -> Child:
        def act(tell: Tell, go: Any) -> None:
            go()
            join(meeting, rank, sweep.world_size)
            _be_rank(found, sweep, root, rank=rank, tell=tell)

        return Child(act)

    children = [rank_of(rank) for rank in range(sweep.world_size)]
    if point is not None:
        who = "rank[" + "".join(map(str, sweep.victims)) + "]"
        action = "kill" if point.when == "before" else "kill_after"
        pids = [children[rank].pid for rank in sweep.victims]
        found.control.set(fault_at(root, action=action, who=who, nth=point.number, count=1, pids=pids))
    for child in children:
        child.start()
    return children


def _be_rank(found: Service, sweep: Sweep, root: str, *, rank: int, tell: Tell) -> None:
    storage = found.storage(root, f"rank{rank}", request_seconds=_DEADLINE_SECONDS)
    checkpoints = CheckpointManager(storage, keep=KeepLatest(1), deadline_seconds=_DEADLINE_SECONDS)
    try:
        train(checkpoints, _STEPS, sweep.columns, tell)
        checkpoints.close()
    except (CheckpointError, RuntimeError) as error:
        # The others of one that was killed: gloo raises RuntimeError for those who were in a collective.
        tell({"failed": f"{type(error).__name__}: {error}"})


def _kill(found: Service, point: _Point, root: str, folder: Path) -> Outcome:
    forked(lambda _tell: litter(found, root))
    ended = [child.wait() for child in _started(found, point.sweep, root, folder=folder, point=point)]
    found.control.clear()
    outcome = Outcome(
        sweep=point.sweep.name,
        point=point.label,
        kills=sum(os.WIFSIGNALED(status) for status, _ in ended),
        acknowledged=max((step for _, told in ended for step in told if isinstance(step, int)), default=0),
        resumed=None,
    )
    problem = _problem_of_survivors(point, ended)
    if not outcome.kills:
        problem = problem or "the point was not reached, so that this shows nothing"
    told = forked(lambda tell: tell(inspect(found, root, outcome.acknowledged, columns=point.sweep.columns)))[
        1
    ]
    forked(lambda _tell: sweep_away(found, root))
    if isinstance(told[-1], dict):
        return replace(outcome, problem=problem or told[-1]["error"])
    return replace(outcome, resumed=told[-1] or 0, problem=problem)


def _problem_of_survivors(point: _Point, ended: list[tuple[int, list[Any]]]) -> str:
    for rank, (status, told) in enumerate(ended):
        last = told[-1] if told else None
        if isinstance(last, dict) and "error" in last:
            return f"rank {rank}: {last['error']}"
        if os.WIFSIGNALED(status) and rank not in point.sweep.victims:
            return f"rank {rank} ended with signal {os.WTERMSIG(status)}"
    return ""


def main() -> None:
    """Print one outcome a line."""
    torch.set_num_threads(1)
    values(state_of(0))
    _warm_up()
    seed, count = int(sys.argv[1]), int(sys.argv[3]) or None
    with service() as found, tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
        for part in (kills, faults):
            for outcome in part(found, seed=seed, folder=Path(folder), count=count):
                print(json.dumps(asdict(outcome)), flush=True)


def _warm_up() -> None:
    """Import what every child needs; none of it starts a thread."""
    import boto3  # noqa: F401
    import s3fs  # noqa: F401


if __name__ == "__main__":
    main()
