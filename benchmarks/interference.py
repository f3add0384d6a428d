"""What a save costs a training loop beside it: the sum, the worst step, the speed that is left.

The training computes with one thread, as a training that leaves its data loader a core does. For every save:
first steps without one, then the call, then steps until it is durable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.contenders import Contender, Task
from benchmarks.lineup import ContenderType, opened
from benchmarks.machine import CONDITIONS
from benchmarks.report import Bar, Bars, Report, render, spread_json
from benchmarks.state import StateShape, make_state
from benchmarks.timing import Spread, settle, short, wait_for_device
from benchmarks.training import Training

_CONDITIONS = (
    "Time lost per save: the stall of the call, plus (step - median step before the save) over all steps until "
    "the save is durable. The worst step includes the stall, if it is the first. Speed kept: median step before, "
    "over mean step while the save is in flight.",
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
    """What one save did to the steps beside it; `speed_kept` is None if it had ended before the first step."""

    lost_s: float
    worst_step: float
    speed_kept: float | None
    stall_s: float
    durable_s: float
    median_step_s: float
    steps: int


MEASURES = ("lost_s", "worst_step", "speed_kept", "stall_s", "durable_s", "median_step_s", "steps")


def run_interference(
    types: Sequence[ContenderType], settings: Settings, root: Path, *, progress: Callable[[str], None]
) -> Report:
    """Contenders take turns, save by save, after one save each that does not count."""
    with _one_thread():
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
                        contender,
                        lambda each=contender, n=number: one_save(each, n, training, settings.base_steps),
                    )
                    if seen is not None and number:
                        found.setdefault(contender.key, []).append(seen)
                progress(f"save {number} of {settings.saves}")
    return _report(types, found, lineup.not_run, settings, training.repeats)


def one_save(contender: Contender, number: int, training: Training, base_steps: int) -> Disturbance:
    """Train alone, save while training, delete, settle."""
    before = [training.step(contender.step_guard()) for _ in range(base_steps)]
    try:
        return _disturbance(contender, number, training, statistics.median(before))
    finally:
        settle(contender, number)


def _disturbance(contender: Contender, number: int, training: Training, median_step: float) -> Disturbance:
    during: list[float] = []
    ends: list[float] = []
    wait_for_device(contender.task.device)
    start = time.perf_counter()
    flight = contender.start(number)
    stall = time.perf_counter() - start
    flight.durable.add_done_callback(lambda _: ends.append(time.perf_counter() - start))
    beside = not flight.durable.done()
    while not during or not flight.durable.done():
        during.append(training.step(contender.step_guard()))
    flight.durable.result()
    return disturbance(during, stall=stall, durable=ends[0], median_step=median_step, beside=beside)


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


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _report(
    types: Sequence[ContenderType],
    found: Mapping[str, Sequence[Disturbance]],
    not_run: Mapping[str, str],
    settings: Settings,
    repeats: int,
) -> Report:
    steps = Spread.of(each.median_step_s for many in found.values() for each in many)
    length = "unknown" if steps is None else f"{steps.median * 1e3:.0f} ms"
    return Report(
        benchmark="interference",
        title=f"A one-thread training loop (steps of {length}) beside saves of {settings.shape}",
        table=_table(types, found, not_run),
        results={
            "step_passes": repeats,
            "contenders": {
                each.key: _data(each, found.get(each.key, ()), not_run.get(each.key)) for each in types
            },
        },
        panels=[
            _panel(types, found, not_run, "lost_s", "Training time lost per save", "seconds"),
            _panel(types, found, not_run, "worst_step", "Worst step", "times the median step"),
        ],
        conditions=[
            *CONDITIONS,
            *_CONDITIONS,
            f"{settings.saves} saves each, in turns, after one that is not counted; {settings.base_steps} steps "
            "before each. Bars are medians, whiskers minimum and maximum.",
        ],
    )


def _spread(seen: Sequence[Disturbance], measure: str) -> Spread | None:
    return Spread.of(getattr(each, measure) for each in seen)


def _table(
    types: Sequence[ContenderType], found: Mapping[str, Sequence[Disturbance]], not_run: Mapping[str, str]
) -> list[str]:
    rows: list[list[str]] = []
    for each in types:
        seen = found.get(each.key, ())
        if not seen:
            rows.append([each.name, f"not run: {not_run.get(each.key)}"])
            continue
        spreads = {measure: _spread(seen, measure) for measure in MEASURES}
        kept = spreads["speed_kept"]
        rows.append(
            [
                each.name,
                str(spreads["lost_s"]),
                *(f"{spread.median:.2f}" if (spread := spreads["worst_step"]) else "" for _ in (0,)),
                "" if kept is None else f"{kept.median:.0%}",
                *(short(spread.median) if (spread := spreads[m]) else "" for m in ("stall_s", "durable_s")),
                *(f"{spread.median:.0f}" if (spread := spreads["steps"]) else "" for _ in (0,)),
            ]
        )
    return render(_HEADER, rows)


def _data(each: ContenderType, seen: Sequence[Disturbance], not_run: str | None) -> dict[str, Any]:
    return {
        "name": each.name,
        "kind": each.kind,
        "not_run": not_run,
        **{measure: spread_json(_spread(seen, measure)) for measure in MEASURES},
        "samples": [asdict(one) for one in seen],
    }


def _panel(
    types: Sequence[ContenderType],
    found: Mapping[str, Sequence[Disturbance]],
    not_run: Mapping[str, str],
    measure: str,
    title: str,
    axis: str,
) -> Bars:
    bars = [
        Bar(
            label=each.name,
            kind=each.kind,
            spread=_spread(found.get(each.key, ()), measure),
            note=f"not run: {not_run.get(each.key, '')}"[:60],
        )
        for each in types
    ]
    return Bars(title=title, axis=axis, bars=bars)
