"""How stock DCP plans: what `dcp.save` gathers, plans, scatters and broadcasts, without processes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.planning import Planning, PlanningCost, Workload, held

_BYTES_PER_ITEM = 4400  # plans, final plans, results and metadata of one shard, measured by peak memory


class _StockPlanning(Planning):
    kind = "stock"
    caching: ClassVar[bool]

    def __init__(self, workload: Workload, directory: Path) -> None:
        super().__init__(workload, directory)
        self._planner = _CachingPlanner() if self.caching else DefaultSavePlanner()
        self._saves = 0
        self._finals: list[SavePlan] = []

    def memory_bytes(self) -> int:
        """All ranks' plans at once."""
        return self.workload.world_size * self.workload.tensors * _BYTES_PER_ITEM

    def save(self) -> PlanningCost:
        """What `dcp.save` does on the coordinator, message by message."""
        self._saves += 1
        clock = Clock()
        gathered, plans = _received(self._local_plans(), clock)
        directory = self.directory / f"{self.key}-{self._saves}"
        directory.mkdir()
        writer = FileSystemWriter(directory)
        with clock:
            writer.set_up_storage_writer(is_coordinator=True)
            finals, metadata = self._planner.create_global_plan(plans)
            finals = writer.prepare_global_plan(finals)
        del plans
        with clock:
            scattered = sum(len(pickle.dumps(plan)) for plan in finals)
        if finals[0].usable:
            self._finals = finals
        more, results = _received((_results(rank, plan) for rank, plan in enumerate(self._finals)), clock)
        with clock:
            writer.finish(metadata, results)
            broadcast = len(pickle.dumps(metadata))
        if not self.caching:
            self._finals = []
        return PlanningCost(
            coordinator_cpu_s=clock.seconds,
            gathered_bytes=gathered + more,
            scattered_bytes=scattered,
            broadcast_bytes=broadcast,
        )

    def close(self) -> None:
        """Empty the caches, which belong to the planner's class."""
        _CachingPlanner.forget()

    def _local_plans(self) -> Iterable[SavePlan]:
        """What the ranks send: nothing but a sign, if the plan is cached."""
        for rank in range(self.workload.world_size):
            if self.caching and self._saves > 1:
                yield SavePlan([], storage_data=_StoragePrefix(f"__{rank}_"), usable=False)
            else:
                yield local_plan(self.workload, rank)


@final
class StockPlanning(_StockPlanning):
    """As it comes: the same for every save."""

    key = "dcp"
    name = "dcp.save"
    caching = False
    learns = False


@final
class StockCachedPlanning(_StockPlanning):
    """With `enable_plan_caching=True`."""

    key = "dcp-cached"
    name = "dcp.save, plan caching"
    caching = True


@final
class _CachingPlanner(DefaultSavePlanner):
    """A class of its own: the caches are keyed by its name."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)

    @classmethod
    def forget(cls) -> None:
        """Empty its caches."""
        for cache in (
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            cache.pop(cls.__name__, None)


@final
class Clock:
    """CPU seconds of this process, summed over `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._start


def _received(messages: Iterable[Any], clock: Clock) -> tuple[int, list[Any]]:
    """Bytes sent by all ranks, and what the coordinator has of it; only its unpickling is timed."""
    size, objects = 0, []
    for message in messages:
        content = pickle.dumps(message)
        size += len(content)
        with clock:
            objects.append(pickle.loads(content))
    return size, objects


def local_plan(workload: Workload, rank: int) -> SavePlan:
    """The plan of one rank, as of DTensors; made without any of them.

    Every tensor has its own description; pickle would send a shared one only once.
    """
    items: list[WriteItem] = []
    paths: dict[str, tuple[str, ...]] = {}
    for each in held(workload, rank):
        name, offsets = ".".join(each.path), torch.Size(each.start)
        paths[name] = each.path
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(each.start), sizes=torch.Size(each.sizes)),
            properties=TensorProperties(dtype=getattr(torch, each.dtype)),
            size=torch.Size(each.shape),
        )
        kind = WriteItemType.TENSOR if each.mesh is None else WriteItemType.SHARD
        items.append(WriteItem(index=MetadataIndex(name, offsets), type=kind, tensor_data=data))
    return SavePlan(items, planner_data=paths, storage_data=_StoragePrefix(f"__{rank}_"))


def _results(rank: int, plan: SavePlan) -> Sequence[WriteResult]:
    size = 1 << 14
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=size,
            storage_data=_StorageInfo(f"__{rank}_0.distcp", number * size, size),
        )
        for number, item in enumerate(plan.items)
    ]
