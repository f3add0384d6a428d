"""How ckpt-suite plans: the shipped code of a coordinator, fed with messages of ranks that are not there."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from benchmarks.planning import GROUPS, VALUES, Held, Planning, PlanningCost, Workload, held, state_bytes
from benchmarks.stock_planning import Clock
from ckpt_core.commit import begin
from ckpt_core.coordination import Solo
from ckpt_core.coordination._channel import _packed, _read
from ckpt_core.dcp import LocalPlan, Outline
from ckpt_core.formats.chunks import TableEntry
from ckpt_core.messages import decode, encode
from ckpt_core.names import chunks_name, data_name, rank_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.saving import SaveRequest, SaveThread
from ckpt_core.saving._plan_cache import Offer, PlanCache, Proposal, _RankPlan
from ckpt_core.saving._reports import Findings, RankReport, ReportCache, chosen
from ckpt_core.saving._save import Means, Save
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import FileEntry

_ALL_REDUCE_BYTES = 7 * 8
_BYTES_PER_ITEM = 250
_FRAME_BYTES = 832


def proposal_of(workload: Workload, rank: int) -> Proposal:
    """What a rank with these tensors would propose."""
    kinds: dict[tuple[object, ...], int] = {}
    boxes: list[int] = []
    own = list(held(workload, rank))
    kind_of: list[int] = []
    for each in own:
        kind = (each.dtype, "torch.strided", False, 0, False), each.shape, each.mesh, True
        # A mesh has one pair of placements for each shape, but for every other one with TP.
        key = *kind, each.sizes
        if key not in kinds:
            boxes += [*each.start, *each.sizes]
        kind_of.append(kinds.setdefault(key, len(kinds)))
    values = [(*GROUPS, 0, name) for name in VALUES]
    outline = Outline(
        paths=[*(each.path for each in own), *values],
        leaf=np.arange(len(own) + len(values), dtype=np.int32).tobytes(),
        kind=np.array([*kind_of, *[-1] * len(values)], np.int32).tobytes(),
        kinds=[key[:4] for key in kinds],
    )
    trained = tuple(each.path[1] for each in own if each.path[0] == "model")
    return Proposal.of(
        {"": LocalPlan(outline=outline, boxes=np.array(boxes, np.int64).tobytes())},
        Offer(files=frozenset({rank_name(rank)}), groups={"": {GROUPS: [trained]}}),
    )


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
        self._tasks: Sequence[_RankPlan] = ()

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
        gathered, proposals = 0, list[Proposal]()
        for rank in self._ranks():
            content = encode(proposal_of(self.workload, rank))
            gathered += len(content)
            with clock:
                proposals.append(decode(content))
        with clock:
            self._tasks = self._plans._decide(proposals)
            scattered = sum(len(encode(task)) for task in self._tasks)
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
            replicas=self._plans.replicas,
            generation=1,
            items={"model": "sharded"},
        )

    def _commit(self, prepared: Save, clock: Clock) -> tuple[int, int]:
        """Bytes of the reports of all ranks, and of the answer to each."""
        directory = self._storage.local_path(prepared.working)
        messages = [_packed(self._report(rank, directory).to_bytes()) for rank in self._ranks()]
        gc.collect()  # of what simulates the ranks
        with clock:
            reports = [_read("a report", message).content for message in messages]
            answer = encode(prepared.commit_files(RankReport.read_all(reports)))
        shutil.rmtree(self._storage.local_path(prepared.request.name))
        return sum(map(len, messages)), len(answer)

    def _ranks(self) -> Iterable[int]:
        return range(self.workload.world_size)

    def _report(self, rank: int, directory: Path) -> RankReport:
        """What a rank would report: that of a first save has lengths, later ones do not."""
        own = list(held(self.workload, rank))
        entries = self._table_entries(rank, own)
        files = [(entry.path, entry.size_bytes) for entry in entries]
        files += [(name, 9_000) for name in (rank_name(rank), chunks_name(rank))]
        for path, size in files:
            with open(directory / path, "xb") as file:
                os.truncate(file.fileno(), size)
        memory = ReportCache()
        if self._saves > 1:
            memory.report((), entries)
            memory.committed()
        report = memory.report(
            [FileEntry(path=path, size_bytes=size, checksum="crc32:12345678") for path, size in files],
            entries,
        )
        groups = self._tasks[rank].parts[""].replicas
        turn = self._saves - 1
        evidence = {
            group: bytes(4 + 4 * len(chosen(turn, len(places) // 4))) for group, places in groups.items()
        }
        return replace(report, evidence=Findings(turn, {"": evidence}, {}))

    def _table_entries(self, rank: int, own: Sequence[Held]) -> list[TableEntry]:
        """The data files of a rank: of tensors, and of plain values if it writes some."""
        task = self._tasks[rank].parts[""]
        places = task.places(len(own) + len(VALUES))
        tensors = [_FRAME_BYTES + state_bytes(own[at].sizes, own[at].dtype) for at in places if at < len(own)]
        tensors += [
            _FRAME_BYTES + state_bytes((rows, *own[at].sizes[1:]), own[at].dtype)
            for at, _, rows in task.blocks
        ]
        return [
            TableEntry(
                path=data_name(rank, number),
                size_bytes=sum(lengths),
                num_chunks=len(lengths),
                columns=b"",
                crcs=b"",
                lengths=np.array(lengths, np.int64).tobytes(),
            )
            for number, lengths in enumerate(
                (tensors, [192] * (len(places) + len(task.blocks) - len(tensors)))
            )
            if lengths
        ]
