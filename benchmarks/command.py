"""What the command lines of the benchmarks have in common: options, the run, what is shown and written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.machine import in_words, machine_facts
from benchmarks.picture import PictureError, draw, require_matplotlib
from benchmarks.report import Report

Mode = Callable[[argparse.Namespace, Path], Report]

_LOCAL_OPTIONS = {"root", "json", "picture", "record", "before"}


def add_state_options(parser: argparse.ArgumentParser, gib_help: str, tensors_help: str) -> None:
    """How large the state is, how it is cut, and where it is."""
    state = parser.add_argument_group("the state")
    state.add_argument("--gib", type=positive, help=gib_help)
    state.add_argument("--tensors", type=int, help=tensors_help)
    state.add_argument("--many", type=int, metavar="N", help="N small tensors of equal size")
    state.add_argument("--large", action="store_true", help="16 large tensors of equal size")
    state.add_argument("--device", help="where the state is (default: cuda if there is one)")


def add_common_options(group: Any, keys: Collection[str]) -> None:
    """Rounds, contenders, and where everything goes."""
    group.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    group.add_argument(
        "--only", type=keys_among(keys), default=[], metavar="KEY,KEY", help=f"of {', '.join(keys)}"
    )
    group.add_argument(
        "--root", type=Path, help="directory on the disk to measure (default: a temporary one)"
    )
    group.add_argument("--json", type=Path, help="write everything that was measured there")
    group.add_argument("--record", type=Path, help="write there what docs/measurements.md shows")
    group.add_argument("--picture", type=Path, help="draw there, e.g. out.png")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace, mode: Mode) -> int:
    """Measure in a directory of its own, show the report, write what was asked for; the exit code."""
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        if options.picture:
            require_matplotlib()
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.root) as directory:
            machine = machine_facts(Path(directory), options.device)
            load = os.getloadavg()[0]
            report = mode(options, Path(directory))
    except PictureError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    _show(report, in_words(machine))
    if options.record:
        records.write(options.record, report, machine=in_words(machine), command=_command(parser), load=load)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(machine, _public(options)), indent=1) + "\n")
    if options.picture:
        draw(options.picture, report.title, report.panels, [*report.conditions, in_words(machine)])
    return 0


def tell(text: str) -> None:
    """Progress, beside the report."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> float:
    """A number above 0, for `type=`."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def keys_among(known: Collection[str]) -> Callable[[str], Sequence[str]]:
    """Keys of contenders, separated by commas, for `type=`."""

    def keys(text: str) -> Sequence[str]:
        asked = text.split(",")
        unknown = [key for key in asked if key not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no contender is called {', '.join(unknown)}")
        return asked

    return keys


def _show(report: Report, machine: str) -> None:
    print("\n".join(["", report.title, machine, *report.conditions, "", *report.lines()]))


def _command(parser: argparse.ArgumentParser) -> str:
    """The command line of this process, without places."""
    given = [
        part for part in sys.argv[1:] if "=" not in part or part[2:].partition("=")[0] not in _LOCAL_OPTIONS
    ]
    pairs = zip(given, ["", *given], strict=False)
    local = {f"--{name}" for name in _LOCAL_OPTIONS}
    return shlex.join([*parser.prog.split(), *(part for part, before in pairs if not {part, before} & local)])


def _public(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was measured; not where."""
    chosen = {key: value for key, value in vars(options).items() if key not in _LOCAL_OPTIONS}
    return {**chosen, "device": options.device.type}
