"""Jobs of ranks whose nodes have disks of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_core import CheckpointManager
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage

ROOT = "/disk/of/the/node/run"


def node_of_this_rank() -> int:
    return int(os.environ["GROUP_RANK"])


def disk(base: Path, faults: Sequence[Fault] = (), node: int | None = None) -> FaultyStorage:
    """The root as this rank's node sees it: one path everywhere, a directory per node."""
    place = base / f"node-{node_of_this_rank() if node is None else node}"
    return FaultyStorage(LocalStorage(place), faults, url=ROOT)


def state_of(step: int) -> dict[str, Any]:
    """A sharded tensor, one that every rank has, and a number."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(64.0) + 1000 * step
    return {
        "model": {
            "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
            "replicated": torch.full((5,), float(step)),
        },
        "counters": {"step": step},
    }


def values(state: dict[str, Any]) -> list[float]:
    full = state["model"]["sharded"].full_tensor().tolist()
    return [*full, *state["model"]["replicated"].tolist()]


def holds(state: dict[str, Any], step: int) -> bool:
    return values(state) == [*(torch.arange(64.0) + 1000 * step).tolist(), *[float(step)] * 5]


def names(base: Path) -> list[str]:
    return sorted(path.name for path in (base / f"node-{node_of_this_rank()}").iterdir())


def save_and_resume(base: Path, steps: Sequence[int], **options: Any) -> tuple[int | None, bool, list[str]]:
    """Resume what is there, save these steps, resume in a new manager; return what was found."""
    with CheckpointManager(disk(base), **options) as checkpoints:
        checkpoints.resume(state_of(0))
        for step in steps:
            checkpoints.save(step, state_of(step))
        checkpoints.wait()
    with CheckpointManager(disk(base), **options) as checkpoints:
        state = state_of(0)
        step = checkpoints.resume(state)
        return step, holds(state, step or 0), names(base)


def lose_a_node_and_resume(base: Path, **options: Any) -> Any:
    rank = torch.distributed.get_rank()
    save_and_resume(base, [1, 2], **options)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(base / "node-1")
    torch.distributed.barrier()
    with CheckpointManager(disk(base), **options) as checkpoints:
        state = state_of(0)
        try:
            step = checkpoints.resume(state)
        except Exception as error:
            return type(error).__name__, str(error)
        return step, holds(state, step or 0)


def swap_nodes_and_resume(base: Path) -> Any:
    """The ranks of one node run on the other one, as after a restart on the same nodes."""
    save_and_resume(base, [1, 2])
    other = 1 - node_of_this_rank()
    with CheckpointManager(disk(base, node=other)) as checkpoints:
        state = state_of(0)
        step = checkpoints.resume(state)
        found = step, holds(state, step or 0)
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
    with CheckpointManager(disk(base, node=other)) as checkpoints:
        state = state_of(0)
        step = checkpoints.resume(state)
        return found, (step, holds(state, step or 0))


def lose_twins(base: Path) -> Any:
    return lose_a_node_and_resume(base, replicas=2)


def lose_a_node_with_a_durable_tier(base: Path) -> Any:
    """Resume from what is left on the disks, and the rest from the durable tier."""
    from ckpt_core import Upload

    rank, upload = torch.distributed.get_rank(), Upload(str(base / "durable"))
    with CheckpointManager(disk(base), upload=upload) as checkpoints:
        checkpoints.resume(state_of(0))
        checkpoints.save(1, state_of(1))
        checkpoints.save(2, state_of(2))
    torch.distributed.barrier()
    there = sorted(path.name for path in (base / "durable" / "step-000000002").iterdir())
    durable = (base / "durable" / "step-000000002" / "COMMITTED").read_text()
    # What the disk of node 0 has must not be read from the durable tier.
    if rank == 0:
        shutil.rmtree(base / "node-1")
        for path in (base / "durable" / "step-000000002").glob("__0_*"):
            path.write_bytes(bytes(path.stat().st_size))
    torch.distributed.barrier()
    with CheckpointManager(disk(base), upload=upload) as checkpoints:
        state = state_of(0)
        step = checkpoints.resume(state)
        found = step, holds(state, step or 0)
        checkpoints.save(3, state_of(3))
    with CheckpointManager(disk(base), upload=upload) as checkpoints:
        state = state_of(0)
        step = checkpoints.resume(state)
        return found, (step, holds(state, step or 0)), there, '"format_version":1' in durable
