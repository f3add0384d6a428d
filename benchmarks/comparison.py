"""Timings of all contenders side by side: as a table, as ratios, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from benchmarks.contenders import Contender, Entrant
from benchmarks.report import Bar, Bars, Report, Table, spread_json
from benchmarks.state import GIB
from benchmarks.timing import MEASURES, Spread, short

_Entrant = TypeVar("_Entrant", bound=Entrant)

_HEADER = (
    "",
    "stall s, median [min, max]",
    "x ours",
    "staged s",
    "durable s, median [min, max]",
    "x ours",
    "GiB/s",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Generic[_Entrant]):
    """One contender's timings; without any, `not_run` says why."""

    contender: type[_Entrant]
    timings: Sequence[Any]
    not_run: str | None = None

    def spread(self, measure: str) -> Spread | None:
        """Of one of the measures that its timings have."""
        return Spread.of(getattr(timing, measure) for timing in self.timings)

    def median(self, measure: str) -> float | None:
        """Of one of the measures that its timings have."""
        spread = self.spread(measure)
        return None if spread is None else spread.median

    def as_json(self, measures: Sequence[str]) -> dict[str, Any]:
        """Who it is, the spread of each measure and what it was computed from, for the file."""
        return {
            "name": self.contender.name,
            "kind": self.contender.kind,
            "not_run": self.not_run,
            **{measure: spread_json(self.spread(measure)) for measure in measures},
            "samples": {measure: [getattr(each, measure) for each in self.timings] for measure in measures},
        }


def compare(
    types: Sequence[type[_Entrant]], timings: Mapping[str, Sequence[Any]], not_run: Mapping[str, str]
) -> list[Row[_Entrant]]:
    """Rows in the order of `types`."""
    return [
        Row(contender=each, timings=timings.get(each.key, ()), not_run=not_run.get(each.key))
        for each in types
    ]


def report_rows(
    benchmark: str, title: str, rows: Sequence[Row[Contender]], *, size_bytes: int, conditions: Sequence[str]
) -> Report:
    """Table, data and picture of a comparison of saves of `size_bytes` each."""
    return Report(
        benchmark=benchmark,
        title=title,
        table=[_table(rows, size_bytes), "", *_ratio_lines(rows, size_bytes)],
        results=_data(rows, size_bytes),
        panels=[
            panel(rows, "stall_s", "The training stands still for", log=True),
            panel(rows, "durable_s", "Durable after (with fsync)"),
        ],
        conditions=conditions,
    )


def _table(rows: Sequence[Row[Contender]], size_bytes: int) -> Table:
    ours = next((row for row in rows if row.contender.kind == "ours" and row.timings), None)
    body: list[list[str]] = []
    for row in rows:
        if not row.timings:
            body.append([row.contender.name, f"not run: {row.not_run}"])
            continue
        durable = row.median("durable_s")
        body.append(
            [
                row.contender.name,
                *(_with_ratio(row, "stall_s", ours)),
                _text(row.median("staged_s")),
                *(_with_ratio(row, "durable_s", ours)),
                "" if durable is None else f"{size_bytes / GIB / durable:.2f}",
            ]
        )
        if row.not_run:
            body.append([f"  {row.contender.name}", f"stopped: {row.not_run}"])
    return Table(_HEADER, body)


def _with_ratio(row: Row[Any], measure: str, ours: Row[Any] | None) -> tuple[str, str]:
    spread = row.spread(measure)
    if spread is None:
        return "-", ""
    base = None if ours is None else ours.median(measure)
    return str(spread), f"{spread.median / base:.2f}" if base else ""


def _text(value: float | None) -> str:
    return "" if value is None else short(value)


def ratios(
    rows: Sequence[Row[Any]], measures: Sequence[str] = ("stall_s", "durable_s")
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Our key -> other's key -> measure -> the other's median over ours: above 1, ours is quicker."""
    return {
        ours.contender.key: {
            other.contender.key: {
                measure: over(other.median(measure), ours.median(measure)) for measure in measures
            }
            for other in rows
            if other is not ours and other.timings
        }
        for ours in rows
        if ours.contender.kind == "ours" and ours.timings
    }


def over(other: float | None, ours: float | None) -> float | None:
    """Their ratio, where both are known."""
    return None if other is None or not ours else other / ours


def _copy_rate(row: Row[Any], size_bytes: int) -> float | None:
    """GB/s of a floor that copies: on CUDA, from the device to pinned memory."""
    stall = row.median("stall_s") if row.contender.kind == "limit" else None
    return None if stall is None else size_bytes / 1e9 / stall


def _ratio_lines(rows: Sequence[Row[Any]], size_bytes: int) -> list[str]:
    """Ours against the floors: 1.00 is as quick as this machine can be."""
    floors = [row for row in rows if row.contender.kind == "limit" and row.timings]
    lines = [
        f"{floor.contender.name}: {rate:.1f} GB/s"
        for floor in floors
        if (rate := _copy_rate(floor, size_bytes)) is not None
    ]
    for ours in (row for row in rows if row.contender.kind == "ours" and row.timings):
        for floor in floors:
            for measure in ("stall_s", "durable_s"):
                ratio = over(ours.median(measure), floor.median(measure))
                if ratio is not None:
                    word = measure.removesuffix("_s")
                    lines.append(f"{ours.contender.name}: {word} is {ratio:.3g} x {floor.contender.name}")
    return lines


def _data(rows: Sequence[Row[Contender]], size_bytes: int) -> dict[str, Any]:
    return {
        "size_bytes": size_bytes,
        "contenders": {row.contender.key: _row_data(row, size_bytes) for row in rows},
        "ratios": ratios(rows),
    }


def _row_data(row: Row[Contender], size_bytes: int) -> dict[str, Any]:
    return {
        **row.as_json(MEASURES),
        "fsync": row.contender.fsync,
        "copy_gb_per_s": _copy_rate(row, size_bytes),
    }


def panel(
    rows: Sequence[Row[Any]], measure: str, title: str, *, axis: str = "seconds", log: bool = False
) -> Bars:
    """Bars of the medians of a measure, with whiskers; who has none has the reason instead."""
    bars = []
    for row in rows:
        reason = f"not run: {row.not_run}" if not row.timings else "does not apply"
        bars.append(
            Bar(
                label=row.contender.name,
                kind=row.contender.kind,
                spread=row.spread(measure),
                note=reason if len(reason) < 60 else reason[:57] + "...",
            )
        )
    return Bars(title=title, axis=axis, bars=bars, log=log)
