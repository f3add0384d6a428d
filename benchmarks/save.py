"""How long a save stops the training, and how long until it is durable, against stock DCP and raw limits.

    python -m benchmarks.save --gib 2 --tensors 330 --rounds 11 --json out.json --picture out.png

Without a mode: interleaved rounds of all contenders. Modes: --first, --interference, --soak, --ranks,
--simulate-ranks. --many and --large choose another state.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import first, interference, lineup, ranks, rounds, simulate, soak
from benchmarks.machine import in_words, machine_facts
from benchmarks.picture import PictureError, draw, require_matplotlib
from benchmarks.report import Report
from benchmarks.state import state_shape

_DESCRIPTION = "How long a save stops the training, and how long until it is durable."
_LOCAL_OPTIONS = {"root", "json", "picture"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    options = parser().parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        if options.picture:
            require_matplotlib()
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.root) as directory:
            machine = machine_facts(Path(directory), options.device)
            report = _mode(options)(options, Path(directory))
    except PictureError as error:
        print(f"benchmarks.save: {error}", file=sys.stderr)
        return 2
    _show(report, in_words(machine))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(machine, _public(options)), indent=1) + "\n")
    if options.picture:
        draw(options.picture, report.title, report.panels, [*report.conditions, in_words(machine)])
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.save", description=_DESCRIPTION)
    state = made.add_argument_group("the state")
    state.add_argument(
        "--gib", type=_positive, help="GiB to save (default 1; --many 0.3, --large 2, --soak 0.0625)"
    )
    state.add_argument("--tensors", type=int, help="tensors (default 330; 1000 for --simulate-ranks)")
    state.add_argument("--many", type=int, metavar="N", help="N small tensors of equal size")
    state.add_argument("--large", action="store_true", help="16 large tensors of equal size")
    state.add_argument("--device", help="where the state is (default: cuda if there is one)")
    mode = made.add_argument_group("modes").add_mutually_exclusive_group()
    mode.add_argument("--first", action="store_true", help="the first save of a fresh process")
    mode.add_argument(
        "--interference", action="store_true", help="what saves cost a training loop beside them"
    )
    mode.add_argument("--soak", type=int, metavar="N", help="N saves in one process: does anything grow?")
    mode.add_argument("--ranks", type=int, metavar="N", help="N gloo ranks, sharded and replicated tensors")
    mode.add_argument(
        "--simulate-ranks", type=_counts, metavar="N,N", help="planning at many ranks, simulated"
    )
    how = made.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    how.add_argument("--only", type=_keys, default=[], metavar="KEY,KEY", help=f"of {', '.join(lineup.ALL)}")
    how.add_argument("--step-ms", type=_positive, default=250.0, help="--interference: a step's length")
    how.add_argument(
        "--base-steps", type=int, default=12, help="--interference: steps without a save, per save"
    )
    how.add_argument("--timeout-s", type=_positive, default=1800.0, help="--ranks, --first: kill after")
    how.add_argument("--root", type=Path, help="directory on the disk to measure (default: a temporary one)")
    how.add_argument("--json", type=Path, help="write everything that was measured there")
    how.add_argument("--picture", type=Path, help="draw there, e.g. out.png")
    return made


def _mode(options: argparse.Namespace) -> Callable[[argparse.Namespace, Path], Report]:
    modes: list[tuple[Any, Callable[[argparse.Namespace, Path], Report]]] = [
        (options.first, _first),
        (options.interference, _interference),
        (options.soak, _soak),
        (options.ranks, _ranks),
        (options.simulate_ranks, _simulate),
    ]
    return next((run for wanted, run in modes if wanted), _rounds)


def _rounds(options: argparse.Namespace, root: Path) -> Report:
    shape = state_shape(options)
    task = rounds.make_task(shape, options.device, root)
    types = lineup.chosen(lineup.SAVE, options.only)
    return rounds.run_rounds(types, shape, task, rounds=options.rounds, progress=_tell)


def _first(options: argparse.Namespace, root: Path) -> Report:
    types = lineup.chosen(lineup.SAVE, options.only)
    settings = first.Settings(
        shape=state_shape(options),
        device=str(options.device),
        rounds=options.rounds,
        timeout_seconds=options.timeout_s,
    )
    return first.run_first(types, settings, root, progress=_tell)


def _interference(options: argparse.Namespace, root: Path) -> Report:
    settings = interference.Settings(
        shape=state_shape(options),
        device=options.device,
        saves=options.rounds,
        step_seconds=options.step_ms / 1e3,
        base_steps=options.base_steps,
    )
    types = lineup.chosen(lineup.INTERFERENCE, options.only)
    return interference.run_interference(types, settings, root, progress=_tell)


def _soak(options: argparse.Namespace, root: Path) -> Report:
    options.gib = options.gib or 0.0625
    task = rounds.make_task(state_shape(options), options.device, root)
    return soak.run_soak(task, options.soak, root, progress=_tell)


def _ranks(options: argparse.Namespace, root: Path) -> Report:
    settings = ranks.Settings(
        world_size=options.ranks,
        shape=state_shape(options),
        rounds=options.rounds,
        timeout_seconds=options.timeout_s,
    )
    return ranks.run_ranks_benchmark(lineup.chosen(lineup.RANKS, options.only), settings, root)


def _simulate(options: argparse.Namespace, root: Path) -> Report:
    return simulate.run_simulation(options.simulate_ranks, options.tensors or 1000, root, progress=_tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: Report, machine: str) -> None:
    print("\n".join(["", report.title, machine, *report.conditions, "", *report.table]))


def _public(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was measured; not where."""
    chosen = {key: value for key, value in vars(options).items() if key not in _LOCAL_OPTIONS}
    return {**chosen, "device": options.device.type}


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _keys(text: str) -> list[str]:
    keys = text.split(",")
    unknown = [key for key in keys if key not in lineup.ALL]
    if unknown:
        raise argparse.ArgumentTypeError(f"no contender is called {', '.join(unknown)}")
    return keys


if __name__ == "__main__":
    raise SystemExit(main())
