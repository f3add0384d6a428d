"""What a save costs a training loop beside it: the sum, the worst step, the speed that is left.

The training computes with one thread, as a training that leaves its data loader a core does. For every save:
first steps without one, then the call, then steps until it is durable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.contenders import Contender, Task
from benchmarks.lineup import ContenderType, opened
from benchmarks.machine import CONDITIONS
from benchmarks.report import Bar, Bars, Report, Table, spread_json
from benchmarks.state import StateShape, make_state
from benchmarks.timing import Spread, end_of, settle, short, wait_for_device
from benchmarks.training import Training, one_thread

_CONDITIONS = (
    "Time lost per save: the stall of the call, plus (step - median step before the save) over all steps "
    "until the save is durable. The stall counts as a part of the first step. Speed kept: median step "
    "before, over mean step while the save is in flight.",
)
_HEADER = (
    "", "time lost s, median [min, max]", "worst step / median", "speed kept", "stall s", "durable s", "steps"
)  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure: `saves` of each contender, steps of `step_seconds`, `base_steps` before each save."""

    shape: StateShape
    device: torch.device
    saves: int
    step_seconds: float
    base_steps: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What one save did to the steps beside it; no `speed_kept` if it had ended before the first."""

    lost_s: float
    worst_step: float
    speed_kept: float | None
    stall_s: float
    durable_s: float
    median_step_s: float
    steps: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What all saves of one contender did; nothing, if `not_run` says why."""

    contender: ContenderType
    seen: Sequence[Disturbance]
    not_run: str | None

    def spread(self, measure: str) -> Spread | None:
        """Of one of `MEASURES`."""
        return Spread.of(getattr(each, measure) for each in self.seen)

    def text(self, measure: str, form: Callable[[float], str]) -> str:
        """The median of one of `MEASURES`, formatted; nothing if there is none."""
        spread = self.spread(measure)
        return "" if spread is None else form(spread.median)


MEASURES = ("lost_s", "worst_step", "speed_kept", "stall_s", "durable_s", "median_step_s", "steps")


def run_interference(
    types: Sequence[ContenderType], settings: Settings, root: Path, *, progress: Callable[[str], None]
) -> Report:
    """Contenders take turns, save by save, after one save each that does not count."""
    with one_thread():
        training = Training(settings.device, step_seconds=settings.step_seconds)
        task = Task(
            tensors=make_state(settings.shape, settings.device),
            root=root,
            device=settings.device,
            optimizers=[training.optimizer],
        )
        found: dict[str, list[Disturbance]] = {}
        with opened(types, task) as lineup:
            for number in range(settings.saves + 1):
                for contender in list(lineup.running):
                    seen = lineup.attempt(
                        contender, partial(one_save, contender, number, training, settings.base_steps)
                    )
                    if seen is not None and number:
                        found.setdefault(contender.key, []).append(seen)
                progress(f"save {number} of {settings.saves}")
    findings = [
        Finding(contender=each, seen=found.get(each.key, ()), not_run=lineup.not_run.get(each.key))
        for each in types
    ]
    return _report(findings, settings, repeats=training.repeats)


def one_save(contender: Contender, number: int, training: Training, base_steps: int) -> Disturbance:
    """Train alone, save while training, delete, settle."""
    before = [training.step(contender.step_guard()) for _ in range(base_steps)]
    try:
        return _disturbance(contender, number, training, statistics.median(before))
    finally:
        settle(contender, number)


def _disturbance(contender: Contender, number: int, training: Training, median_step: float) -> Disturbance:
    during: list[float] = []
    wait_for_device(contender.task.device)
    start = time.perf_counter()
    flight = contender.start(number)
    stall = time.perf_counter() - start
    durable_at = end_of(flight.durable)
    beside = not flight.durable.done()
    while not during or not flight.durable.done():
        during.append(training.step(contender.step_guard()))
    flight.durable.result()
    return disturbance(
        during, stall=stall, durable=durable_at.result() - start, median_step=median_step, beside=beside
    )


def disturbance(
    during: Sequence[float], *, stall: float, durable: float, median_step: float, beside: bool
) -> Disturbance:
    """The figures of one save, from the seconds of the steps after its call.

    Args:
        during: at least one step, the last of which ended after the save.
        stall: seconds that the call took.
        durable: seconds until the save was durable.
        median_step: seconds of a step without a save.
        beside: whether the save was still in flight when the first step began.
    """
    as_seen = [during[0] + stall, *during[1:]]
    return Disturbance(
        lost_s=sum(as_seen) - len(during) * median_step,
        worst_step=max(as_seen) / median_step,
        speed_kept=median_step / statistics.mean(during) if beside else None,
        stall_s=stall,
        durable_s=durable,
        median_step_s=median_step,
        steps=len(during),
    )


def _report(findings: Sequence[Finding], settings: Settings, *, repeats: int) -> Report:
    steps = Spread.of(seen.median_step_s for each in findings for seen in each.seen)
    length = "unknown length" if steps is None else f"{steps.median * 1e3:.0f} ms"
    return Report(
        benchmark="interference",
        title=f"A one-thread training loop (steps of {length}) beside saves of {settings.shape}",
        table=[Table(_HEADER, [_row(each) for each in findings])],
        results={
            "step_passes": repeats,
            "contenders": {each.contender.key: _data(each) for each in findings},
        },
        panels=[
            _panel(findings, "lost_s", "Training time lost per save", "seconds"),
            _panel(findings, "worst_step", "Worst step", "times the median step"),
        ],
        conditions=[
            *CONDITIONS,
            *_CONDITIONS,
            f"Saves of each contender: {settings.saves}, in turns, after one that is not counted; "
            f"{settings.base_steps} steps before each. Bars are medians, whiskers minimum and maximum.",
        ],
    )


def _row(finding: Finding) -> list[str]:
    if not finding.seen:
        return [finding.contender.name, f"not run: {finding.not_run}"]
    return [
        finding.contender.name,
        str(finding.spread("lost_s")),
        finding.text("worst_step", "{:.2f}".format),
        finding.text("speed_kept", "{:.0%}".format),
        finding.text("stall_s", short),
        finding.text("durable_s", short),
        finding.text("steps", "{:.0f}".format),
    ]


def _data(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.contender.name,
        "kind": finding.contender.kind,
        "not_run": finding.not_run,
        **{measure: spread_json(finding.spread(measure)) for measure in MEASURES},
        "samples": [asdict(seen) for seen in finding.seen],
    }


def _panel(findings: Sequence[Finding], measure: str, title: str, axis: str) -> Bars:
    bars = [
        Bar(
            label=each.contender.name,
            kind=each.contender.kind,
            spread=each.spread(measure),
            note=f"not run: {each.not_run}"[:60],
        )
        for each in findings
    ]
    return Bars(title=title, axis=axis, bars=bars)
