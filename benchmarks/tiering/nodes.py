"""A resume on two nodes with disks of their own, of which one is lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, final

import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.s3 import Server
from benchmarks.tiering.resumes import Resume, Resumed
from ckpt_core import CheckpointManager, Upload
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.kit.ranks import Nodes, run_ranks

_ROOT: Final = "/disk/of/the/node/run"
_TENSORS: Final = 32
_TIMEOUT_SECONDS: Final = 300.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NodeJob:
    """What each rank is given.

    Attributes:
        base: holds a directory for the disk of each node.
        server: of the bucket.
        size_bytes: of the state, over all ranks.
    """

    base: str
    server: Server
    size_bytes: int

    def manager(self) -> CheckpointManager:
        """A manager whose local tier is the disk of this rank's node."""
        disk = FaultyStorage(LocalStorage(Path(self.base) / f"node-{dist.get_rank()}"), url=_ROOT)
        upload = Upload(f"s3://{self.server.bucket}/nodes", storage_options=self.server.storage_options)
        return CheckpointManager(disk, upload=upload)

    def state(self, value: float) -> Mapping[str, Any]:
        """Tensors of this rank's own: each node holds one half of the state."""
        numel = self.size_bytes // dist.get_world_size() // _TENSORS // 4
        own = {f"rank{dist.get_rank()}.{i}": torch.full((numel,), value + i) for i in range(_TENSORS)}
        return {"model": own}


def save_job(job: NodeJob) -> None:
    """Save and upload."""
    with job.manager() as manager:
        manager.save(1, job.state(1.0))


def resume_job(job: NodeJob) -> tuple[float, int]:
    """Resume; seconds, and bytes that the server had sent when it returned."""
    state = job.state(-1000.0)
    dist.barrier()
    start = time.perf_counter()
    manager = job.manager()
    try:
        assert manager.resume(state) == 1
        seconds, sent = time.perf_counter() - start, job.server.counters()["bytes_out"]
        assert all(tensor.eq(1.0 + i).all() for i, tensor in enumerate(state["model"].values()))
    finally:
        manager.close()
    return seconds, sent


@final
class ResumeNodeLost(Resume):
    """On two nodes, of which one has lost its disk."""

    key = "resume-node-lost"
    name = "ckpt-suite, one of two nodes lost"
    base: ClassVar[str] = "obstore"
    missing: ClassVar[float] = 0.5

    @property
    def _job(self) -> NodeJob:
        return NodeJob(base=str(self.root), server=self.task.server, size_bytes=self.task.size_bytes)

    @override
    def prepare(self) -> None:
        run_ranks(save_job, Nodes(2, 1), self._job, timeout_seconds=_TIMEOUT_SECONDS)

    @override
    def lose(self) -> None:
        shutil.rmtree(self.root / "node-1")

    @override
    def measured(self) -> Resumed:
        before = self.task.server.counters()["bytes_out"]
        found = run_ranks(resume_job, Nodes(2, 1), self._job, timeout_seconds=_TIMEOUT_SECONDS)
        received = min(sent for _, sent in found) - before
        return Resumed(seconds=max(seconds for seconds, _ in found), received=received / self.task.size_bytes)
