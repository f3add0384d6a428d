"""Jobs of several ranks whose coordinator uploads to a further tier, or a rank of each node its disk."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
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
        "files of all": files_of_all(place / "all"),
        "failure": failure_of_one(place / "failure"),
        "overtaken": overtaken(place / "overtaken"),
        "left": left(place / "left"),
    }


def files_of_all(place: Path) -> dict[str, Any]:
    tier = FaultyStorage(LocalStorage(place / "tier"))
    with CheckpointManager(place / "root", upload=Upload(tier), deadline_seconds=SECONDS) as manager:
        info = manager.save(1, state_of(1)).uploaded.result(SECONDS)
    return {"steps": [info.step], "written": written(tier)}


def failure_of_one(place: Path) -> dict[str, Any]:
    error = [OSError("the cable was pulled")] * (1 - dist.get_rank())
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
    """The coordinator's upload is slow; both ranks hear what it has overtaken."""
    opened, reached = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reached.set()
        opened.wait(SECONDS)

    faults = [Fault(method="create", key="*.distcp", nth=0, before=wait)] * (1 - dist.get_rank())
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    with CheckpointManager(place / "root", upload=Upload(tier), deadline_seconds=SECONDS) as manager:
        handles = [manager.save(1, state_of(1))]
        assert dist.get_rank() == 1 or reached.wait(SECONDS)
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


def dies_while_uploading(root: str, victim: int) -> int | None:
    """One of two ranks dies while the coordinator uploads; what the other one hears of the upload."""
    place, rank = Path(root), dist.get_rank()
    gone = place / "gone"
    seen = threading.Event()

    def die_or_wait(operation: Any) -> None:
        if victim == 0:
            kill_process(operation)
        while not gone.exists():
            seen.wait(0.01)

    faults = [Fault(method="create", key="*.distcp", nth=0, before=die_or_wait)] * (1 - rank)
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    manager = CheckpointManager(place / "root", upload=Upload(tier, deadline_seconds=1.0), deadline_seconds=5)
    handle = manager.save(1, state_of(1))
    handle.result(SECONDS)
    if victim == rank == 1:
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        handle.uploaded.result(SECONDS)
    manager.close()
    found = handle.uploaded.result(SECONDS)
    return None if found is None else found.step


def dies_on_its_node(root: str) -> int | None:
    """The node of rank 1 dies while it sends what lies on its disk; what rank 0 hears at its end."""
    place, rank = Path(root), dist.get_rank()
    faults = [Fault(method="create", key="*__1_0.distcp", before=kill_process)] * rank
    tier = FaultyStorage(LocalStorage(place / "tier"), faults)
    disk = FaultyStorage(LocalStorage(place / f"node-{rank}"), url="/disk/of/the/node/run")
    manager = CheckpointManager(disk, upload=Upload(tier, deadline_seconds=3.0), deadline_seconds=5)
    handle = manager.save(1, state_of(1))
    handle.result(SECONDS)
    manager.close()
    found = handle.uploaded.result(SECONDS)
    return None if found is None else found.step


def disks_of_nodes(root: str) -> dict[str, Any]:
    """Each node has a disk of its own: who uploads what, and who hears of a failure on one of them."""
    place, rank, node = Path(root), dist.get_rank(), int(os.environ["GROUP_RANK"])
    found: dict[str, Any] = {}

    def uploaded(case: str, faults: Sequence[Fault] = (), **options: Any) -> Any:
        tier = FaultyStorage(LocalStorage(place / case / "tier"), faults)
        disk = FaultyStorage(LocalStorage(place / case / f"node-{node}"), url="/disk/of/the/node/run")
        upload = Upload(tier, **options)
        with CheckpointManager(disk, upload=upload, deadline_seconds=SECONDS) as manager:
            future = manager.save(1, state_of(1)).uploaded
            error = future.exception(SECONDS)
            found[case] = str(error) if error else future.result().step, written(tier)

    pulled = OSError("the cable was pulled")
    last = [Fault(method="create", key="*__3_0.distcp", error=pulled)] * (rank == 2)
    uploaded("whole")
    uploaded("again", [Fault(method="create", key="*__3_0.distcp", nth=0, error=pulled)] * (rank == 2))
    uploaded("never", last, deadline_seconds=0.3)
    tier = FaultyStorage(LocalStorage(place / "never" / "tier"))
    disk = FaultyStorage(LocalStorage(place / "never" / f"node-{node}"), url="/disk/of/the/node/run")
    with CheckpointManager(disk, upload=Upload(tier), deadline_seconds=SECONDS) as manager:
        manager.resume({**state_of(0)})
    found["next run"] = written(tier)
    return found
