"""The main comparison of loads: everybody takes a turn within every round."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.comparison import compare
from benchmarks.lineup import Lineup, opened
from benchmarks.loading.comparison import report_loads
from benchmarks.loading.loader import Loader, LoaderType, LoadTask, checksums
from benchmarks.loading.pages import PageState
from benchmarks.loading.timing import one_load
from benchmarks.report import Report
from benchmarks.rounds import take_turns
from benchmarks.state import StateShape, make_state

VERIFIED = (
    "Everybody loads into the same live tensors, which are there already. Before every load they are "
    "overwritten, and after it compared with what was saved, outside the timing: who brings other values is "
    "out."
)


def make_load_task(shape: StateShape, device: torch.device, root: Path) -> LoadTask:
    """Live tensors with random values, and their checksums."""
    tensors = make_state(shape, device)
    return LoadTask(
        tensors=tensors,
        checksums=checksums(tensors),
        size_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        root=root,
        device=device,
    )


def prepare_all(lineup: Lineup[Loader]) -> None:
    """Write the files, and write them back, while the tensors hold the right values; who fails is out."""
    for loader in list(lineup.running):
        lineup.attempt(loader, loader.prepare)
    os.sync()


def run_load_rounds(
    types: Sequence[LoaderType],
    shape: StateShape,
    task: LoadTask,
    *,
    rounds: int,
    pages: PageState,
    progress: Callable[[str], None],
) -> Report:
    """Measure `rounds` rounds, after one that does not count."""
    with opened(types, task) as lineup:
        prepare_all(lineup)
        timings = take_turns(
            lineup, lambda loader, _: one_load(loader, pages), rounds=rounds, warm_up=1, progress=progress
        )
    return report_loads(
        "load",
        f"Loading {shape}",
        compare(types, timings, lineup.not_run),
        size_bytes=task.size_bytes,
        pages=pages,
        conditions=[
            VERIFIED,
            f"Rounds: {rounds}, in each of which everybody loads once, after one that is not counted. "
            "Bars are medians, whiskers minimum and maximum.",
        ],
    )
