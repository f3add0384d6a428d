"""Jobs of two ranks that upload to a further tier, each rank the files that it wrote."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_core import CheckpointManager, Upload, UploadError
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import InMemorySink
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.faults import kill_process

SECONDS = 60.0


def state_of(step: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"w{rank}": torch.arange(5000.0) + step}


def written(storage: FaultyStorage) -> list[str]:
    """The files of checkpoints that this process has written to a tier."""
    keys = [one.key for one in storage.operations if one.method == "create" and ".distcp" in one.key]
    return sorted({key.rpartition("/")[2] for key in keys})


def cases(root: str) -> dict[str, Any]:
    """Every case that needs two ranks that live, in one pair of processes."""
    place = Path(root)
    return {
        "own files": own_files(place / "own"),
        "failure": failure_of_one(place / "failure"),
        "overtaken": overtaken(place / "overtaken"),
        "left": left(place / "left"),
    }


def own_files(place: Path) -> dict[str, Any]:
    tier = FaultyStorage(LocalStorage(place / "tier"))
    collectives = []
    with CheckpointManager(place / "root", upload=Upload(tier), deadline_seconds=SECONDS) as manager:
        handle = manager.save(1, state_of(1))
        info = handle.uploaded.result(SECONDS)
        collectives.append(info.step)
    return {"steps": collectives, "written": written(tier)}


def failure_of_one(place: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    error = [OSError("the cable was pulled")] * rank
    faults = [Fault(method="create", key="*.distcp", nth=0, error=each) for each in error]
    tier, sink = FaultyStorage(LocalStorage(place / "tier"), faults), InMemorySink()
    options: dict[str, Any] = {"deadline_seconds": SECONDS, "sinks": [sink]}
    with CheckpointManager(place / "root", upload=Upload(tier), **options) as manager:
        step = manager.save(1, state_of(1)).uploaded.result(SECONDS).step
    faults = [Fault(method="create", key="*.distcp", error=each) for each in error]
    tier = FaultyStorage(LocalStorage(place / "never"), faults)
    upload = Upload(tier, deadline_seconds=0.3, on_error="raise")
    with CheckpointManager(place / "root2", upload=upload, **options) as manager:
        found = manager.save(1, state_of(1)).uploaded.exception(SECONDS)
        try:
            manager.save(2, state_of(2))
            raised = ""
        except UploadError as caught:
            raised = str(caught)
    failed = [event.attributes["step"] for event in sink.finished("upload.failed")]
    return {"step": step, "error": str(found), "raised": raised, "failed": failed}


def overtaken(place: Path) -> list[int | None]:
    """Rank 1 is slow; the coordinator decides for both."""
    opened, reached = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reached.set()
        opened.wait(SECONDS)

    faults = [Fault(method="create", key="*.distcp", nth=0, before=wait)] * dist.get_rank()
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    with CheckpointManager(place / "root", upload=Upload(tier), deadline_seconds=SECONDS) as manager:
        handles = [manager.save(1, state_of(1))]
        assert dist.get_rank() == 0 or reached.wait(SECONDS)
        handles += [manager.save(step, state_of(step)) for step in (2, 3, 4)]
        manager.wait()
        dist.barrier()
        opened.set()
        found = [handle.uploaded.result(SECONDS) for handle in handles]
    return [None if info is None else info.step for info in found]


def left(place: Path) -> list[int]:
    """Save on two ranks and upload nothing; the next run has another number of ranks."""
    faults = [Fault(method="create", key="*.distcp", error=OSError("down"))]
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    upload = Upload(tier, deadline_seconds=0.2)
    with CheckpointManager(place / "root", upload=upload, deadline_seconds=SECONDS) as manager:
        manager.save(1, state_of(1))
    return [info.step for info in Catalog(LocalStorage(place / "tier")).committed()]


def dies_while_uploading(root: str) -> str:
    """Rank 1 dies in its upload; rank 0 ends in time, and training has not noticed."""
    place, rank = Path(root), dist.get_rank()
    faults = [Fault(method="create", key="*.distcp", before=kill_process)] * rank
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    upload = Upload(tier, deadline_seconds=1.0)
    manager = CheckpointManager(place / "root", upload=upload, deadline_seconds=5.0)
    handle = manager.save(1, state_of(1))
    handle.result(SECONDS)
    error = handle.uploaded.exception(SECONDS)
    manager.close()
    return str(error)
