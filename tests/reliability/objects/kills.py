"""Kills and faults on an object store: at every request of a job, before and after it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ckpt_core import CheckpointError, CheckpointManager, KeepLatest
from tests.reliability import forks
from tests.reliability.objects.faults import faults
from tests.reliability.objects.jobs import (
    LARGE,
    Service,
    fault_at,
    inspect,
    litter,
    service,
    sweep_away,
    train,
)
from tests.reliability.outcome import Choice, Outcome, seen

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

    def __str__(self) -> str:
        return f"{self.sweep.name}: {self.label}"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every request of every sweep, and meet every fault; or at the chosen ones of each."""
    del folder
    with service() as found:
        yield from _kills(found, choice)
        yield from faults(found, choice)


def _kills(found: Service, choice: Choice) -> Iterator[Outcome]:
    """One kill after another, each in a root of its own."""
    small = choice.count is not None and choice.count <= len(SWEEPS)
    sweeps = [sweep for sweep in SWEEPS if (sweep.sampled or not small) and choice.may_name(sweep.name)]
    points = [point for sweep in sweeps for point in _points(found, sweep)]
    for number, point in enumerate(choice.of(points)):
        yield _kill(found, point, f"kill-{number}")


def _points(found: Service, sweep: Sweep) -> list[_Point]:
    """Every point of a sweep, from a rehearsal in which nobody dies."""
    before = len(found.control.log())
    root = f"rehearsal-{SWEEPS.index(sweep)}"
    forks.forked(lambda _tell: litter(found, root))
    for child in _job(found, sweep, root):
        assert child.told == list(_STEPS), f"{sweep.name}: the rehearsal told {child.told}"
    senders = {f"rank{rank}" for rank in sweep.victims}
    log = [
        request
        for request in found.control.log(before)
        if request.who in senders and f"{root}/" in request.target
    ]
    forks.forked(lambda _tell: sweep_away(found, root))
    return [
        _Point(
            sweep=sweep,
            number=number,
            when=when,
            label=f"{when} {number}, {request.method} {request.target}",
        )
        for number, request in enumerate(log)
        for when in (("before",) if request.method in _READS else ("before", "after"))
    ]


def _job(found: Service, sweep: Sweep, root: str, point: _Point | None = None) -> list[forks.Child]:
    """The ranks of a job, when they have ended; if there is a point, some were killed there."""
    begin = forks.Gate()

    def be(rank: int, tell: forks.Tell) -> None:
        begin.wait()
        _be_rank(found, sweep, root, rank=rank, tell=tell)

    with forks.ranks(sweep.world_size, be) as children:
        if point is not None:
            who = "rank[" + "".join(map(str, sweep.victims)) + "]"
            action = "kill" if point.when == "before" else "kill_after"
            pids = [children[rank].pid for rank in sweep.victims]
            found.control.set(fault_at(root, action=action, who=who, nth=point.number, count=1, pids=pids))
        begin.open()
        forks.gather(children)
    begin.discard()
    return children


def _be_rank(found: Service, sweep: Sweep, root: str, *, rank: int, tell: forks.Tell) -> None:
    storage = found.storage(root, f"rank{rank}", request_seconds=_DEADLINE_SECONDS)
    # Requests are numbered, and a journal would make its own among them.
    options = {"keep": KeepLatest(1), "deadline_seconds": _DEADLINE_SECONDS, "journal": False}
    checkpoints = CheckpointManager(storage, **options)
    try:
        train(checkpoints, _STEPS, sweep.columns, tell)
        checkpoints.close()
    except (CheckpointError, RuntimeError) as error:
        # The others of one that was killed: gloo raises RuntimeError for those who were in a collective.
        tell({"failed": f"{type(error).__name__}: {error}"})


def _kill(found: Service, point: _Point, root: str) -> Outcome:
    forks.forked(lambda _tell: litter(found, root))
    ended = _job(found, point.sweep, root, point)
    found.control.clear()
    kills = sum(child.killed for child in ended)
    acknowledged = max((step for child in ended for step in child.told if isinstance(step, int)), default=0)
    problem = _problem_of_survivors(point, ended)
    if not kills:
        problem = problem or "the point was not reached, so that this shows nothing"
    resumed, broken = seen(partial(inspect, found, root, acknowledged, columns=point.sweep.columns))
    forks.forked(lambda _tell: sweep_away(found, root))
    return Outcome(
        sweep=point.sweep.name,
        point=point.label,
        kills=kills,
        acknowledged=acknowledged,
        resumed=resumed,
        problem=problem or broken,
    )


def _problem_of_survivors(point: _Point, ended: Sequence[forks.Child]) -> str:
    for rank, child in enumerate(ended):
        last: Any = child.told[-1] if child.told else None
        if isinstance(last, dict) and "error" in last:
            return f"rank {rank}: {last['error']}"
        if child.exit_code and child.exit_code < 0 and rank not in point.sweep.victims:
            return f"rank {rank} ended with signal {-child.exit_code}"
    return ""
