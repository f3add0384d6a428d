"""`report`: what the checkpoints of a root have cost, and what would cost less."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from ckpt_core.cli._arguments import Commands, none_committed, open_root, refuse_file_of_a_root
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.errors import ConfigError
from ckpt_core.options import bytes_text
from ckpt_core.reporting import Section, page, report_of, sections


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser(
        "report",
        parents=[shared],
        help="report what saves have cost, what failures took, and what would cost less",
        description="Reports on a root from its journal and its manifests: goodput and its parts, stalls, "
        "lost work, retention, and the interval that would have cost least. As text, JSON, or one HTML page "
        "that needs no network.",
    )
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("--html", metavar="FILE", help="write the page to this file")
    command.set_defaults(command=run)


def run(arguments: Namespace) -> Outcome:
    """Report on a root; with `--html`, also write the page."""
    storage = open_root(arguments.root, arguments.storage_options)
    report = report_of(storage, time.time())
    if not report.checkpoints and not report.runs and not report.unreadable and report.older is None:
        raise none_committed(storage)
    written: list[str] = []
    if arguments.html is not None:
        written = [_write(Path(arguments.html), page(report))]
    goodput, parts = report.balance.goodput, [part for each in sections(report) for part in _parts(each)]
    return Outcome(
        fields={**asdict(report), "goodput": goodput, "html": arguments.html},
        parts=[report.root, *(written or parts)],
    )


def _write(path: Path, text: str) -> str:
    """Write the page; return a line that says so."""
    refuse_file_of_a_root("--html", path)
    content = text.encode("utf-8", "replace")
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from error
    return f"the page is {path}, {bytes_text(len(content))}"


def _parts(each: Section) -> list[str | Table]:
    table = [Table(columns=each.columns, rows=each.rows, figures=each.figures)] if each.rows else []
    return ["", f"{each.title}:", *(f"  {line}" for line in each.lines), *table]
