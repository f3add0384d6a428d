"""The first save of a fresh process, which allocates, faults pages in and plans; as after every resume."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.comparison import Row, report_rows
from benchmarks.contenders import Contender, Task
from benchmarks.fresh import in_fresh_process
from benchmarks.lineup import ALL, ContenderType, opened
from benchmarks.machine import CONDITIONS
from benchmarks.ours import PREWARMED
from benchmarks.report import Report, spread_json
from benchmarks.rounds import make_task, one_save
from benchmarks.state import StateShape
from benchmarks.timing import Spread, Timing


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`rounds` fresh processes for each contender, each killed after `timeout_seconds`."""

    shape: StateShape
    device: str
    rounds: int
    timeout_seconds: float


def run_first(
    types: Sequence[ContenderType], settings: Settings, root: Path, *, progress: Callable[[str], None]
) -> Report:
    """Every contender's first save, and ours after `prewarm` as well."""
    asked = [*types, *(each for each in PREWARMED if any(issubclass(each, other) for other in types))]
    asked.sort(key=lambda each: each.kind == "limit")
    found: dict[str, list[dict[str, Any]]] = {each.key: [] for each in asked}
    failed: dict[str, str] = {}
    for number in range(settings.rounds):
        for each in asked:
            if each.key not in failed:
                outcome = _outcome(each, settings, root)
                if isinstance(outcome, str):
                    failed[each.key] = outcome
                else:
                    found[each.key].append(outcome)
        progress(f"round {number + 1} of {settings.rounds}")
    rows = [
        Row(
            contender=each,
            timings=[Timing(**outcome["timing"]) for outcome in found[each.key]],
            not_run=failed.get(each.key),
        )
        for each in asked
    ]
    return _report(rows, found, settings)


def _report(
    rows: Sequence[Row[Contender]], found: dict[str, list[dict[str, Any]]], settings: Settings
) -> Report:
    size_bytes = max([outcome["size_bytes"] for many in found.values() for outcome in many], default=0)
    report = report_rows(
        "first",
        f"The first save of {settings.shape} in a fresh process",
        rows,
        size_bytes=size_bytes,
        conditions=[
            *CONDITIONS,
            f"Processes for each contender: {settings.rounds}, in turns. Importing torch, making the state "
            "and constructing the manager are not counted; prewarm() is not counted either, but stated.",
        ],
    )
    prewarm = {
        row.contender.key: spread_json(Spread.of(each["prewarm_s"] for each in found[row.contender.key]))
        for row in rows
        if row.contender in PREWARMED
    }
    lines = [f"{key}: prewarm() took {each['median']:.3f} s" for key, each in prewarm.items() if each]
    return Report(
        benchmark=report.benchmark,
        title=report.title,
        table=[*report.table, *lines],
        results={**report.results, "prewarm_s": prewarm},
        panels=report.panels,
        conditions=report.conditions,
    )


def _outcome(each: ContenderType, settings: Settings, root: Path) -> dict[str, Any] | str:
    """The outcome, or why there is none."""
    order = {"key": each.key, "shape": asdict(settings.shape), "device": settings.device, "root": str(root)}
    return in_fresh_process(
        "benchmarks.first", order, root / "outcome.json", timeout_seconds=settings.timeout_seconds
    )


def main(order: dict[str, Any], outcome: Path) -> None:
    """In the fresh process: one save."""
    known = {**ALL, **{each.key: each for each in PREWARMED}}
    contender_type = known[order["key"]]
    task = make_task(StateShape(**order["shape"]), torch.device(order["device"]), Path(order["root"]))
    with opened([contender_type], task) as lineup:
        found: list[dict[str, Any]] = []
        for contender in list(lineup.running):
            done = lineup.attempt(contender, partial(_first_save, contender, task))
            found += [] if done is None else [done]
        result = found[0] if found else {"not_run": lineup.not_run[contender_type.key]}
    outcome.write_text(json.dumps(result))


def _first_save(contender: Contender, task: Task) -> dict[str, Any]:
    start = time.perf_counter()
    if type(contender) in PREWARMED or contender.kind == "limit":
        contender.prewarm()
    prewarm = time.perf_counter() - start
    timing = one_save(contender, 0)
    return {"timing": asdict(timing), "prewarm_s": prewarm, "size_bytes": task.size_bytes}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
