"""`python -m benchmarks.export_beside`: what an export behind a training costs the training.

One Llama in float32, exported by the process of `Export`, which has written once before anything counts;
beside it a training of a small perceptron in this process, with one thread (the other core is free) or one
for each core. In turns within every round: steps alone, then steps from the order of an export to its end.
Lost is what those steps took beyond the mean step alone, as a share of what they took.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import torch

from benchmarks.export import layers_of, prepare
from benchmarks.timing import Spread
from benchmarks.training import Training
from ckpt_core import CheckpointManager
from ckpt_core.tiers import ExportTerms, WorkProcess
from tests.kit.ranks import run_ranks


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a line for each number of threads."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_beside", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2", help="of the training")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--root", type=Path, default=None, help="where to write; a temporary directory")
    given = parser.parse_args(arguments)
    counts = [int(each) for each in given.threads.split(",")]
    lost: dict[int, list[float]] = {count: [] for count in counts}
    took: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.root) as folder:
        run_ranks(prepare, 1, {"folder": folder, "layers": layers_of(given.gib)}, timeout_seconds=600)
        trainings = {}
        for count in counts:
            torch.set_num_threads(count)
            trainings[count] = Training(torch.device("cpu"), step_seconds=given.step_ms / 1e3)
        exports = Exports(Path(folder))
        for _ in range(given.rounds):
            for count, training in trainings.items():
                torch.set_num_threads(count)
                alone, beside = exports.one_beside(training)
                lost[count].append(1 - statistics.mean(alone) * len(beside) / sum(beside))
                took[count].append(sum(beside))
        exports.close()
    for count in counts:
        print(f"{count} thread(s): lost {Spread.of(lost[count])} of {Spread.of(took[count])} s")
    return 0


class Exports:
    """Exports of one checkpoint by the process that does it behind a training."""

    def __init__(self, folder: Path) -> None:
        with CheckpointManager(folder / "run") as manager:
            self._info = manager.checkpoints()[-1]
        self._out = folder / "out"
        terms = ExportTerms(
            source=str(folder / "run"),
            source_options={},
            place=str(self._out),
            place_options={},
            keep=None,
            writer="ckpt_core:export",
            words={"to": "hf", "like": str(folder / "like")},
        )
        self._process = WorkProcess("ckpt_core.tiers._export_service:exporting", terms, nice=19)
        self._export()

    def one_beside(self, training: Training) -> tuple[list[float], list[float]]:
        """Return seconds of steps alone, and of steps beside an export."""
        shutil.rmtree(self._out)
        deadline = time.perf_counter() + 1
        alone, beside = [training.step(nullcontext())], []
        while time.perf_counter() < deadline:
            alone.append(training.step(nullcontext()))
        thread = Thread(target=self._export)
        thread.start()
        while thread.is_alive():
            beside.append(training.step(nullcontext()))
        thread.join()
        return alone, beside

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _export(self) -> None:
        self._process.do(self._info, lambda: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
