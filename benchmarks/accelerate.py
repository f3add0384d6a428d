"""`python -m benchmarks.accelerate`: how long `save_state` holds the training, against the core and stock.

The same model and optimizer, one process, in turns within every round; every save is durable and removed
before the next one begins, so that nobody pays for another's bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import accelerate_ckpt
from accelerate_ckpt._checkpoints import checkpoints
from benchmarks.timing import Spread
from ckpt_core import CheckpointManager, TrainState

CORE = "core"


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerate", description=__doc__)
    parser.add_argument("--mib", type=int, default=384, help="parameters and optimizer state together")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--root", type=Path, default=None, help="where to save; a temporary directory")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.root) as folder:
        stalls = measure(Path(folder), mib=given.mib, rounds=given.rounds)
    spreads = {name: spread for name, values in stalls.items() if (spread := Spread.of(values))}
    for name, spread in spreads.items():
        times = spread.median / spreads[CORE].median
        print(f"{name:28} stall {spread} s, {times:.2f} times the core's")
    if given.json is not None:
        given.json.write_text(json.dumps({name: each.as_json() for name, each in spreads.items()}, indent=1))
    return 0


def measure(folder: Path, *, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every save from the call to its return; the first round is not counted."""
    model, optimizer, accelerators = _prepared(mib)
    with ExitStack() as closing:
        manager = closing.enter_context(CheckpointManager(folder / "core", keep=1))
        state = TrainState(model=model, optimizer=optimizer)
        savers: dict[str, Callable[[int], Callable[[], Any]]] = {
            CORE: lambda number: manager.save(number + 1, state).result  # type: ignore[union-attr]
        }
        for name, (accelerator, options) in accelerators.items():
            if options is not None:
                accelerate_ckpt.enable(accelerator, folder / name, **options)
                closing.callback(accelerate_ckpt.disable, accelerator)
            savers[name] = _save_state(accelerator, folder / name)
        stalls: dict[str, list[float]] = {name: [] for name in savers}
        for number in range(rounds + 1):
            for name, save in savers.items():
                start = time.perf_counter()
                wait = save(number)
                stall = time.perf_counter() - start
                wait()
                shutil.rmtree(folder / name, ignore_errors=True) if name == "stock" else None
                os.sync()
                if number:
                    stalls[name].append(stall)
    return stalls


def _prepared(mib: int) -> tuple[nn.Module, Any, Mapping[str, tuple[Accelerator, dict[str, Any] | None]]]:
    """Three equal parts: parameters, and both of AdamW's moments; 16 layers."""
    width = max(8, int((mib * 2**20 / 3 / 4 / 16) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    made: dict[str, tuple[Accelerator, dict[str, Any] | None]] = {}
    for name, options in (
        ("save_state", {"keep": 1}),
        ("save_state, stock_files=True", {"keep": 1, "stock_files": True}),
        ("stock", None),
    ):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        made[name] = accelerator, options
    return model, optimizer, made


def _save_state(accelerator: Accelerator, folder: Path) -> Callable[[int], Callable[[], Any]]:
    def save(number: int) -> Callable[[], Any]:
        accelerator.save_state(str(folder / f"checkpoint_{number}"))
        ours = "_ckpt_suite" in accelerator.__dict__
        return checkpoints(accelerator).wait if ours else os.sync

    return save


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
