"""The result of a command, shown as text and tables or as JSON."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, final

from ckpt_core.disclosure import printable
from ckpt_core.types import DataPosition, Provenance

Row: TypeAlias = tuple[str, ...]
_GAP: Final = "  "


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a header; columns from `figures` on are aligned to the right."""

    columns: Row
    rows: Sequence[Row]
    figures: int = 99


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a command: `fields` for `--json`, `parts` for people."""

    fields: Mapping[str, Any]
    parts: Sequence[str | Table] = ()
    exit_code: int = 0


def show(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_without_nan(outcome.fields), indent=2) + "\n")
        return
    for part in outcome.parts:
        if isinstance(part, str):
            sys.stdout.write(printable(part) + "\n")
        elif not (sys.stdout.isatty() and _show_rich(part)):
            _show_plain(part)


def time_text(seconds: float) -> str:
    moment = moment_text(seconds)
    return "?" if moment is None else moment[:19].replace("T", " ")


def moment_text(seconds: float) -> str | None:
    """Format a Unix time for programs, in ISO 8601; None if it is out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def metrics_text(metrics: Mapping[str, float], *, most: int = 1000, first: str = "") -> str:
    """Format metrics for people: `val_loss=1.25`."""
    ordered = sorted(metrics.items(), key=lambda each: (repr(each[0]) not in first, each[0]))
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return " ".join(f"{name}={value:.6g}" for name, value in ordered[:most]) + more


def code_text(known: Provenance) -> str:
    """Format a code version: a commit, and whether files were changed."""
    version = known.code_version
    return f"{version}, changed" if version and known.code_dirty else version


def data_text(data: Mapping[str, DataPosition]) -> str:
    """Format positions in data: `epoch 3, 1,200 of 5,000 samples`."""
    return "; ".join(
        f"{name}: {_position_text(each)}" if len(data) > 1 else _position_text(each)
        for name, each in sorted(data.items())
    )


def _position_text(position: DataPosition) -> str:
    epoch = "" if position.epoch is None else f"epoch {position.epoch}"
    of = "" if position.of is None else f" of {position.of:,}"
    samples = "" if position.samples is None else f"{position.samples:,}{of} samples"
    return ", ".join(filter(None, (epoch, samples)))


def _show_plain(table: Table) -> None:
    lines = [tuple(map(printable, row)) for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - len(_GAP) * (len(widths) - 1)
        while sum(widths) > room and max(widths) > 1:
            widths[widths.index(max(widths))] -= 1
    for line in lines:
        cut = [
            cell if len(cell) <= width else f"{cell[: width - 1]}…"
            for cell, width in zip(line, widths, strict=True)
        ]
        cells = [
            cell.ljust(width) if place < table.figures else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cut, widths, strict=True))
        ]
        sys.stdout.write(_GAP.join(cells).rstrip() + "\n")


def _show_rich(table: Table) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    rich_table = RichTable(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(table.columns):
        rich_table.add_column(column, justify="left" if place < table.figures else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(rich_table)
    return True


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by text, because JSON does not know them."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
