"""`report`: what the checkpoints of a root have cost, and what would cost less."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ckpt_core.cli._arguments import none_committed, open_root
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.errors import ConfigError
from ckpt_core.names import MARKER, OWN, is_own_file
from ckpt_core.options import bytes_text
from ckpt_core.reporting import Report, page, report_of, sections


def run(arguments: Namespace) -> Outcome:
    storage = open_root(arguments.root, arguments.storage_options)
    report = report_of(storage, time.time())
    if not report.checkpoints and not report.runs and not report.unreadable:
        raise none_committed(storage)
    written = "" if arguments.html is None else _write(Path(arguments.html), page(report))
    return Outcome(
        fields={**asdict(report), "html": arguments.html},
        parts=[report.root, *([written] if written else _parts(report))],
    )


def _write(path: Path, text: str) -> str:
    """Write the page, but over no file of a root, and into no checkpoint."""
    place = path.absolute()
    own = is_own_file(place.name) or OWN in place.parts
    if own or any((parent / MARKER).exists() for parent in place.parents):
        what = "is the name of a file of checkpoints" if own else "lies in a checkpoint"
        raise ConfigError(f"--html {path}: it {what}; write it elsewhere")
    content = text.encode("utf-8", "replace")
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from error
    return f"the page is {path}, {bytes_text(len(content))}"


def _parts(report: Report) -> Iterator[str | Table]:
    for each in sections(report):
        yield from ("", f"{each.title}:", *(f"  {line}" for line in each.lines))
        if each.rows:
            yield Table(columns=each.columns, rows=each.rows, figures=each.figures)
