"""`python -m tests.exactness`: run the matrix, and write `docs/exactness.md`.

All of it takes about a quarter of an hour on two cores; `--strength 2` is a sample, and
`--only host=lightning --only strategy=ddp` a part, which writes no page. The exit code is 1 if a cell is not
what it should be.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path

from tests.exactness.cells import AXES, Cell
from tests.exactness.covering import covering
from tests.exactness.page import page
from tests.exactness.rig import judged

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
_PRELOAD = (
    "torch._dynamo.repro.after_dynamo", "torch.profiler", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torchdata.stateful_dataloader",
    "ckpt_core.manager", "lightning.pytorch", "accelerate", "transformers.trainer", "tests.frozen",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a cell is not what it should be."""
    chosen = _parser().parse_args(arguments)
    logging.disable(logging.INFO)
    set_forkserver_preload(list(_PRELOAD))
    cells = [
        cell
        for cell in covering(chosen.strength, seed=chosen.seed)
        if all(_has(cell, *each) for each in chosen.only)
    ]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="exactness-", dir=chosen.root) as folder:
        for verdict in judged(cells, Path(folder), seconds_each=30):
            verdicts.append(verdict)
            mark = "" if verdict.as_expected else "  <-- "
            print(f"{verdict.cell}: {verdict.word} {verdict.why}{mark}", flush=True)
    unexpected = [each for each in verdicts if not each.as_expected]
    seconds = sum(each.seconds for each in verdicts)
    print(f"{len(verdicts)} cells, {seconds:.0f} s of processor time")
    print(f"{len(unexpected)} are not what they should be")
    if not chosen.only:
        chosen.page.write_text(page(verdicts, chosen.strength), encoding="utf-8")
    return int(bool(unexpected))


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
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is written")
    parser.add_argument("--root", type=Path, help="directory for checkpoints (default: a temporary one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
