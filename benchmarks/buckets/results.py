"""Saves and loads of all clients side by side, against bare obstore and the bars of the issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.buckets.clients import BucketClient, Way
from benchmarks.buckets.turns import Turn
from benchmarks.comparison import Row, compare, over, panel
from benchmarks.report import Report, Table
from benchmarks.timing import Spread

LIMITS: Final[Mapping[Way, str]] = {"save": "obstore", "load": "obstore"}
"""Whose time and CPU are 1.00."""

_MEASURES = ("seconds", "cpu_seconds", "sent", "received")
_HEADER = ("", "s, median [min, max]", "x obstore", "CPU s", "x obstore", "sent", "received", "MiB beyond")
_NOTES = (
    "The server keeps objects in memory, in a process of its own on the same machine: what it costs is in "
    "every wall time and in no CPU time. CPU seconds are those of the client's process and its children.",
    "Sent, received: bytes over the wire per byte of the state. A save is durable when the service has "
    "answered to the last request, the marker's for ckpt-suite. Nothing is read from a disk, but s5cmd's "
    "file, which is in the page cache; it fsyncs nothing.",
    "MiB beyond: the peak of resident memory in the first save and the first load of a fresh process, less "
    "what was there before: the tensors, for ckpt-suite the arena, for clients of bytes the joined bytes.",
)
Peaks = Mapping[str, Mapping[Way, float]]


def report_objects(
    title: str,
    types: Sequence[type[BucketClient]],
    turns: Mapping[str, Sequence[Turn]],
    *,
    not_run: Mapping[str, str],
    peaks: Peaks,
) -> Report:
    """Table, data and picture."""
    table: list[Table | str] = []
    results: dict[str, Any] = {}
    panels = []
    ways: tuple[Way, ...] = ("save", "load")
    for way in ways:
        taking = [each for each in types if way in each.ways]
        costs = {key: [turn[way] for turn in found if way in turn] for key, found in turns.items()}
        rows = compare(taking, costs, not_run)
        table += [_table(rows, way, peaks), ""]
        results[way] = {
            row.contender.key: _data(row, peaks.get(row.contender.key, {}).get(way)) for row in rows
        }
        panels += [
            panel(rows, "seconds", f"A {way} takes"),
            panel(rows, "cpu_seconds", f"CPU of a {way}", axis="CPU seconds of the client"),
        ]
    return Report(
        benchmark="objects", title=title, table=table, results=results, panels=panels, conditions=_NOTES
    )


def _table(rows: Sequence[Row[BucketClient]], way: Way, peaks: Peaks) -> Table:
    limit = next((row for row in rows if row.contender.key == LIMITS[way] and row.timings), None)
    body: list[list[str]] = []
    for row in rows:
        key, name = row.contender.key, row.contender.name
        if not row.timings:
            body.append([name, f"not run: {row.not_run}"])
            continue
        body.append(
            [
                name,
                str(row.spread("seconds")),
                _ratio(row, limit, "seconds"),
                _text(row.spread("cpu_seconds")),
                _ratio(row, limit, "cpu_seconds"),
                _text(row.spread("sent")),
                _text(row.spread("received")),
                f"{peaks[key][way]:.0f}" if key in peaks else "",
            ]
        )
        if row.not_run:
            body.append([f"  {name}", f"stopped: {row.not_run}"])
    return Table((way, *_HEADER[1:]), body)


def _ratio(row: Row[Any], limit: Row[Any] | None, measure: str) -> str:
    ratio = over(row.median(measure), None if limit is None else limit.median(measure))
    return "" if ratio is None else f"{ratio:.2f}"


def _text(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"


def _data(row: Row[BucketClient], peak: float | None) -> dict[str, Any]:
    return {
        **row.as_json(_MEASURES),
        "peak_mib": peak,
    }
