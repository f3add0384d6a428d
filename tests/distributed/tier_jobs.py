"""Resumes over two tiers, on every rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_core import CheckpointManager, Upload
from ckpt_core.errors import LoadError
from ckpt_core.telemetry import InMemorySink
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage

THREE = "step-000000003"


def _state(value: float) -> dict[str, Any]:
    """Each rank has a tensor of its own, and so a data file."""
    own = torch.full((4000,), value + dist.get_rank())
    return {"model": {f"w{dist.get_rank()}": own, "shared": torch.full((3000,), value)}}


def _values(state: dict[str, Any]) -> list[float]:
    return [tensor[0].item() for tensor in state["model"].values()]


def _on_first(work: Any) -> None:
    """Change directories on one rank, between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def resumes_over_tiers(root: str) -> dict[str, Any]:
    """What this rank saw of several accidents."""
    local, durable = Path(root, "local"), Path(root, "durable")
    with CheckpointManager(local) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, _state(step))
    _on_first(lambda: shutil.copytree(local, durable))
    found: dict[str, Any] = {}

    def resume(case: str, *, to: Any = None, fetch: bool = False) -> None:
        sink, loaded = InMemorySink(), _state(-1)
        upload = Upload(durable if to is None else to, every=1000, deadline_seconds=0.1)
        checkpoints = CheckpointManager(local, upload=upload, sinks=[sink])
        try:
            fetched = checkpoints.fetcher.fetch() if fetch else None
            step = checkpoints.resume(loaded)
            checkpoints._repairer.wait()
        except LoadError as error:
            found[case] = str(error)
        else:
            events = [event.name for event in sink.events if event.phase == "finished"]
            whole = not checkpoints.verify(3) if dist.get_rank() == 0 else None
            names = None if fetched is None else fetched.name
            found[case] = step, _values(loaded), whole, names, events.count("repair"), events.count("fetch")
        finally:
            checkpoints.close(wait_for_uploads=False)

    def flip() -> None:
        path = local / THREE / "__1_0.distcp"
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(bytes(content))

    def lose() -> None:
        shutil.rmtree(local)

    _on_first(flip)
    resume("damaged on one rank")
    _on_first((local / THREE / "__0_0.distcp").unlink)
    resume("missing on the other")
    _on_first(lose)
    resume("lost")
    _on_first(lose)
    resume("fetched", fetch=True)
    resume(
        "unreachable", to=FaultyStorage(MemoryStorage(), [Fault(method="list", error=TimeoutError("down"))])
    )
    return found
