"""Planning at thousands of ranks, simulated in one process: the coordinator's CPU, the messages."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import psutil

from benchmarks.our_planning import OurPlanning
from benchmarks.planning import LAYOUTS, Planning, PlanningCost, Workload
from benchmarks.report import Lines, Report, Table
from benchmarks.state import GIB
from benchmarks.stock_planning import StockCachedPlanning, StockPlanning
from benchmarks.timing import short

PLANNINGS: Sequence[type[Planning]] = (OurPlanning, StockPlanning, StockCachedPlanning)
_CONDITIONS = (
    "One process plays the coordinator: plans of DTensors with the boxes that torch computes for their "
    "placements, each encoded as the rank would send it, decoded, planned, answered; CPU seconds are of the "
    "coordinator's part alone (time.process_time), of later saves the median of three; memory is by how much "
    "the process grew at most.",
    "Without plan caching DCP does the same for every save, which is measured once.",
    "Bytes are of pickled messages; that torch pads them all to the longest is not counted. No network.",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A first and a later save at one size, or why there are none."""

    planning: type[Planning]
    workload: Workload
    first: PlanningCost | None = None
    later: PlanningCost | None = None
    not_run: str | None = None


def run_simulation(
    world_sizes: Sequence[int], tensors: int, root: Path, *, progress: Callable[[str], None]
) -> Report:
    """Every planning at every size."""
    outcomes = []
    for planning in PLANNINGS:  # the first planning in a process pays for imports
        _measured(planning, Workload(world_size=2, tensors=10), root)
    for world_size in world_sizes:
        for planning in PLANNINGS:
            for layout in LAYOUTS if planning is OurPlanning else LAYOUTS[:1]:
                workload = Workload(world_size=world_size, tensors=tensors, layout=layout)
                outcomes.append(_measured(planning, workload, root))
                progress(f"{planning.name}: {world_size} ranks, {layout}")
    return Report(
        benchmark="simulate-ranks",
        title=f"Planning a save of {tensors:,} tensors on every rank",
        table=[_table(outcomes)],
        results={"tensors": tensors, "outcomes": [_data(each) for each in outcomes]},
        panels=[
            _panel(outcomes, "Coordinator", "CPU seconds", value=lambda cost, _: cost.coordinator_cpu_s),
            _panel(outcomes, "Messages of a rank", "bytes", value=PlanningCost.bytes_per_rank),
        ],
        conditions=_CONDITIONS,
    )


def _measured(kind: type[Planning], workload: Workload, root: Path) -> Outcome:
    with tempfile.TemporaryDirectory(dir=root) as directory:
        planning = kind(workload, Path(directory))
        try:
            needed, available = planning.memory_bytes(), psutil.virtual_memory().available
            if needed > available:
                reason = f"needs about {needed / GIB:.0f} GiB of memory, {available / GIB:.0f} are available"
                return Outcome(planning=kind, workload=workload, not_run=reason)
            before = _resident_bytes("VmRSS", reset_peak=True)
            first = planning.save()
            first = replace(first, peak_bytes=max(0, _resident_bytes("VmHWM") - before))
            others = [planning.save() for _ in range(3 if kind.learns else 0)] or [first]
            later = sorted(others, key=lambda cost: cost.coordinator_cpu_s)[len(others) // 2]
            return Outcome(planning=kind, workload=workload, first=first, later=later)
        finally:
            planning.close()
            del planning
            gc.collect()


def _resident_bytes(what: str, *, reset_peak: bool = False) -> int:
    """Memory of this process, or its peak since the last reset; 0 where no Linux tells it."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(what))


def _table(outcomes: Sequence[Outcome]) -> Table:
    header = (
        "", "layout", "ranks",
        "first: CPU s", "MiB", "KiB per rank", "later: CPU s", "KiB per rank",
    )  # fmt: skip
    rows: list[list[str]] = []
    for each in outcomes:
        of = each.workload
        if each.first is None or each.later is None:
            rows.append([each.planning.name, of.layout, f"{of.world_size} ranks not run: {each.not_run}"])
            continue
        first, later = (
            [short(cost.coordinator_cpu_s), f"{cost.bytes_per_rank(of.world_size) / 1024:,.1f}"]
            for cost in (each.first, each.later)
        )
        first.insert(1, f"{each.first.peak_bytes / 2**20:,.0f}")
        rows.append([each.planning.name, of.layout, str(of.world_size), *first, *later])
    return Table(header, rows)


def _data(outcome: Outcome) -> dict[str, Any]:
    def cost(of: PlanningCost | None) -> dict[str, Any] | None:
        return (
            None
            if of is None
            else {**asdict(of), "bytes_per_rank": of.bytes_per_rank(outcome.workload.world_size)}
        )

    return {
        "key": outcome.planning.key,
        "name": outcome.planning.name,
        "kind": outcome.planning.kind,
        "world_size": outcome.workload.world_size,
        "layout": outcome.workload.layout,
        "not_run": outcome.not_run,
        "first": cost(outcome.first),
        "later": cost(outcome.later),
    }


def _panel(
    outcomes: Sequence[Outcome], title: str, unit: str, *, value: Callable[[PlanningCost, int], float]
) -> Lines:
    curves: dict[str, list[float]] = {}
    for each in outcomes:
        for which, cost in (("first save", each.first), ("later saves", each.later)):
            known = float("nan") if cost is None else value(cost, each.workload.world_size)
            curves.setdefault(f"{each.planning.name}, {each.workload.layout}, {which}", []).append(known)
    sizes = list(dict.fromkeys(each.workload.world_size for each in outcomes))
    return Lines(title=title, x_axis="ranks", y_axis=unit, x=sizes, curves=curves, log=True)
