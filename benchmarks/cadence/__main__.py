"""`python -m benchmarks.cadence --overhead` or `--kills`: the bars of a cadence that decides itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cadence import kills, share


def main(arguments: Sequence[str]) -> int:
    """Measure, print lines, write them as JSON if asked; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cadence", description=__doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--overhead", action="store_true", help="what MaxOverhead(x) really costs")
    kind.add_argument("--kills", action="store_true", help="Optimal against fixed intervals, with SIGKILLs")
    parser.add_argument("--root", type=Path, default=Path("/tmp"), help="where to make the roots")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training for each x")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.005, 0.01, 0.05])
    parser.add_argument("--number", type=int, default=32, help="of kills for each contender")
    parser.add_argument("--mtbf", type=float, default=2.5, help="mean seconds from start to kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=512, help="of the model's layers for --kills")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    if given.overhead:
        found = share.measure(given.root, given.fractions, seconds=given.seconds)
    else:
        schedule = kills.Schedule(number=given.number, mtbf=given.mtbf, seed=given.seed)
        found = kills.measure(given.root, schedule, width=given.width)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
