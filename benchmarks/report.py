"""What a benchmark hands back: lines for the terminal, data for the file, panels for the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from benchmarks.contenders import Kind
from benchmarks.timing import Spread

SCHEMA_VERSION = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with whiskers; without a spread the note says why there is none."""

    label: str
    kind: Kind
    spread: Spread | None
    note: str = ""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A panel of horizontal bars; `axis` names quantity and unit."""

    title: str
    axis: str
    bars: Sequence[Bar]
    log: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """A panel of one or more curves."""

    title: str
    x_axis: str
    y_axis: str
    x: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    log: bool = False


class Table(NamedTuple):
    """Cells as text; the first column names the rows, and a short row ends in a remark."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One benchmark's outcome."""

    benchmark: str
    title: str
    table: Sequence[Table | str]  # and lines beside them
    results: Mapping[str, Any]
    panels: Sequence[Bars | Lines] = ()
    conditions: Sequence[str] = field(default_factory=tuple[str, ...])

    def lines(self) -> list[str]:
        """For the terminal."""
        parts = [render(*part) if isinstance(part, Table) else [part] for part in self.table]
        return [line for lines in parts for line in lines]

    def as_json(self, machine: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """For the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "benchmark": self.benchmark,
            "title": self.title,
            "conditions": list(self.conditions),
            "machine": dict(machine),
            "options": dict(options),
            "results": self.results,
        }


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table: the first column to the left, all others to the right; short rows end in a remark."""
    full = [header, *(row for row in rows if len(row) == len(header))]
    widths = [max(len(row[column]) for row in full) for column in range(len(header))]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows)) if rows else widths[0]
    lines = []
    for row in [header, *rows]:
        first, *others = row
        if len(row) == len(header):
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        else:
            cells = others
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def spread_json(spread: Spread | None) -> dict[str, Any] | None:
    """For the file; null where nothing was measured."""
    return None if spread is None else spread.as_json()
