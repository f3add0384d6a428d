"""The main comparison: all contenders take turns within every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.comparison import compare, report_rows
from benchmarks.contenders import Contender, Task
from benchmarks.lineup import ContenderType, Lineup, opened
from benchmarks.machine import CONDITIONS
from benchmarks.report import Report
from benchmarks.state import StateShape, make_state
from benchmarks.timing import Timing, settle, time_save

Progress = Callable[[str], None]
Timings = dict[str, list[Timing]]


def make_task(shape: StateShape, device: torch.device, root: Path) -> Task:
    """The state, and an optimizer that is said to be the only one to change it."""
    dummy = torch.nn.Parameter(torch.zeros(1, device=device))
    return Task(
        tensors=make_state(shape, device),
        root=root,
        device=device,
        optimizers=[torch.optim.SGD([dummy], lr=0.1)],
    )


def run_rounds(
    types: Sequence[ContenderType], shape: StateShape, task: Task, *, rounds: int, progress: Progress
) -> Report:
    """Measure `rounds` rounds, after one that does not count."""
    with opened(types, task) as lineup:
        timings = measure(lineup, rounds=rounds, warm_up=1, progress=progress)
    rows = compare(types, timings, lineup.not_run)
    return report_rows(
        "save",
        f"Saving {shape}",
        rows,
        size_bytes=task.size_bytes,
        conditions=[
            *CONDITIONS,
            f"Rounds: {rounds}, in each of which every contender saves once, after one that is not counted. "
            "Bars are medians, whiskers minimum and maximum.",
        ],
    )


def measure(lineup: Lineup, *, rounds: int, warm_up: int, progress: Progress) -> Timings:
    """Key -> timings; a contender that fails is out, its reason in the lineup."""
    timings: Timings = {}
    for number in range(rounds + warm_up):
        for contender in list(lineup.running):
            timing = lineup.attempt(contender, partial(one_save, contender, number))
            if timing is not None and number >= warm_up:
                timings.setdefault(contender.key, []).append(timing)
        progress(f"round {number + 1 - warm_up} of {rounds}")
    return timings


def one_save(contender: Contender, number: int) -> Timing:
    """Save, delete, settle."""
    try:
        return time_save(contender, number)
    finally:
        settle(contender, number)
