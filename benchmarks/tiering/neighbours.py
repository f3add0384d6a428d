"""What a save and its upload cost a training loop beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.comparison import Row, panel
from benchmarks.report import Report, Table
from benchmarks.tiering.savers import TierSaver
from benchmarks.timing import settle, short
from benchmarks.training import Training

MEASURES = ("lost_s", "lost_uploading_s", "speed_uploading", "uploading_s", "stall_s")
_HEADER = (
    "",
    "time lost s, median [min, max]",
    "of it beside the upload",
    "speed beside it",
    "upload s",
    "stall s",
)
_NOTES = (
    "The training computes with one thread. Time lost: the stall of the call, plus (step - median step "
    "before the save) over all steps until the last tier has the checkpoint; beside the upload: over the "
    "steps begun after the local commit (for savers without a local tier: all steps). Speed: median step "
    "before, over the mean of those steps.",
    "The server of the bucket runs on the same cores, at the lowest priority. `obstore put` beside the same "
    "training is what any upload costs here.",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """What one save did to the steps beside it; None where no step began during an upload."""

    lost_s: float
    lost_uploading_s: float | None
    speed_uploading: float | None
    uploading_s: float | None
    stall_s: float


def one_save_beside(saver: TierSaver, number: int, training: Training, base_steps: int) -> Neighbour:
    """Train alone, save and upload while training, delete, settle."""
    before = statistics.median(training.step(saver.step_guard()) for _ in range(base_steps))
    try:
        start = time.perf_counter()
        flight = saver.save(number)
        stall = time.perf_counter() - start
        during: list[float] = []
        uploading: list[float] = []
        while not during or not flight.last.done():
            alone = flight.uploaded is not None and (flight.local is None or flight.local.done())
            seconds = training.step(saver.step_guard())
            during.append(seconds)
            if alone and not (flight.last.done() and uploading):
                uploading.append(seconds)
        flight.last.result()
        return Neighbour(
            lost_s=stall + sum(during) - len(during) * before,
            lost_uploading_s=sum(uploading) - len(uploading) * before if uploading else None,
            speed_uploading=before / statistics.mean(uploading) if uploading else None,
            uploading_s=sum(uploading) if uploading else None,
            stall_s=stall,
        )
    finally:
        settle(saver, number)


def report_neighbours(title: str, rows: Sequence[Row[TierSaver]], conditions: Sequence[str]) -> Report:
    """Table, data and picture."""
    body: list[list[str]] = []
    for row in rows:
        if not row.timings:
            body.append([row.contender.name, f"not run: {row.not_run}"])
            continue
        speed = row.median("speed_uploading")
        body.append(
            [
                row.contender.name,
                str(row.spread("lost_s")),
                _short(row.median("lost_uploading_s")),
                "-" if speed is None else f"{speed:.0%}",
                _short(row.median("uploading_s")),
                _short(row.median("stall_s")),
            ]
        )
    return Report(
        benchmark="tiers-interference",
        title=title,
        table=[Table(_HEADER, body)],
        results={row.contender.key: row.as_json(MEASURES) for row in rows},
        panels=[
            panel(rows, "lost_s", "Training time lost per save"),
            panel(rows, "speed_uploading", "Speed beside the upload", axis="of the speed without"),
        ],
        conditions=[*_NOTES, *conditions],
    )


def _short(value: float | None) -> str:
    return "-" if value is None else short(value)
