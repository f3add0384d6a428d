"""What every tensor costs: `python -m benchmarks.tiny --tensors 20000,100000 [--before CHECKOUT]`.

Tensors of 16 bytes, saved and loaded by us and by `dcp.save` and `dcp.load`, each in a process of its own, in
turns. `--before` measures an older checkout, too. In brackets: parts of what stock takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.command import add_common_options, run, tell
from benchmarks.fresh import in_fresh_process
from benchmarks.report import Report, Table, spread_json
from benchmarks.timing import Spread, short

_TENSOR_BYTES = 16
_LATER = 3
_OURS, _BEFORE, _STOCK = "ckpt-suite", "ckpt-suite, the checkout before", "dcp.save, dcp.load"
_HEADER = ("tensors", "first save, s", "later saves, s", "load, s", "memory added by saves, MiB", "all files")


def measure(options: argparse.Namespace, root: Path) -> Report:
    """Rounds of fresh processes, in turns; stock with the smallest number of tensors alone."""
    paths = {_OURS: "", **({_BEFORE: str(options.before / "common")} if options.before else {}), _STOCK: ""}
    turns = [
        (count, name)
        for count in sorted(options.tensors)
        for name in paths
        if name != _STOCK or count == min(options.tensors)
    ]
    found: dict[tuple[int, str], list[dict[str, float]]] = {turn: [] for turn in turns}
    for number in range(options.rounds):
        for count, name in turns:
            order = {"stock": name == _STOCK, "tensors": count, "root": str(root / "run")}
            outcome = in_fresh_process(
                "benchmarks.tiny", order, root / "outcome.json", timeout_seconds=600, first_path=paths[name]
            )
            if isinstance(outcome, str):
                raise SystemExit(f"{name}, {count:,} tensors: {outcome}")
            found[count, name].append(outcome)
        tell(f"round {number + 1} of {options.rounds}")
    spreads = {
        turn: {what: Spread.of(each[what] for each in outcomes) for what in outcomes[0]}
        for turn, outcomes in found.items()
    }
    stock = {count: measures for (count, name), measures in spreads.items() if name == _STOCK}
    rows = [
        [
            f"{count:,}: {name}",
            *(_cell(what, each, stock.get(count, {}).get(what)) for what, each in of.items()),
        ]
        for (count, name), of in spreads.items()
    ]
    return Report(
        benchmark="tiny",
        title=f"Tensors of {_TENSOR_BYTES} bytes",
        table=[Table(_HEADER, rows)],
        results={
            f"{count}: {name}": {what: spread_json(each) for what, each in of.items()}
            for (count, name), of in spreads.items()
        },
        conditions=[
            f"Seconds that training waits, on the clock; ours without fsync. Rounds: {options.rounds}, each "
            f"with a fresh process for everybody; of its {_LATER} later saves the median counts.",
        ],
    )


def _cell(what: str, spread: Spread | None, stock: Spread | None) -> str:
    if spread is None:
        return ""
    if what == "files":
        return f"{spread.median:.1f} times the bytes"
    if what == "memory":
        return f"{spread.median:.0f}"
    part = f" ({spread.median / stock.median:.3f})" if stock is not None and stock is not spread else ""
    return short(spread.median) + part


def main(order: dict[str, Any], outcome: Path) -> None:
    """In the fresh process: saves, then a load."""
    root = Path(order["root"])
    names = [f"layers.{number}.weight" for number in range(order["tensors"])]
    state = {name: torch.full((4,), float(number)) for number, name in enumerate(names)}
    target = {name: torch.zeros(4) for name in names}
    try:
        found = (_stock if order["stock"] else _ours)(state, target, root)
        assert all(torch.equal(state[name], target[name]) for name in names)
        newest = max(root.iterdir(), key=lambda directory: directory.name)
        size = sum(file.stat().st_size for file in newest.iterdir())
        outcome.write_text(json.dumps({**found, "files": size / _TENSOR_BYTES / len(names)}))
    finally:
        shutil.rmtree(root)


def _ours(state: dict[str, torch.Tensor], target: dict[str, torch.Tensor], root: Path) -> dict[str, float]:
    from ckpt_core import CheckpointManager

    with CheckpointManager(root) as manager:
        result = _saves(state, lambda number: manager.save(number, {"model": state}).result)
        return {
            "first": result[0],
            "later": result[1],
            "load": _seconds(lambda: manager.load({"model": target}, step=_LATER)),
            "memory": result[2],
        }


def _stock(state: dict[str, torch.Tensor], target: dict[str, torch.Tensor], root: Path) -> dict[str, float]:
    def save(number: int) -> Callable[[], object]:
        dcp.save({"model": state}, checkpoint_id=root / str(number), no_dist=True)
        return int

    first, later, memory = _saves(state, save)
    load = partial(dcp.load, {"model": target}, checkpoint_id=root / str(_LATER), no_dist=True)
    return {"first": first, "later": later, "load": _seconds(load), "memory": memory}


def _saves(
    state: dict[str, torch.Tensor], save: Callable[[int], Callable[[], object]]
) -> tuple[float, float, float]:
    """Seconds of the first, and of later ones, and MiB by which the process has grown."""
    waits, before = [], _resident()
    for number in range(_LATER + 1):
        for tensor in state.values():
            tensor.add_(1)
        gc.collect()
        start = time.perf_counter()
        finish = save(number)
        waits.append(time.perf_counter() - start)
        finish()
    return waits[0], statistics.median(waits[1:]), (_resident() - before) / (1 << 20)


def _seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        torch.set_num_threads(1)
        main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny", description=__doc__)
        parser.add_argument("--tensors", type=_counts, default=[20_000], metavar="N,N")
        parser.add_argument("--before", type=Path, help="a checkout to compare with")
        parser.add_argument("--device", help=argparse.SUPPRESS)
        add_common_options(parser, ())
        raise SystemExit(run(parser, parser.parse_args(), measure))
