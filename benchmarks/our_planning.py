"""How ckpt-suite plans: the shipped code of a coordinator, fed with messages of ranks that are not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

import torch

from benchmarks.planning import Planning, PlanningCost, Workload
from benchmarks.stock_planning import COLUMNS, ROWS, Clock, local_plan
from ckpt_core.commit import begin
from ckpt_core.coordination import Solo
from ckpt_core.dcp import ImageLayout
from ckpt_core.formats.chunks import ChunkColumns, TableEntry
from ckpt_core.messages import decode, encode
from ckpt_core.names import chunks_name, data_name, rank_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.saving import SaveRequest, SaveThread
from ckpt_core.saving._plan_cache import Offer, PlanCache, _Proposal
from ckpt_core.saving._reports import RankReport, ReportCache
from ckpt_core.saving._save import Means, Save
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import FileEntry

_ALL_REDUCE_BYTES = 5 * 8
_BYTES_PER_ITEM = 4400


@final
class OurPlanning(Planning):
    """`CheckpointManager.save` and its commit, on the coordinator of ranks whose files are sparse."""

    key = "ours"
    name = "ckpt-suite"
    kind: ClassVar = "ours"

    def __init__(self, workload: Workload, directory: Path) -> None:
        super().__init__(workload, directory)
        self._storage = LocalStorage(directory)
        self._plans = PlanCache()
        job = Job(storage=self._storage, coordinator=Solo(), telemetry=Telemetry())
        options, ownership = CheckpointOptions(), Ownership(self._storage, Solo())
        pruner = Pruner(self._storage, options, ownership=ownership, telemetry=job.telemetry)
        self._means = Means(job, SaveThread(1800.0), options, ownership=ownership, pruner=pruner)
        self._saves = 0

    @cached_property
    def _layout(self) -> ImageLayout:
        plan = local_plan(self.workload, 0)
        return ImageLayout([(item.index, torch.bfloat16, (ROWS, COLUMNS)) for item in plan.items])

    def memory_bytes(self) -> int:
        """All ranks' plans at once."""
        return self.workload.world_size * self.workload.tensors * _BYTES_PER_ITEM

    def save(self) -> PlanningCost:
        """The coordinator's part of one save, message by message."""
        self._saves += 1
        clock = Clock()
        gathered, scattered = self._agree(clock) if self._saves == 1 else (0, 0)
        prepared = self._begin(clock)
        reported, answer = self._commit(prepared, clock)
        opening = len(encode(b""))
        return PlanningCost(
            coordinator_cpu_s=clock.seconds,
            gathered_bytes=gathered + reported,
            scattered_bytes=scattered,
            broadcast_bytes=_ALL_REDUCE_BYTES + opening + answer,
        )

    def _agree(self, clock: Clock) -> tuple[int, int]:
        """What ranks propose and what they are told, in bytes."""
        gathered, proposals = 0, []
        for rank in range(self.workload.world_size):
            plan = replace(local_plan(self.workload, rank), storage_data=None)
            proposal = _Proposal(plans={"": plan}, offer=Offer(files=frozenset({rank_name(rank)})))
            content = encode(proposal)
            gathered += len(content)
            with clock:
                proposals.append(decode(content))
        with clock:
            shares = self._plans._decide(proposals)
        del proposals
        with clock:
            scattered = sum(len(encode(share)) for share in shares)
        return gathered, scattered

    def _begin(self, clock: Clock) -> Save:
        request = SaveRequest(step=self._saves, name=f"step-{self._saves:09d}")
        save_id = f"{self._saves:08x}"
        with clock:
            working = begin(self._storage, request.name, save_id)
        return Save(
            means=self._means,
            channel=Solo().commit_channel(),
            request=request,
            save_id=save_id,
            working=working,
            created=1.0,
            files={},
            metadata=self._plans.metadata,
            items={"model": "sharded"},
        )

    def _commit(self, prepared: Save, clock: Clock) -> tuple[int, int]:
        """Bytes of the reports of all ranks, and of the answer to each."""
        directory = self._storage.local_path(prepared.working)
        messages = [encode(self._report(rank, directory)) for rank in self._ranks()]
        with clock:
            reports = [decode(message) for message in messages]
            answer = encode(prepared.commit_files(reports))
        shutil.rmtree(self._storage.local_path(prepared.request.name))
        return sum(map(len, messages)), len(answer)

    def _ranks(self) -> Iterable[int]:
        return range(self.workload.world_size)

    def _report(self, rank: int, directory: Path) -> RankReport:
        """What a rank would report: that of a first save has the table, later ones do not."""
        entries = [self._table_entry(rank)]
        data = FileEntry(
            path=data_name(rank, 0), size_bytes=self._layout.size_bytes, checksum="crc32:12345678"
        )
        small = [
            FileEntry(path=name, size_bytes=9_000, checksum="crc32:87654321")
            for name in (rank_name(rank), chunks_name(rank))
        ]
        for entry in (data, *small):
            with open(directory / entry.path, "xb") as file:
                os.truncate(file.fileno(), entry.size_bytes)
        memory = ReportCache()
        if self._saves > 1:
            memory.report((), entries)
            memory.committed()
        return memory.report((data, *small), entries)

    def _table_entry(self, rank: int) -> TableEntry:
        slots = self._layout.slots
        columns = ChunkColumns(
            key=[slot.index.fqn for slot in slots],
            shard_offsets=[[ROWS * rank, 0]] * len(slots),
            offset=[slot.start for slot in slots],
            size_bytes=[slot.end - slot.start for slot in slots],
            payload_offset=[slot.payload for slot in slots],
            payload_bytes=[slot.payload_bytes for slot in slots],
            dtype=["bfloat16"] * len(slots),
        )
        return TableEntry(
            path=data_name(rank, 0),
            size_bytes=self._layout.size_bytes,
            num_chunks=len(slots),
            columns=columns.encode(),
            crcs=bytes(4 * len(slots)),
        )
