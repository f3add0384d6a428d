"""`python -m tests.exactness`: run the matrix, and write `docs/reference/exactness.md`.

All of it takes about half an hour on two cores; `--strength 2` is a sample, and
`--only host=lightning --only strategy=ddp` a part, which writes no page. With `--verdicts FILE` it can be
stopped and continued: cells of the file that are what they should be are not run again. The exit code is 1
if a cell is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing import set_forkserver_preload
from pathlib import Path

from tests.exactness.cells import AXES, Cell, impossible
from tests.exactness.covering import covering
from tests.exactness.page import page
from tests.exactness.rig import judged
from tests.exactness.verdicts import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "exactness.md"
_PRELOAD = (
    "torch._dynamo.repro.after_dynamo", "torch.profiler", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torchdata.stateful_dataloader",
    "ckpt_core.manager", "lightning.pytorch", "accelerate", "transformers.trainer", "tests.frozen",
)  # fmt: skip
_AT_ONCE = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a cell is not what it should be."""
    chosen = _parser().parse_args(arguments)
    logging.disable(logging.INFO)
    set_forkserver_preload(list(_PRELOAD))
    known = {each.cell: each for each in _read(chosen.verdicts) if not impossible(each.cell.values)}
    cells = covering(chosen.strength, seed=chosen.seed, begin=list(known))
    wanted = [cell for cell in cells if all(_has(cell, *each) for each in chosen.only)]
    verdicts = [each for cell in wanted if (each := known.get(cell)) is not None and each.as_expected]
    done = {each.cell for each in verdicts}
    try:
        for verdict in _run([cell for cell in wanted if cell not in done], chosen.root):
            verdicts.append(verdict)
            _keep(verdict, chosen.verdicts)
            mark = "" if verdict.as_expected else "  <-- "
            print(f"{verdict.cell}: {verdict.word} {verdict.why}{mark}", flush=True)
    finally:  # also what was run until somebody stopped it
        if not chosen.only:
            chosen.page.write_text(page(verdicts, chosen.strength), encoding="utf-8")
    unexpected = [each for each in verdicts if not each.as_expected]
    seconds = sum(each.seconds for each in verdicts)
    print(f"{len(verdicts)} cells, {seconds:.0f} s of processor time")
    print(f"{len(unexpected)} are not what they should be")
    return int(bool(unexpected))


def _run(cells: Sequence[Cell], root: Path | None) -> Iterator[Verdict]:
    """Some cells at a time, so that verdicts come early and no more than these are on the disk."""
    ordered = sorted(cells, key=lambda cell: (cell.place.world, cell.place_of_resume.world))
    for first in range(0, len(ordered), _AT_ONCE):
        print(f"{first} of {len(ordered)} cells", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="exactness-", dir=root) as folder:
            yield from judged(ordered[first : first + _AT_ONCE], Path(folder), seconds_each=120)


def _read(path: Path | None) -> Iterator[Verdict]:
    """The newest verdict of every cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    found = {cell: entry for entry in map(json.loads, lines) if (cell := Cell(**entry.pop("cell")))}
    yield from (Verdict(cell=cell, **entry) for cell, entry in found.items())


def _keep(verdict: Verdict, path: Path | None) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def _has(cell: Cell, axis: str, value: str) -> bool:
    return str(cell.values[axis]) == value


def _choice(text: str) -> tuple[str, str]:
    axis, _, value = text.partition("=")
    if value not in map(str, AXES.get(axis, ())):
        named = "; ".join(f"{name}={'|'.join(map(str, values))}" for name, values in AXES.items())
        raise argparse.ArgumentTypeError(f"{text}: not one of {named}")
    return axis, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    parser.add_argument("--strength", type=int, default=3, help="axes whose every combination occurs (3)")
    parser.add_argument("--seed", type=int, default=1, help="another one chooses other cells (1)")
    parser.add_argument("--only", type=_choice, action="append", default=[], metavar="AXIS=VALUE")
    parser.add_argument("--verdicts", type=Path, help="file to continue: one verdict in each line")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is written")
    parser.add_argument("--root", type=Path, help="directory for checkpoints (default: a temporary one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
