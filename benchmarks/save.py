"""How long a save stops the training, and how long until it is durable, against stock DCP and raw limits.

    python -m benchmarks.save --gib 2 --tensors 330 --rounds 11 --json out.json

Contenders take turns within every round, so that a machine whose speed drifts treats all alike. Durable times
include fsync. The page cache is not dropped: saves write, and the source tensors are in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import (
    Contender,
    Memcpy,
    Ours,
    RawDirect,
    StockAsync,
    StockSave,
    Tensors,
    Timing,
    TorchSave,
)

Results = dict[str, list[Timing]]


def make_state(gib: float, tensors: int) -> Tensors:
    """Half bf16 weights, half fp32, in sizes from 2 KiB up, that add up to `gib`."""
    total = int(gib * (1 << 30))
    weights = [1 + (index % 7) ** 3 for index in range(tensors)]
    state: dict[str, torch.Tensor] = {}
    for index, weight in enumerate(weights):
        dtype = torch.bfloat16 if index % 2 else torch.float32
        numel = max(512, total * weight // sum(weights) // dtype.itemsize)
        state[f"layer{index}.weight"] = torch.empty(numel, dtype=dtype).normal_()
    return state


def measure(contenders: Sequence[Contender], tensors: Tensors, root: Path, rounds: int) -> Results:
    """Interleaved rounds, after one round that does not count."""
    results: Results = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            directory = root / f"{number}-{contender.name.replace(' ', '-').replace('/', '-')}"
            timing = contender.save(tensors, directory)
            shutil.rmtree(directory, ignore_errors=True)
            if number:
                results[contender.name].append(timing)
        print(f"round {number} of {rounds}", flush=True)
    return results


def summarise(results: Results) -> dict[str, dict[str, list[float]]]:
    """Median, minimum and maximum of every contender."""
    return {
        name: {
            key: [pick(getattr(timing, key) for timing in timings) for pick in (statistics.median, min, max)]
            for key in ("stall_s", "durable_s")
        }
        for name, timings in results.items()
    }


def print_table(summary: dict[str, dict[str, list[float]]], gib: float) -> None:
    """One row a contender; ratios are of medians, to ours."""
    ours = summary[Ours.name]
    print(
        f"\n{'':28}{'stall s, median [min, max]':>30}{'x ours':>8}{'durable s':>28}{'x ours':>8}{'GiB/s':>8}"
    )
    for name, row in summary.items():
        cells = f"{name:28}"
        for key in ("stall_s", "durable_s"):
            median, low, high = row[key]
            known = not math.isnan(median)
            text = f"{median:.3f} [{low:.3f}, {high:.3f}]" if known else "-"
            ratio = f"{median / ours[key][0]:.2f}" if known else ""
            cells += f"{text:>{30 if key == 'stall_s' else 28}}{ratio:>8}"
        durable = row["durable_s"][0]
        print(cells + (f"{gib / durable:>8.2f}" if not math.isnan(durable) else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.save", description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=330)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--root", type=Path, help="directory on the disk to measure; a temporary one by default"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    tensors = make_state(options.gib, options.tensors)
    with tempfile.TemporaryDirectory(dir=options.root) as directory:
        root = Path(directory)
        contenders = [
            Ours(root), StockSave(1), StockSave(2), StockAsync(reused=False), StockAsync(reused=True),
            TorchSave(), Memcpy(), RawDirect(),
        ]  # fmt: skip
        results = measure(contenders, tensors, root, options.rounds)
        for contender in contenders:
            contender.close()
    summary = summarise(results)
    print_table(summary, sum(tensor.nbytes for tensor in tensors.values()) / (1 << 30))
    if options.json:
        report: dict[str, Any] = {
            "options": {k: str(v) for k, v in vars(options).items()},
            "seconds": summary,
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
