"""What every experiment takes and gives: which cases are chosen, and what became of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

from tests.reliability import forks

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which of all cases are tried.

    Attributes:
        seed: of everything that is drawn by chance.
        count: how many of each sweep; None for all.
        named: beginnings of the names of cases; () for all.
    """

    seed: int = 1
    count: int | None = None
    named: Sequence[str] = ()

    def of(self, cases: Iterable[T]) -> list[T]:
        """Those that are named, or a sample, in an order drawn by the seed."""
        found = [case for case in cases if not self.named or str(case).startswith(tuple(self.named))]
        return random.Random(self.seed).sample(found, self.least(len(found)))

    def may_name(self, beginning: str) -> bool:
        """Whether cases are chosen whose names begin so."""
        named = self.named or [beginning]
        return any(name.startswith(beginning) or beginning.startswith(name) for name in named)

    def least(self, total: int) -> int:
        """How many that is of so many."""
        return total if self.count is None else min(self.count, total)


class Run(Protocol):
    """A part of the rig: a module that has this function."""

    def __call__(self, choice: Choice, folder: Path) -> Iterator[Outcome]:
        """Try the chosen cases in an empty folder."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One experiment: a run that was broken at one point, and the fresh process that came after it.

    Attributes:
        sweep: which row of the table it belongs to, e.g. `local disk, save, 2 ranks, one rank killed`.
        point: where it was broken, e.g. `before 12, fsync step-000000003.incomplete-…/__0_0.distcp`.
        kills: processes killed by it; 0 for a fault that kills nobody.
        acknowledged: the newest step that the broken run had been told was committed.
        resumed: the step from which the fresh process resumed, None if it found nothing.
        problem: which promise was broken and how, "" if none was.
        times: how many experiments ended like this, where each is not worth a line.
    """

    sweep: str
    point: str
    kills: int = 0
    acknowledged: int = 0
    resumed: int | None = 0
    problem: str = ""
    times: int = 1

    @property
    def lost(self) -> bool:
        """Whether nothing as new as what was acknowledged could be resumed from."""
        return self.resumed is None or self.resumed < self.acknowledged


def tried(tasks: Iterable[Callable[[], Sequence[Outcome]]], jobs: int) -> Iterator[Outcome]:
    """What the tasks come to, each in a process of its own, up to `jobs` at once."""
    acts = (lambda task=task: [asdict(each) for each in task()] for task in tasks)
    for found in forks.spread(acts, jobs):
        yield from (Outcome(**fields) for fields in found)


def seen(look: Callable[[], int]) -> tuple[int | None, str]:
    """The step that `look` finds in a fresh process, and which promise was broken, "" if none."""
    try:
        return forks.answer(look), ""
    except RuntimeError as error:
        return None, str(error).strip()


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """Every broken promise, a line each."""
    return [
        f"{outcome.sweep}, {outcome.point}: {told}"
        for outcome in outcomes
        if (told := outcome.problem or (_lost_text(outcome) if outcome.lost else ""))
    ]


def table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row per sweep: points, kills, what was lost, what was broken otherwise."""
    rows: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = rows.setdefault(
            outcome.sweep, {"sweep": outcome.sweep, "points": 0, "kills": 0, "lost": 0, "problems": 0}
        )
        row["points"] += outcome.times
        row["kills"] += outcome.kills
        row["lost"] += outcome.lost
        row["problems"] += bool(outcome.problem)
    return list(rows.values())


def _lost_text(outcome: Outcome) -> str:
    return f"step {outcome.acknowledged} was acknowledged, {outcome.resumed} was resumed from"
