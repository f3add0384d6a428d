"""When and to whom signals are sent, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.reliability.preemption.jobs import HOSTS, STOCK, Job
from tests.reliability.preemption.signalling import Shot

RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Signals at some moments, and what must come of them.

    Attributes:
        name: for people.
        job: what is trained.
        shots: the signals.
        committed: the steps that must be committed afterwards, oldest first.
        stopped_at: the step at which every rank must have stopped.
        preempted: whether every rank must say so.
        seconds: after which ranks that have not ended are said to hang.
        launched: whether rank 0 starts the other rank itself, in a fresh interpreter, as Lightning does.
    """

    name: str
    job: Job
    shots: tuple[Shot, ...]
    committed: tuple[int, ...]
    stopped_at: int
    preempted: bool = True
    launched: bool = False
    seconds: float = 150.0

    @property
    def sweep(self) -> str:
        """The row of the table."""
        launcher = ", its own launcher" if self.launched else ""
        return f"preemption, {self.job.host}, {self.job.strategy}, {RANKS} ranks{launcher}"

    def __str__(self) -> str:
        return f"{self.sweep}: {self.name}"


def shot(rank: int, point: str, *to: int, name: str = "SIGTERM") -> Shot:
    """Shorter to write."""
    return Shot(rank=rank, point=point, to=to, name=name)


def cases() -> list[Case]:
    """The whole matrix."""
    found: list[Case] = []
    for host in HOSTS:
        strategies = ("ddp",) if host == "trainer" else ("ddp", "fsdp2")
        for strategy in strategies:
            job = Job(host=host, strategy=strategy)
            found += [*_while_training(job), *_around_training(job), *_during_saves(job)]
            found += [*_evaluating(job), *_going_on(job), *_accumulating(job)]
    return [*found, *_launched()]


def stock_cases() -> list[Case]:
    """What Lightning itself does not get right, to compare."""
    job = Job(host=STOCK)
    shots = {
        "SIGTERM to rank 1": (shot(1, "step 3", 1),),
        "rank 0, then rank 1": (shot(0, "step 3", 0), shot(1, "step 3", 1)),
    }
    return [
        Case(name=name, job=job, shots=fired, committed=(4,), stopped_at=4, seconds=40.0)
        for name, fired in shots.items()
    ]


def _launched() -> Iterator[Case]:
    for strategy in ("ddp", "fsdp2"):
        job = Job(host="lightning", strategy=strategy)
        for name, fired in {
            "SIGTERM to rank 0": (shot(0, "step 3", 0),),
            "SIGTERM to rank 1": (shot(1, "step 3", 1),),
            "all ranks, each twice at once": (shot(0, "step 3", 0, 1, 0, 1),),
        }.items():
            yield Case(name=name, job=job, shots=fired, committed=(4,), stopped_at=4, launched=True)


def _while_training(job: Job) -> Iterator[Case]:
    shots = {
        "SIGTERM to rank 0": (shot(0, "step 3", 0),),
        "SIGTERM to rank 1": (shot(1, "step 3", 1),),
        "SIGUSR1 to rank 1": (shot(1, "step 3", 1, name="SIGUSR1"),),
        "all ranks at once": (shot(0, "step 3", 0, 1),),
        "all ranks, each twice at once": (shot(0, "step 3", 0, 1, 0, 1),),
        "rank 0, then rank 1": (shot(0, "step 3", 0), shot(1, "step 3", 1)),
        "rank 1, then rank 0": (shot(1, "step 3", 1), shot(0, "step 3", 0)),
    }
    for name, fired in shots.items():
        yield Case(name=name, job=job, shots=fired, committed=(4,), stopped_at=4)
    last = job.steps
    yield Case(
        name="in the last step", job=job, shots=(shot(1, f"step {last - 1}", 1),),
        committed=(last,), stopped_at=last,
    )  # fmt: skip


def _around_training(job: Job) -> Iterator[Case]:
    begun = job.host == "trainer"  # it makes a step before it looks
    yield Case(
        name="before the first step", job=job, shots=(shot(1, "start", 1),),
        committed=(1,) if begun else (), stopped_at=int(begun),
    )  # fmt: skip
    if job.host in {"lightning", "trainer"}:
        yield Case(
            name="between epochs", job=job, shots=(shot(0, "epoch end", 0),), committed=(7,), stopped_at=7
        )


def _during_saves(job: Job) -> Iterator[Case]:
    if job.host == "trainer":
        yield Case(
            name="again when it has stopped", job=job,
            shots=(shot(0, "step 3", 0), shot(1, "epoch end", 0, 1)), committed=(4,), stopped_at=4,
        )  # fmt: skip
        return
    yield Case(
        name="again during the last save", job=job, shots=(shot(0, "step 3", 0), shot(1, "write 1", 0, 1)),
        committed=(4,), stopped_at=4,
    )  # fmt: skip
    yield Case(
        name="during an earlier save", job=replace(job, every=3),
        shots=(shot(0, "step 3", 0), shot(0, "write 1")), committed=(3, 4), stopped_at=4,
    )  # fmt: skip
    yield Case(
        name="in a step that is saved anyway", job=replace(job, every=3), shots=(shot(0, "step 2", 0),),
        committed=(3,), stopped_at=3,
    )  # fmt: skip


def _evaluating(job: Job) -> Iterator[Case]:
    evaluated = replace(job, evaluate_every=3)
    for point in ("evaluation 0", "evaluation 1", "evaluation 3"):
        for rank in range(RANKS):
            yield Case(
                name=f"in {point}, rank {rank}", job=evaluated, shots=(shot(rank, point, rank),),
                committed=(3,), stopped_at=3,
            )  # fmt: skip
    yield Case(
        name="in the evaluation of a step that is saved", job=replace(evaluated, every=3),
        shots=(shot(0, "evaluation 1", 0, 1),), committed=(3,), stopped_at=3,
    )  # fmt: skip


def _going_on(job: Job) -> Iterator[Case]:
    going_on = replace(job, save={"stop": False})
    yield Case(
        name="save and go on, rank 1 two steps later", job=going_on,
        shots=(shot(0, "step 2", 0), shot(1, "step 4", 1)), committed=(3,), stopped_at=job.steps,
        preempted=False,
    )  # fmt: skip


def _accumulating(job: Job) -> Iterator[Case]:
    if job.host in {"lightning", "accelerate"}:
        yield Case(
            name="within an accumulation window", job=replace(job, accumulation=3, steps=5),
            shots=(shot(1, "batch 6", 1),), committed=(3,), stopped_at=3,
        )  # fmt: skip
