"""Kills and faults everywhere, and what a fresh process then finds.

Whatever is done to a job, a checkpoint that was acknowledged must be found, whole, with the right values, and
the next job must go on. Run as `python -m tests.reliability --json out.json`: all of it takes long;
`--only local,power` does a part, `--count 50` a sample of each part, `--case NAME` the cases whose names
begin so. The exit code is 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch

from benchmarks.machine import in_words, machine_facts
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome, problems, table

PARTS: Final = {
    "local": "tests.reliability.disk.kills",
    "first": "tests.reliability.disk.first_save",
    "power": "tests.reliability.disk.power",
    "ambush": "tests.reliability.disk.ambush",
    "nodes": "tests.reliability.nodes.node_kills",
    "node-uploads": "tests.reliability.nodes.node_uploads",
    "s3": "tests.reliability.objects.kills",
    "uploads": "tests.reliability.uploads.upload_kills",
    "process-uploads": "tests.reliability.uploads.process_kills",
    "power-uploads": "tests.reliability.uploads.power_cuts",
    "lost-disk": "tests.reliability.uploads.lost_disk",
    "bucket-uploads": "tests.reliability.uploads.bucket_kills",
    "bucket-faults": "tests.reliability.uploads.bucket_faults",
    "copies": "tests.reliability.copies.on_disk",
    "s3-copies": "tests.reliability.copies.in_bucket",
    "demotions": "tests.reliability.copies.demotions",
    "faults": "tests.reliability.ranks.storage_faults",
    "ranks": "tests.reliability.ranks.rank_failures",
    "training": "tests.reliability.training.campaigns",
    "preemption": "tests.reliability.preemption.experiment",
    "restarts": "tests.reliability.restarts",
    "referee": "tests.reliability.referee.hearing",
    "damage": "tests.reliability.damage",
    "fuzz": "tests.reliability.fuzz",
}
"""Name on the command line -> module whose `run` yields outcomes; see `outcome.Run`."""

_SHARED: Final = ("ckpt_core.manager", "torch._dynamo")
"""What nearly every part would import by itself; the first optimizer of a process imports the latter."""

_PROGRESS_SECONDS: Final = 10.0
_SHOWN: Final = 20
_INTERRUPTED: Final = "it was interrupted"


@final
@dataclass(kw_only=True, slots=True)
class Part:
    """One module's experiments, while they run.

    Attributes:
        name: as on the command line.
        outcomes: what was found so far.
        failure: why it could not go on, "" if it could.
        seconds: how long it took.
    """

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    def take(self, told: Sequence[Any]) -> None:
        """Take in what its process has told; what is wrong is said at once, for the whole may take hours."""
        for message in told:
            if "error" in message:
                self.failure = message["error"]
            else:
                self.outcomes.append(Outcome(**message))
                for line in problems(self.outcomes[-1:]):
                    print(line, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        kills = sum(outcome.kills for outcome in self.outcomes)
        broken = len(problems(self.outcomes))
        points = sum(outcome.times for outcome in self.outcomes)
        done = f"{points} points, {kills} kills, {broken} problems"
        return f"{self.name}: {done}, {self.seconds:.0f} s"


def perform(part: Part, folder: Path, choice: Choice) -> None:
    """Run a part in a process of its own, which is free to fork, and say now and then how far it is."""

    def act(tell: forks.Tell) -> None:
        run = importlib.import_module(PARTS[part.name]).run
        for outcome in run(choice, folder):
            tell(asdict(outcome))

    began = last = time.monotonic()
    folder.mkdir()
    part.failure = _INTERRUPTED
    child = forks.fork(act)
    going = True
    while going:
        going = child.listen()
        part.take(child.told)
        child.told.clear()
        part.seconds = time.monotonic() - began
        if not going or time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            print(part, file=sys.stderr, flush=True)
    if part.failure == _INTERRUPTED:
        part.failure = "" if child.status == 0 else f"its process ended with status {child.status}"


def report(parts: Sequence[Part]) -> str:
    """The table, and what was broken."""
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    rows = sorted(table(outcomes), key=lambda row: str(row["sweep"]))
    columns = ("points", "kills", "lost", "problems")
    width = max((len(row["sweep"]) for row in rows), default=0)
    lines = [f"{'':{width}}" + "".join(f"{column:>10}" for column in columns)]
    lines += [f"{row['sweep']:{width}}" + "".join(f"{row[column]:10}" for column in columns) for row in rows]
    total = {column: sum(row[column] for row in rows) for column in columns}
    lines.append(f"{'all':{width}}" + "".join(f"{total[column]:10}" for column in columns))
    seconds = sum(part.seconds for part in parts)
    lines.append(f"{seconds:.0f} s, {total['kills'] / max(seconds, 0.001):.1f} kills per second")
    broken = problems(outcomes)
    lines += broken[:_SHOWN]
    if len(broken) > _SHOWN:
        lines.append(f"... and {len(broken) - _SHOWN} more problems")
    lines += [f"{part.name} did not come to its end:\n{part.failure}" for part in parts if part.failure]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a promise was broken, or an experiment could not be made."""
    chosen = _parser().parse_args(arguments)
    # What the victims and their heirs log is what they are meant to: it is the outcome that counts.
    logging.disable()
    torch.set_num_threads(1)
    forks.adopt(_SHARED)
    choice = Choice(seed=chosen.seed, count=chosen.count, named=tuple(chosen.case))
    folder = Path(tempfile.mkdtemp(prefix="reliability-", dir=chosen.root))
    try:
        facts = machine_facts(folder, torch.device("cpu"))
        parts = [Part(name=name) for name in chosen.only]
        for part in parts:
            perform(part, folder / part.name, choice)
    except KeyboardInterrupt:
        print("interrupted: what was found until now", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(in_words(facts))
    print(report(parts))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(_everything(parts, chosen, facts), indent=1))
    broken = any(problems(part.outcomes) or part.failure for part in parts)
    return int(broken)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--only", type=_names, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="points of each sweep (default: all)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose names begin like this")
    parser.add_argument("--root", type=Path, help="directory on the disk to try (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    return parser


def _everything(parts: Sequence[Part], chosen: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    return {
        "machine": facts,
        "seed": chosen.seed,
        "count": chosen.count,
        "cases": chosen.case,
        "parts": [{"name": p.name, "seconds": round(p.seconds, 1), "failure": p.failure} for p in parts],
        "table": table(outcomes),
        "problems": problems(outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
