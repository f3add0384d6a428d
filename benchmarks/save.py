"""How long a save stops the training, and how long until it is durable, against stock DCP and raw limits.

    python -m benchmarks.save --gib 2 --tensors 330 --rounds 11 --json out.json --picture out.png

Without a mode: interleaved rounds of all contenders. Modes: --first, --interference, --checksums,
--replicas, --waves, --soak, --ranks, --simulate-ranks. --many and --large choose another state.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import first, interference, lineup, ranks, rounds, simulate, soak
from benchmarks.command import Mode, add_common_options, add_state_options, positive, run, tell
from benchmarks.report import Report
from benchmarks.state import state_shape

_DESCRIPTION = "How long a save stops the training, and how long until it is durable."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    made = parser()
    options = made.parse_args(arguments)
    return run(made, options, _mode(options))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.save", description=_DESCRIPTION)
    add_state_options(
        made,
        "GiB to save (default 1; --many 0.3, --large 2, --soak 0.0625)",
        "tensors (default 330; 1000 for --simulate-ranks)",
    )
    mode = made.add_argument_group("modes").add_mutually_exclusive_group()
    mode.add_argument("--first", action="store_true", help="the first save of a fresh process")
    mode.add_argument(
        "--interference", action="store_true", help="what saves cost a training loop beside them"
    )
    mode.add_argument(
        "--checksums", action="store_true", help="CRC-32 beside SHA-256 of every file, and the raw disk"
    )
    mode.add_argument(
        "--replicas", action="store_true", help="one file beside two of every content, and the raw disk"
    )
    mode.add_argument(
        "--waves", action="store_true", help="memory for half of the state and for all, and the raw disk"
    )
    mode.add_argument("--soak", type=int, metavar="N", help="N saves in one process: does anything grow?")
    mode.add_argument("--ranks", type=int, metavar="N", help="N gloo ranks, sharded and replicated tensors")
    mode.add_argument(
        "--simulate-ranks", type=_counts, metavar="N,N", help="planning at many ranks, simulated"
    )
    how = made.add_argument_group("how")
    how.add_argument("--step-ms", type=positive, default=250.0, help="--interference: a step's length")
    how.add_argument(
        "--base-steps", type=int, default=12, help="--interference: steps without a save, per save"
    )
    how.add_argument("--timeout-s", type=positive, default=1800.0, help="--ranks, --first: kill after")
    add_common_options(how, lineup.ALL)
    return made


def _mode(options: argparse.Namespace) -> Mode:
    modes: list[tuple[Any, Mode]] = [
        (options.first, _first),
        (options.interference, _interference),
        (options.checksums, _checksums),
        (options.replicas, _replicas),
        (options.waves, _waves),
        (options.soak, _soak),
        (options.ranks, _ranks),
        (options.simulate_ranks, _simulate),
    ]
    return next((mode for wanted, mode in modes if wanted), _rounds)


def _rounds(options: argparse.Namespace, root: Path) -> Report:
    return _compared(options, root, lineup.SAVE)


def _checksums(options: argparse.Namespace, root: Path) -> Report:
    return _compared(options, root, lineup.CHECKSUMS)


def _replicas(options: argparse.Namespace, root: Path) -> Report:
    return _compared(options, root, lineup.REPLICAS)


def _waves(options: argparse.Namespace, root: Path) -> Report:
    return _compared(options, root, lineup.WAVES)


def _compared(options: argparse.Namespace, root: Path, types: Sequence[lineup.ContenderType]) -> Report:
    shape = state_shape(options)
    task = rounds.make_task(shape, options.device, root)
    types = lineup.chosen(types, options.only)
    return rounds.run_rounds(types, shape, task, rounds=options.rounds, progress=tell)


def _first(options: argparse.Namespace, root: Path) -> Report:
    types = lineup.chosen(lineup.SAVE, options.only)
    settings = first.Settings(
        shape=state_shape(options),
        device=str(options.device),
        rounds=options.rounds,
        timeout_seconds=options.timeout_s,
    )
    return first.run_first(types, settings, root, progress=tell)


def _interference(options: argparse.Namespace, root: Path) -> Report:
    settings = interference.Settings(
        shape=state_shape(options),
        device=options.device,
        saves=options.rounds,
        step_seconds=options.step_ms / 1e3,
        base_steps=options.base_steps,
    )
    types = lineup.chosen(lineup.INTERFERENCE, options.only)
    return interference.run_interference(types, settings, root, progress=tell)


def _soak(options: argparse.Namespace, root: Path) -> Report:
    options.gib = options.gib or 0.0625
    task = rounds.make_task(state_shape(options), options.device, root)
    return soak.run_soak(task, options.soak, root, progress=tell)


def _ranks(options: argparse.Namespace, root: Path) -> Report:
    settings = ranks.Settings(
        world_size=options.ranks,
        shape=state_shape(options),
        rounds=options.rounds,
        timeout_seconds=options.timeout_s,
    )
    return ranks.run_ranks_benchmark(lineup.chosen(lineup.RANKS, options.only), settings, root)


def _simulate(options: argparse.Namespace, root: Path) -> Report:
    return simulate.run_simulation(options.simulate_ranks, options.tensors or 1000, root, progress=tell)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
