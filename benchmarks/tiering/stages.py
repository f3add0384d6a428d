"""One save, from the call to the object store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.comparison import Row, over, panel
from benchmarks.report import Report, Table
from benchmarks.tiering.savers import TierSaver
from benchmarks.timing import Spread, end_of, settle

MEASURES = ("stall_s", "local_s", "uploaded_s")
_HEADER = ("", "stall s", "durable on the disk s", "uploaded s, median [min, max]", "x ours")
_NOTES = (
    "Seconds since the call. Stall: the call has returned. Durable on the disk: fsynced and committed there; "
    "who has no local tier has none. Uploaded: the bucket has the whole checkpoint, committed. The server "
    "keeps objects in memory, in a process of its own on the same machine, and shares its cores.",
    "The page cache is not dropped: an upload reads what was written a moment before. After every save its "
    "files are deleted and dirty pages written back, outside the timing.",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Seconds since the call; None for what a saver does not do."""

    stall_s: float
    local_s: float | None
    uploaded_s: float | None


def one_save(saver: TierSaver, number: int) -> Stages:
    """Save, wait, delete."""
    try:
        start = time.perf_counter()
        flight = saver.save(number)
        stall = time.perf_counter() - start
        ends = [None if each is None else end_of(each) for each in (flight.local, flight.uploaded)]
        flight.last.result()
        local, uploaded = (None if end is None else max(stall, end.result() - start) for end in ends)
        return Stages(stall_s=stall, local_s=local, uploaded_s=uploaded)
    finally:
        settle(saver, number)


def report_stages(title: str, rows: Sequence[Row[TierSaver]], conditions: Sequence[str]) -> Report:
    """Table, data and picture."""
    ours = next((row for row in rows if row.contender.kind == "ours" and row.timings), None)
    body: list[list[str]] = []
    for row in rows:
        if not row.timings:
            body.append([row.contender.name, f"not run: {row.not_run}"])
            continue
        ratio = over(row.median("uploaded_s"), None if ours is None else ours.median("uploaded_s"))
        cells = [_text(row.spread(measure)) for measure in MEASURES]
        body.append([row.contender.name, *cells, "" if ratio is None else f"{ratio:.2f}"])
    titles = ("The training stands still for", "On the local disk after", "In the bucket after")
    return Report(
        benchmark="tiers",
        title=title,
        table=[Table(_HEADER, body)],
        results={row.contender.key: row.as_json(MEASURES) for row in rows},
        panels=[panel(rows, measure, text) for measure, text in zip(MEASURES, titles, strict=True)],
        conditions=[*_NOTES, *conditions],
    )


def _text(spread: Spread | None) -> str:
    return "-" if spread is None else str(spread)
