"""Real gloo ranks on one machine load together: who reads how much for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from benchmarks.comparison import compare
from benchmarks.lineup import opened
from benchmarks.loading.comparison import report_loads
from benchmarks.loading.layouts import IN_WORDS, Layout, placed_state
from benchmarks.loading.lineup import ALL
from benchmarks.loading.loader import Loader, LoaderType, LoadTask, checksums
from benchmarks.loading.pages import PageState, bring_to
from benchmarks.loading.rounds import VERIFIED
from benchmarks.loading.timing import LoadTiming, of_all_ranks, time_load
from benchmarks.report import Report
from benchmarks.state import StateShape
from tests.kit.ranks import run_ranks


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`save_ranks` processes save, `load_ranks` load; all are killed after `timeout_seconds`."""

    save_ranks: int
    load_ranks: int
    layout: Layout
    shape: StateShape
    rounds: int
    pages: PageState
    timeout_seconds: float


def run_load_ranks(types: Sequence[LoaderType], settings: Settings, root: Path) -> Report:
    """Interleaved rounds on all ranks, of what other processes have saved.

    Raises:
        RanksFailedError: a rank failed, or they did not finish in time.
    """
    keys = [each.key for each in types]
    timeout = settings.timeout_seconds
    run_ranks(save_job, settings.save_ranks, keys, settings, str(root), timeout_seconds=timeout)
    outcomes = run_ranks(load_job, settings.load_ranks, keys, settings, str(root), timeout_seconds=timeout)
    timings = {
        key: [
            of_all_ranks(each)
            for each in zip(*(outcome["timings"][key] for outcome in outcomes), strict=True)
        ]
        for key in keys
    }
    not_run = {key: reason for outcome in reversed(outcomes) for key, reason in outcome["not_run"].items()}
    return report_loads(
        "load-ranks",
        f"{settings.load_ranks} ranks load {settings.shape} that {settings.save_ranks} ranks saved",
        compare(types, timings, not_run),
        size_bytes=outcomes[0]["size_bytes"],
        pages=settings.pages,
        conditions=[
            VERIFIED,
            f"Layout {settings.layout}: {IN_WORDS[settings.layout]}. Gloo processes of one thread each on "
            "this machine. The slowest rank's time counts, and the bytes of all ranks together. Interleaved "
            f"rounds: {settings.rounds}, after one that is not counted.",
        ],
    )


def save_job(keys: Sequence[str], settings: Settings, root: str) -> None:
    """On every rank that saves: everybody's files, for each format once."""
    tensors = placed_state(settings.shape, settings.layout, loading=False)
    for name, writer in {ALL[key].format: ALL[key] for key in keys}.items():
        writer.write(Path(root) / name, tensors)
        dist.barrier()


def load_job(keys: Sequence[str], settings: Settings, root: str) -> Mapping[str, Any]:
    """On every rank that loads: timings by key, and who could not run."""
    tensors = placed_state(settings.shape, settings.layout, loading=True)
    task = LoadTask(
        tensors=tensors,
        checksums=checksums(tensors),
        size_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        root=Path(root),
    )
    timings: dict[str, list[LoadTiming]] = {key: [] for key in keys}
    with opened([ALL[key] for key in keys], task, budgeted=False) as lineup:
        for loader in lineup.running:
            loader.prepare()
        for number in range(settings.rounds + 1):
            for loader in lineup.running:
                timing = _together(loader, settings.pages)
                if number:
                    timings[loader.key].append(timing)
    return {"timings": timings, "not_run": lineup.not_run, "size_bytes": task.size_bytes}


def _together(loader: Loader, pages: PageState) -> LoadTiming:
    loader.poison()
    if dist.get_rank() == 0:
        bring_to(pages, loader.files())
    dist.barrier()
    timing = time_load(loader)
    dist.barrier()
    loader.check()
    return timing
