"""What one kill or one fault did, as every experiment reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final


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
    """

    sweep: str
    point: str
    kills: int
    acknowledged: int
    resumed: int | None
    problem: str = ""

    @property
    def lost(self) -> bool:
        """Whether nothing as new as what was acknowledged could be resumed from."""
        return self.resumed is None or self.resumed < self.acknowledged


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
        row["points"] += 1
        row["kills"] += outcome.kills
        row["lost"] += outcome.lost
        row["problems"] += bool(outcome.problem)
    return list(rows.values())


def _lost_text(outcome: Outcome) -> str:
    return f"step {outcome.acknowledged} was acknowledged, {outcome.resumed} was resumed from"
