"""Many saves in one process: memory, threads, descriptors and times must not grow."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import psutil

from benchmarks.contenders import Task
from benchmarks.machine import CONDITIONS
from benchmarks.report import Lines, Report, Table
from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.types import CapturedState

_MIB = 1 << 20
_REPORT_EVERY = 50


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The process after one save; `resident_mib` is all of its memory."""

    stall_s: float
    durable_s: float
    resident_mib: float
    threads: int
    descriptors: int


MEASURES = ("stall_s", "durable_s", "resident_mib", "threads", "descriptors")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Medians of the first and of the last tenth; least-squares growth per 1,000 saves after the first."""

    first: float
    last: float
    per_thousand: float


def run_soak(task: Task, saves: int, root: Path, *, progress: Callable[[str], None]) -> Report:
    """`saves` overlapped saves, the two newest checkpoints kept, one optimizer step after each."""
    process = psutil.Process()
    with CheckpointManager(root / "soak", staging="overlapped", keep=KeepLatest(2)) as manager:
        samples = []
        for number in range(saves):
            samples.append(_save(manager, task, number, process))
            if (number + 1) % _REPORT_EVERY == 0:
                progress(f"save {number + 1} of {saves}")
        open_bytes = process.memory_info().rss
    gc.collect()
    # What a manager keeps between saves goes back to the system when it is closed.
    return _report(task, samples, staging_bytes=open_bytes - process.memory_info().rss)


def _save(manager: CheckpointManager, task: Task, number: int, process: psutil.Process) -> Sample:
    captured = CapturedState(
        sharded={"": {"model": task.tensors}},
        per_rank={"progress": {"saves": number}},
        stable=list(task.tensors.values()),
        optimizers=list(task.optimizers),
    )
    start = time.perf_counter()
    handle = manager.save(number, captured)
    stall = time.perf_counter() - start
    if handle is None:
        raise RuntimeError("a save was skipped although the one before had ended")
    for optimizer in task.optimizers:
        optimizer.step()
    handle.result()
    durable = time.perf_counter() - start
    manager.wait()
    gc.collect()  # garbage that waits for a collection is no leak
    return Sample(
        stall_s=stall,
        durable_s=durable,
        resident_mib=process.memory_info().rss / _MIB,
        threads=process.num_threads(),
        descriptors=process.num_fds(),
    )


def trend(values: Sequence[float]) -> Trend:
    """How a series develops; the first tenth, in which things are allocated, is left out of the slope."""
    tenth = max(1, len(values) // 10)
    rest = values[tenth:]
    slope = statistics.linear_regression(range(len(rest)), rest).slope if len(rest) > 1 else 0.0
    return Trend(
        first=statistics.median(values[:tenth]),
        last=statistics.median(values[-tenth:]),
        per_thousand=slope * 1000,
    )


def _report(task: Task, samples: Sequence[Sample], *, staging_bytes: int) -> Report:
    columns = {measure: [float(getattr(each, measure)) for each in samples] for measure in MEASURES}
    trends = {measure: trend(values) for measure, values in columns.items()}
    kept = staging_bytes / task.size_bytes
    size = f"{task.size_bytes / _MIB:.0f} MiB"
    return Report(
        benchmark="soak",
        title=f"{len(samples):,} saves of {size} in one process",
        table=[_table(trends), "", f"Given back by close(): {kept:.3f} x the bytes of the state"],
        results={
            "size_bytes": task.size_bytes,
            "saves": len(samples),
            "staging_bytes": staging_bytes,
            "staging_ratio": kept,
            "trends": {measure: asdict(each) for measure, each in trends.items()},
            "samples": columns,
        },
        panels=_panels(columns),
        conditions=[
            *CONDITIONS[:1],
            "Overlapped staging, the two newest checkpoints kept, the others pruned.",
        ],
    )


def _table(trends: Mapping[str, Trend]) -> Table:
    rows = [
        [name, f"{each.first:.5g}", f"{each.last:.5g}", f"{each.per_thousand:+.3g}"]
        for name, each in trends.items()
    ]
    return Table(("", "first tenth", "last tenth", "growth per 1,000 saves"), rows)


def _panels(columns: Mapping[str, Sequence[float]]) -> list[Lines]:
    def panel(title: str, unit: str, curves: Mapping[str, Any]) -> Lines:
        count = len(columns["stall_s"])
        return Lines(title=title, x_axis="save", y_axis=unit, x=range(1, count + 1), curves=curves)

    memory = {"resident": columns["resident_mib"]}
    counts = {"threads": columns["threads"], "descriptors": columns["descriptors"]}
    times = {"stall": columns["stall_s"], "durable": columns["durable_s"]}
    return [
        panel("Memory", "MiB", memory),
        panel("Threads and descriptors", "count", counts),
        panel("Time of a save", "seconds", times),
    ]
