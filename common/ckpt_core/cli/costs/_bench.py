"""`bench`: what the storage of a root can do, by the calls of saves and loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckpt_core.cli._arguments import Commands, open_target
from ckpt_core.cli._cp import interruptible
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.planning import (
    BenchLimits,
    BenchResult,
    measure_storage,
    seconds_from,
    seconds_text,
    size_text,
)
from ckpt_core.storage import LocalStorage, open_storage


def add(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the command and its options."""
    command = commands.add_parser(
        "bench",
        parents=[shared],
        help="measure the storage of a root: GB/s, latency of small files and of a commit",
        description="Writes and reads files as saves and loads do, in a directory of its own in the root, "
        "which is removed at the end; what a killed measurement has left, the next one removes. No "
        "checkpoint is touched. `ckpt plan --storage FILE` reads what --json writes.",
    )
    command.add_argument("root", metavar="ROOT", help="path or URL; a directory that is there")
    command.add_argument("--gib", type=float, default=4.0, metavar="N", help="the most to write in all (4)")
    command.add_argument("--seconds", default="60", metavar="TIME", help="for reads and writes in all (60)")
    command.add_argument(
        "--writers", default="1,4", metavar="N,N", help="numbers of files written at the same time (1,4)"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Measure, and show what was measured."""
    limits = BenchLimits(
        total_bytes=_bytes(arguments.gib),
        seconds=seconds_from("--seconds", arguments.seconds),
        writers=_writers(arguments.writers),
    )
    storage = open_storage(arguments.root, arguments.storage_options)
    if isinstance(storage, LocalStorage) and not Path(storage.url).is_dir():
        raise CheckpointNotFoundError(
            f"{storage.url}: is no directory: make it first, as a measurement leaves nothing behind"
        )
    target = open_target(arguments.root, arguments.storage_options)
    with (
        interruptible() as stop,
        ProgressLine(
            f"measuring {target.url}", 2 * limits.total_bytes, plain=True, seconds=limits.seconds
        ) as line,
    ):
        result = measure_storage(target, limits, progress=line.add, stop=stop)
    return Outcome(fields=result.record, parts=_parts(result))


def _bytes(gib: float) -> int:
    if 0 < gib <= 2**20:
        return int(gib * 2**30)
    raise ConfigError(f"--gib must be above 0 and at most {2**20:,}, not {gib:g}")


def _writers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--writers must be numbers with commas between, such as 1,4, not {text!r}"
        ) from None


def _parts(result: BenchResult) -> list[str | Table]:
    def rate(value: float) -> str:
        return f"{size_text(value)}/s"

    table = Table(
        columns=("WRITERS", "FILES", "WRITTEN", "WRITE", "DURABLE", "READ"),
        rows=[
            (
                str(run.writers),
                str(run.files),
                size_text(run.size_bytes),
                rate(run.write_bytes_per_second),
                rate(run.durable_bytes_per_second),
                rate(run.read_bytes_per_second),
            )
            for run in result.runs
        ],
    )
    removed = [f"removed what a killed measurement has left: {name}" for name in result.collected]
    return [
        *removed,
        table,
        f"a small file, durable: {seconds_text(result.small_write_seconds)}; "
        f"a commit: {seconds_text(result.commit_seconds)}",
    ]
