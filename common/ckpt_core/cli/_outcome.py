"""What a command shows: its result as text or JSON, and how far it is."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, final

from ckpt_core.disclosure import printable
from ckpt_core.options import bytes_text
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


_EVERY_SECONDS: Final = 0.2
_PLAIN_EVERY_SECONDS: Final = 10.0
_CLEAR: Final = "\r\x1b[K"


@final
class ProgressLine:
    """One line on standard error, updated in place and replaced by a summary.

    Where that is no terminal, a line now and then if `plain`, else nothing. A total of 0 is not known yet.
    Concurrency: `add` on any thread.
    """

    def __init__(self, what: str, total_bytes: int, *, plain: bool = False) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._terminal = bool(sys.stderr and sys.stderr.isatty())
        self._shown = self._terminal or plain
        self._every = _EVERY_SECONDS if self._terminal else _PLAIN_EVERY_SECONDS
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = self._written = time.monotonic()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if self._shown and now - self._written >= self._every:
                self._written = now
                self._write(self._total_bytes)

    def expect(self, size_bytes: int) -> None:
        with self._lock:
            self._total_bytes = size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal and kind is None:
            self._write(0)
            say("\n")
        elif self._terminal:
            say(_CLEAR)

    def _write(self, total: int) -> None:
        done = self._done_bytes
        rate = done / max(time.monotonic() - self._began, 1e-9)
        of = f" of {bytes_text(total)}" if total else ""
        text = f"{self._what}: {bytes_text(done)}{of}, {rate / 1e9:.2f} GB/s"
        if rate and total > done:
            minutes, seconds = divmod(round((total - done) / rate), 60)
            hours, minutes = divmod(minutes, 60)
            text += f", {hours}:{minutes:02}" if hours else f", {minutes}"
            text += f":{seconds:02} left"
        say(f"{_CLEAR}{text}" if self._terminal else f"ckpt: {text}\n")


def say(text: str) -> None:
    """Write to standard error, if it can be: no work ends because nobody reads it."""
    if not sys.stderr:  # closed by the caller (`2>&-`)
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # What Python still holds of it must not become an error when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
