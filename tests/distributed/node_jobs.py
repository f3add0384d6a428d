"""Jobs of ranks whose nodes have disks of their own."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_core import CheckpointManager, KeepLatest, Upload
from ckpt_core.errors import CheckpointError, PartialCheckpointError
from ckpt_core.journal import read_history
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage

ROOT = "/disk/of/the/node/run"
COPIES = ("COMMITTED", "manifest.json", ".metadata")


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


def resumed(base: Path, node: int | None = None, *, repaired: bool = False, **options: Any) -> Any:
    """Resume in a new manager: the step and whether its values are right, or the error.

    With `repaired`, wait for the repair that it begins.
    """
    with CheckpointManager(disk(base, node=node), **options) as checkpoints:
        state = state_of(0)
        try:
            step = checkpoints.resume(state)
        except PartialCheckpointError as error:
            return str(error)
        if repaired:
            checkpoints._repairer.wait()
            torch.distributed.barrier()
        return step, holds(state, step or 0)


def saved(base: Path, steps: Sequence[int], node: int | None = None, **options: Any) -> list[str]:
    """Resume, save these steps, and return the warnings."""
    said = Said()
    logging.getLogger("ckpt_core").addHandler(said)
    with CheckpointManager(disk(base, node=node), **options) as checkpoints:
        checkpoints.resume(state_of(0))
        for step in steps:
            checkpoints.save(step, state_of(step))
    torch.distributed.barrier()
    logging.getLogger("ckpt_core").removeHandler(said)
    return said.warnings


def damaged(base: Path, node: int, name: str) -> Any:
    """What a resume finds while one node's copy of a file that all nodes have is cut short."""
    path = base / f"node-{node}" / "step-000000003" / name
    content = path.read_bytes()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path.write_bytes(content[:-7])
    torch.distributed.barrier()
    said = Said()
    logging.getLogger("ckpt_core").addHandler(said)
    found = resumed(base)
    logging.getLogger("ckpt_core").removeHandler(said)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path.write_bytes(content)
    torch.distributed.barrier()
    told = [line for line in said.warnings if f"{name} is not whole on the disk of one node" in line]
    return (
        found,
        len(told) == (node == node_of_this_rank()),
        (base / f"node-{node}" / ".ckpt-suite/damaged.json").exists(),
    )


class Said(logging.Handler):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def contents(base: Path) -> list[dict[str, bytes]]:
    """What each node has of step 2."""
    places = [base / f"node-{node}" / "step-000000002" for node in (0, 1)]
    return [{path.name: path.read_bytes() for path in place.glob("*")} for place in places]


def lose(*places: Path) -> None:
    """Remove directories once, when no rank looks at them any more."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for place in places:
            shutil.rmtree(place)
    torch.distributed.barrier()


def live(base: Path) -> dict[str, Any]:
    """All that two nodes go through."""
    found: dict[str, Any] = {}
    plain = base / "plain"
    found["warnings"] = saved(plain, [1, 2], keep=KeepLatest(1))
    found["names"] = sorted(path.name for path in (plain / f"node-{node_of_this_rank()}").iterdir())
    found["journal"] = [(each["event"], each["devices"]) for each in read_history(disk(plain))]
    found["resumed"] = resumed(plain)
    other = 1 - node_of_this_rank()
    saved(plain, [3], node=other)
    found["moved"] = resumed(plain, node=other)
    found["moved back"] = resumed(plain)
    found["copy damaged"] = [damaged(plain, node, name) for node in (0, 1) for name in COPIES]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.copytree(plain / "node-0", base / "alone")
    lose(plain / "node-1")
    found["node lost"] = resumed(plain)

    twins = base / "twins"
    found["warnings with twins"] = saved(twins, [1], replicas=2)
    lose(twins / "node-0")
    found["node lost, twins"] = resumed(twins, replicas=2)

    tiers, durable = base / "tiers", base / "durable"
    upload = Upload(str(durable))
    found["warnings with upload"] = saved(tiers, [1, 2], upload=upload)
    there = durable / "step-000000002"
    found["format of the copy"] = json.loads((there / "COMMITTED").read_text())["format_version"]
    if torch.distributed.get_rank() == 0:
        # What the disks of the nodes have is not read from the durable tier: there it is damaged.
        for path in there.glob("__0_*"):
            path.write_bytes(bytes(path.stat().st_size))
    before = contents(tiers)
    lose(tiers / "node-1")
    found["node lost, upload"] = resumed(tiers, upload=upload, repaired=True)
    found["repaired"] = contents(tiers) == before, resumed(tiers)
    torch.distributed.barrier()  # for what follows changes what they look at
    if torch.distributed.get_rank() == 0:
        for path in (tiers / "node-1" / "step-000000002").glob("__1_*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    found["damaged, upload"] = resumed(tiers, upload=upload, repaired=True)
    marks = json.loads((tiers / f"node-{node_of_this_rank()}" / ".ckpt-suite/damaged.json").read_text())
    found["repaired again"] = contents(tiers) == before, resumed(tiers), marks["checkpoints"]
    saved(tiers, [3], upload=upload)
    found["went on"] = resumed(tiers)
    found["refused"] = refused(base / "broken")
    return found


def refused(base: Path) -> list[str]:
    """What a job says of a node whose disk is full, is read-only, or has a file in its root's place."""
    told: list[str] = []
    broken = {
        "full": [Fault(method="check_root", error=OSError(errno.ENOSPC, "no space"))],
        "read-only": [Fault(method="check_root", error=OSError(errno.EROFS, "read-only"))],
        "unreadable": [Fault(method="list", error=OSError(errno.EIO, "input/output error"))],
        "file": [],
    }
    for kind, faults in broken.items():
        node = node_of_this_rank()
        if node and kind == "file":
            (base / kind).mkdir(parents=True, exist_ok=True)
            (base / kind / f"node-{node}").write_text("a file")
        manager = CheckpointManager(disk(base / kind, faults if node else ()), deadline_seconds=60)
        try:
            manager.resume(state_of(0))
        except CheckpointError as error:
            told.append(f"{kind}: {type(error).__name__}: {error}")
        manager.close()
    return told
