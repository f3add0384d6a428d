"""Real gloo ranks on one machine: sharded and replicated tensors, the slowest rank counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.comparison import compare, report_rows
from benchmarks.contenders import Contender, Task
from benchmarks.lineup import ALL, ContenderType, opened
from benchmarks.machine import CONDITIONS
from benchmarks.report import Report
from benchmarks.state import StateShape, tensor_sizes
from benchmarks.timing import MEASURES, Timing, settle, time_save
from tests.kit.ranks import run_ranks

_REPLICATED_EVERY = 10
_COLUMNS = 64


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`world_size` processes, all killed after `timeout_seconds`; `shape` is of the whole state."""

    world_size: int
    shape: StateShape
    rounds: int
    timeout_seconds: float


def run_ranks_benchmark(types: Sequence[ContenderType], settings: Settings, root: Path) -> Report:
    """Interleaved rounds on all ranks.

    Raises:
        RanksFailedError: a rank failed, or they did not finish in time.
    """
    keys = [each.key for each in types]
    outcomes = run_ranks(
        rank_job, settings.world_size, keys, settings, str(root), timeout_seconds=settings.timeout_seconds
    )
    timings: dict[str, list[Timing]] = {
        key: [slowest(each) for each in zip(*(outcome["timings"][key] for outcome in outcomes), strict=True)]
        for key in keys
    }
    not_run = {key: reason for outcome in reversed(outcomes) for key, reason in outcome["not_run"].items()}
    return report_rows(
        "ranks",
        f"{settings.world_size} ranks save {settings.shape} together",
        compare(types, timings, not_run),
        size_bytes=outcomes[0]["size_bytes"],
        conditions=[
            *CONDITIONS,
            f"{settings.world_size} gloo processes of one thread each on this machine; DTensors in Shard(0), "
            f"every {_REPLICATED_EVERY}th replicated. The slowest rank counts. Interleaved rounds: "
            f"{settings.rounds}, after one that is not counted.",
        ],
    )


def slowest(timings: Sequence[Timing]) -> Timing:
    """The longest of every measure over ranks."""

    def longest(measure: str) -> float | None:
        known = [value for each in timings if (value := getattr(each, measure)) is not None]
        return max(known, default=None)

    return Timing(**{measure: longest(measure) for measure in MEASURES})


def sharded_state(shape: StateShape) -> dict[str, torch.Tensor]:
    """This rank's part of DTensors over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: _dtensor(mesh, numel, dtype, replicated=index % _REPLICATED_EVERY == _REPLICATED_EVERY - 1)
        for index, (name, (numel, dtype)) in enumerate(tensor_sizes(shape).items())
    }


def _dtensor(mesh: Any, numel: int, dtype: torch.dtype, *, replicated: bool) -> torch.Tensor:
    world = dist.get_world_size()
    rows = max(1, numel // _COLUMNS // world)
    if replicated:
        generator = torch.Generator().manual_seed(numel)
        local = torch.randn(rows * world, _COLUMNS, generator=generator).to(dtype)
        whole: torch.Tensor = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        return whole
    shard: torch.Tensor = DTensor.from_local(
        torch.randn(rows, _COLUMNS).to(dtype), mesh, [Shard(0)], run_check=False
    )
    return shard


def rank_job(keys: Sequence[str], settings: Settings, root: str) -> Mapping[str, Any]:
    """On every rank: timings by key, and who could not run."""
    dummy = torch.nn.Parameter(torch.zeros(1))
    task = Task(
        tensors=sharded_state(settings.shape),
        root=Path(root),
        optimizers=[torch.optim.SGD([dummy], lr=0.1)],
    )
    timings: dict[str, list[Timing]] = {key: [] for key in keys}
    with opened([ALL[key] for key in keys], task, budgeted=False) as lineup:
        for number in range(settings.rounds + 1):
            for contender in lineup.running:
                timing = _together(contender, number)
                if number:
                    timings[contender.key].append(timing)
    return {"timings": timings, "not_run": lineup.not_run, "size_bytes": task.size_bytes}


def _together(contender: Contender, number: int) -> Timing:
    dist.barrier()
    timing = time_save(contender, number)
    dist.barrier()
    settle(contender, number)
    return timing
