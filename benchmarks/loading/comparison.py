"""Loads side by side: as a table, as ratios, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.comparison import Row, over, panel, ratios
from benchmarks.loading.loader import Loader
from benchmarks.loading.pages import CONDITIONS, PageState
from benchmarks.loading.timing import MEASURES
from benchmarks.report import Bar, Bars, Report, Table, spread_json
from benchmarks.state import GIB
from benchmarks.timing import Spread

LoadRow = Row[Loader]

STOCK_KEY = "dcp-load"
_UNVERIFIED_KEY = "ours-off"
_HEADER = (
    "",
    "s, median [min, max]",
    "GiB/s",
    "x as quick as dcp.load",
    "bytes asked for",
    "from the device",
)
_BYTES_NOTE = (
    "Bytes asked for: by read calls (rchar), per byte of the state; reads through a mapping are not counted "
    "there. From the device: what the block device delivered (read_bytes), per byte of the state. Medians."
)
# Small files may be in memory already, and somebody else may have read a page.
_COLD_SHARE = 0.95


def report_loads(
    benchmark: str,
    title: str,
    rows: Sequence[LoadRow],
    *,
    size_bytes: int,
    pages: PageState,
    conditions: Sequence[str],
) -> Report:
    """Table, data and picture of a comparison of loads of `size_bytes` each."""
    panels = [panel(rows, "seconds", f"A load takes ({pages})")]
    if benchmark == "load-ranks":
        panels += [_bytes_panel(rows, size_bytes)]
    return Report(
        benchmark=benchmark,
        title=title,
        table=[_table(rows, size_bytes, pages), "", *_ratio_lines(rows)],
        results={
            "size_bytes": size_bytes,
            "pages": pages,
            "contenders": {row.contender.key: _row_data(row, size_bytes, pages) for row in rows},
            "ratios": ratios(rows, ("seconds",)),
            "verification_cost": verification_cost(rows),
        },
        panels=panels,
        conditions=[CONDITIONS[pages], *conditions, _BYTES_NOTE],
    )


def per_byte(row: LoadRow, measure: str, size_bytes: int) -> Spread | None:
    """A count of bytes per byte of the state."""
    return Spread.of(
        None if getattr(timing, measure) is None else getattr(timing, measure) / size_bytes
        for timing in row.timings
    )


def as_stated(row: LoadRow, size_bytes: int, pages: PageState) -> bool | None:
    """Whether every load was as cold, or as warm, as is said; None without files, or where nobody counts."""
    device = per_byte(row, "device_bytes", size_bytes) if row.contender.format else None
    if device is None or (pages == "warm" and not row.contender.cached):
        return None
    return device.low >= _COLD_SHARE if pages == "cold" else device.high <= 1 - _COLD_SHARE


def verification_cost(rows: Sequence[LoadRow]) -> dict[str, float]:
    """Our key -> how much longer it takes than the same without verification: 0.1 is 10 % longer."""
    plain = next((row.median("seconds") for row in rows if row.contender.key == _UNVERIFIED_KEY), None)
    costs: dict[str, float] = {}
    for row in rows:
        ratio = over(row.median("seconds"), plain)
        if ratio is not None and row.contender.key in {"ours-full", "ours-read"}:
            costs[row.contender.key] = ratio - 1
    return costs


def _table(rows: Sequence[LoadRow], size_bytes: int, pages: PageState) -> Table:
    stock = next((row.median("seconds") for row in rows if row.contender.key == STOCK_KEY), None)
    body: list[list[str]] = []
    for row in rows:
        if not row.timings:
            body.append([row.contender.name, f"not run: {row.not_run}"])
            continue
        body.append([row.contender.name, *_cells(row, size_bytes, stock)])
        if row.not_run:
            body.append([f"  {row.contender.name}", f"stopped: {row.not_run}"])
        if as_stated(row, size_bytes, pages) is False:
            body.append([f"  {row.contender.name}", f"not {pages}: see the bytes from the device"])
    return Table(_HEADER, body)


def _cells(row: LoadRow, size_bytes: int, stock: float | None) -> list[str]:
    seconds = row.spread("seconds")
    if seconds is None:
        return ["", "", "", "", ""]
    quicker = over(stock, seconds.median)
    return [
        str(seconds),
        f"{size_bytes / GIB / seconds.median:.2f}",
        "" if quicker is None else f"{quicker:.2f}",
        *(_factor(per_byte(row, measure, size_bytes)) for measure in ("asked_bytes", "device_bytes")),
    ]


def _factor(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"


def _ratio_lines(rows: Sequence[LoadRow]) -> list[Table | str]:
    """Ours against the limits: 1.00 is as quick as this machine can be; and what verification costs."""
    ours = [row for row in rows if row.contender.kind == "ours" and row.timings]
    limits = [row for row in rows if row.contender.kind == "limit" and row.timings]
    body = [[limit.contender.name, *(_times(each, limit) for each in ours)] for limit in limits]
    header = ("times as long as", *(each.contender.name for each in ours))
    names = {row.contender.key: row.contender.name for row in rows}
    costs = [
        f"{names[key]}: verification costs {cost:+.1%} of the unverified load"
        for key, cost in verification_cost(rows).items()
    ]
    return [*([Table(header, body)] if ours and limits else []), "", *costs]


def _times(ours: LoadRow, limit: LoadRow) -> str:
    ratio = over(ours.median("seconds"), limit.median("seconds"))
    return "" if ratio is None else f"{ratio:.2f}"


def _row_data(row: LoadRow, size_bytes: int, pages: PageState) -> dict[str, Any]:
    seconds = row.spread("seconds")
    return {
        "name": row.contender.name,
        "kind": row.contender.kind,
        "not_run": row.not_run,
        "as_stated": as_stated(row, size_bytes, pages),
        "seconds": spread_json(seconds),
        "gib_per_s": None if seconds is None else size_bytes / GIB / seconds.median,
        "asked_per_byte": spread_json(per_byte(row, "asked_bytes", size_bytes)),
        "device_per_byte": spread_json(per_byte(row, "device_bytes", size_bytes)),
        "samples": {measure: [getattr(timing, measure) for timing in row.timings] for measure in MEASURES},
    }


def _bytes_panel(rows: Sequence[LoadRow], size_bytes: int) -> Bars:
    return Bars(
        title="All ranks together ask storage for",
        axis="bytes per byte of the checkpoint",
        bars=[
            Bar(
                label=row.contender.name,
                kind=row.contender.kind,
                spread=per_byte(row, "asked_bytes", size_bytes),
                note="not run" if not row.timings else "not counted here",
            )
            for row in rows
        ],
    )
