"""How long a load takes, what it reads and how much memory it needs, against stock DCP and raw limits.

    python -m benchmarks.load --gib 2 --tensors 330 --rounds 11 --json out.json --picture out.png

Without a mode: interleaved rounds of all loaders. Modes: --ranks, --peak. --many and --large choose another
state, --cold drops the files from the page cache before every load.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.command import Mode, add_common_options, add_state_options, positive, run, tell
from benchmarks.loading import lineup, peak, ranks, rounds
from benchmarks.loading.layouts import Layout
from benchmarks.loading.pages import PageState
from benchmarks.report import Report
from benchmarks.state import state_shape

_DESCRIPTION = "How long a load takes, what it reads, and how much memory it needs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    made = parser()
    options = made.parse_args(arguments)
    _refuse_what_does_not_go_together(made, options)
    return run(made, options, _mode(options))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.load", description=_DESCRIPTION)
    add_state_options(made, "GiB to load (default 1; --many 0.3, --large 2)", "tensors (default 330)")
    mode = made.add_argument_group("modes").add_mutually_exclusive_group()
    mode.add_argument(
        "--ranks", type=int, metavar="N", help="N gloo ranks save, and as many load or --load-ranks"
    )
    mode.add_argument("--peak", action="store_true", help="memory beyond the model, in fresh processes")
    how = made.add_argument_group("how")
    how.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each load"
    )
    how.add_argument("--layout", choices=get_args(Layout), default="ddp", help="--ranks: how tensors lie")
    how.add_argument(
        "--load-ranks", type=int, metavar="N", help="--ranks: N load (default: as many; fsdp: one less)"
    )
    how.add_argument("--timeout-s", type=positive, default=1800.0, help="--ranks, --peak: kill after")
    add_common_options(how, lineup.ALL)
    return made


def _refuse_what_does_not_go_together(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.ranks and options.layout == "hsdp" and (options.ranks % 2 or _load_ranks(options) % 2):
        made.error("--layout hsdp needs an even number of ranks")
    types = lineup.RANKS if options.ranks else lineup.PEAK if options.peak else lineup.ALL.values()
    known = {each.key for each in types}
    if not known.issuperset(options.only):
        made.error(f"this mode has {', '.join(sorted(known))}")


def _mode(options: argparse.Namespace) -> Mode:
    if options.ranks:
        return _ranks
    return _peak if options.peak else _rounds


def _rounds(options: argparse.Namespace, root: Path) -> Report:
    shape = state_shape(options)
    return rounds.run_load_rounds(
        lineup.chosen(lineup.LOAD, options.only),
        shape,
        rounds.make_load_task(shape, options.device, root),
        rounds=options.rounds,
        pages=_pages(options),
        progress=tell,
    )


def _ranks(options: argparse.Namespace, root: Path) -> Report:
    settings = ranks.Settings(
        save_ranks=options.ranks,
        load_ranks=_load_ranks(options),
        layout=options.layout,
        shape=state_shape(options),
        rounds=options.rounds,
        pages=_pages(options),
        timeout_seconds=options.timeout_s,
    )
    return ranks.run_load_ranks(lineup.chosen(lineup.RANKS, options.only), settings, root)


def _peak(options: argparse.Namespace, root: Path) -> Report:
    settings = peak.Settings(
        shape=state_shape(options),
        device=str(options.device),
        rounds=options.rounds,
        pages=_pages(options),
        timeout_seconds=options.timeout_s,
    )
    return peak.run_peak(lineup.chosen(lineup.PEAK, options.only), settings, root, progress=tell)


def _load_ranks(options: argparse.Namespace) -> int:
    fewer = 1 if options.layout == "fsdp" and options.ranks > 1 else 0
    return int(options.load_ranks or options.ranks - fewer)


def _pages(options: argparse.Namespace) -> PageState:
    return "cold" if options.cold else "warm"


if __name__ == "__main__":
    raise SystemExit(main())
