"""The main comparison: all contenders take turns within every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.comparison import compare, report_rows
from benchmarks.contenders import Contender, Entrant, Task
from benchmarks.lineup import ContenderType, Lineup, opened
from benchmarks.machine import CONDITIONS
from benchmarks.report import Report
from benchmarks.state import StateShape, make_state
from benchmarks.timing import Timing, settle, time_save

Progress = Callable[[str], None]
Timings = dict[str, list[Timing]]
_Entrant = TypeVar("_Entrant", bound=Entrant)
_Outcome = TypeVar("_Outcome")


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


def measure(lineup: Lineup[Contender], *, rounds: int, warm_up: int, progress: Progress) -> Timings:
    """Key -> timings of saves; a contender that fails is out, its reason in the lineup."""
    return take_turns(lineup, one_save, rounds=rounds, warm_up=warm_up, progress=progress)


def take_turns(
    lineup: Lineup[_Entrant],
    once: Callable[[_Entrant, int], _Outcome],
    *,
    rounds: int,
    warm_up: int,
    progress: Progress,
) -> dict[str, list[_Outcome]]:
    """In every round everybody does `once`, given the number of the round; key -> outcomes that count."""
    outcomes: dict[str, list[_Outcome]] = {}
    for number in range(rounds + warm_up):
        for contender in list(lineup.running):
            outcome = lineup.attempt(contender, partial(once, contender, number))
            if outcome is not None and number >= warm_up:
                outcomes.setdefault(contender.key, []).append(outcome)
        progress(f"round {number + 1 - warm_up} of {rounds}")
    return outcomes


def one_save(contender: Contender, number: int) -> Timing:
    """Save, delete, settle."""
    try:
        return time_save(contender, number)
    finally:
        settle(contender, number)
