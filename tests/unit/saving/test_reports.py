from __future__ import annotations

import pickle
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core.commit import Catalog, begin, verify
from ckpt_core.coordination import Solo
from ckpt_core.dcp import Part, PlannedIndex, decide
from ckpt_core.errors import SaveError
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job as Served
from ckpt_core.root import Ownership, Pruner
from ckpt_core.saving._in_flight import SaveRequest, SaveThread
from ckpt_core.saving._reports import Findings, RankReport, ReportCache
from ckpt_core.saving._save import Means, Save
from ckpt_core.saving._stager import Stager
from ckpt_core.staging import Arenas
from ckpt_core.storage import LocalStorage, Storage, Throttle
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import FileEntry
from tests.kit.memory import MemoryStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class Job:
    """Ranks that save one after another in one process, as `Save` has them do."""

    storage: Storage
    states: list[dict[str, Any]]

    def __post_init__(self) -> None:
        self.means = [means(self.storage) for _ in self.states]
        self.stagers = [Stager(Arenas()) for _ in self.states]
        self.parts = [Part() for _ in self.states]
        self.metadata: dict[str, PlannedIndex] = {}
        self.generation = 0
        self.step = 0

    def plan(self) -> None:
        decided = decide([part.local_plan() for part in self.parts])
        self.metadata[""] = decided.planned
        for rank, (part, task) in enumerate(zip(self.parts, decided.tasks, strict=True)):
            part.accept(task, rank)
        self.generation += 1

    @property
    def memories(self) -> list[ReportCache]:
        return [each.reports for each in self.means]

    def write(self) -> tuple[list[Save], list[bytes]]:
        self.step += 1
        alike = [part.update(state) for part, state in zip(self.parts, self.states, strict=True)]
        if not all(alike):
            self.plan()
        name = f"step-{self.step:09d}"
        working = begin(self.storage, name, f"{self.step:08x}")
        saves = []
        for rank, part in enumerate(self.parts):
            staged = self.stagers[rank].stage({"": part}, self.generation)
            channel = Solo().commit_channel()
            channel.rank = rank
            saves.append(
                Save(
                    means=self.means[rank],
                    channel=channel,
                    request=SaveRequest(step=self.step, name=name),
                    save_id=f"{self.step:08x}",
                    working=working,
                    created=1.0,
                    files={f"rank-{rank:05d}.json": b"{}"},
                    metadata=self.metadata,
                    items={"model": "sharded"},
                    staged=staged,
                )
            )
        messages = [save.write_files().to_bytes() for save in saves]
        for save in saves:
            save.staged.release()
        return saves, messages

    def save(self) -> list[RankReport]:
        saves, messages = self.write()
        saves[0].commit_files(reports := RankReport.read_all(messages))
        for memory in self.memories:
            memory.committed()
        return reports

    def read(self, path: str) -> bytes:
        return self.storage.read_bytes(f"step-{self.step:09d}/{path}")


def means(storage: Storage) -> Means:
    options, ownership = CheckpointOptions(), Ownership(storage, Solo())
    served = Served(storage=storage, coordinator=Solo(), telemetry=Telemetry())
    pruner = Pruner(storage, options, ownership=ownership, telemetry=served.telemetry)
    return Means(served, SaveThread(60), options, ownership=ownership, pruner=pruner)


def state(rank: int, *, num_tensors: int = 3) -> dict[str, Any]:
    tensors = {f"rank{rank}.w{i}": torch.full((5,), rank + i) for i in range(num_tensors)}
    return {**tensors, f"rank{rank}.lr": 0.5}


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(LocalStorage(tmp_path), [state(0), state(1)])


def told(reports: list[RankReport]) -> list[bool]:
    return [report.lengths is not None for report in reports]


def test_where_chunks_lie_is_told_once(job):
    assert told(job.save()) == [True, True]
    assert told(job.save()) == [False, False]
    job.states[1]["rank1.w0"].add_(1)
    assert told(job.save()) == [False, False]


def test_where_chunks_lie_is_told_again_after_a_save_that_was_not_committed(job):
    job.save()
    job.write()
    assert told(job.save()) == [True, True]
    assert told(job.save()) == [False, False]


def test_a_rank_that_failed_to_write_tells_nothing_new(job):
    job.save()
    saves, _ = job.write()
    with pytest.raises(FileExistsError):
        saves[1].write_files()
    assert told(job.save()) == [True, True]


def test_values_whose_size_varies_a_little_lie_where_they_lay(job):
    job.save()
    before = pickle.loads(job.read(".metadata")).storage_data
    job.states[0]["rank0.lr"] = 12345678901234567890
    assert told(job.save()) == [False, False]
    assert pickle.loads(job.read(".metadata")).storage_data == before
    job.states[0]["rank0.lr"] = "x" * 5000
    assert told(job.save()) == [True, False]
    assert pickle.loads(job.read(".metadata")).storage_data != before
    assert verify(job.storage, f"step-{job.step:09d}") == []


def test_metadata_is_written_as_the_same_bytes_until_the_layout_or_the_plan_changes(job):
    job.save()
    first = job.memories[0].metadata(job.metadata)[""]
    job.save()
    assert job.memories[0].metadata(job.metadata)[""] is first
    assert job.read(".metadata") == b"".join(first.pieces)
    job.states[1]["rank1.more"] = torch.ones(2)
    assert told(job.save()) == [False, True]
    assert "rank1.more" in pickle.loads(job.read(".metadata")).state_dict_metadata


def test_a_plan_that_changed_alone_is_written_too(job):
    job.save()
    planned, paths = job.metadata[""], [("elsewhere", name) for name in job.metadata[""].index.names]
    planned.index = replace(planned.index, paths=paths)
    job.metadata = {"": copy(planned)}
    assert told(job.save()) == [False, False]
    assert list(pickle.loads(job.read(".metadata")).planner_data.values()) == paths


def test_what_the_ranks_wrote_together_is_read_by_stock_dcp(job, tmp_path):
    for _ in range(2):
        job.save()
        target = {
            key: torch.zeros(5, dtype=torch.int64) for each in job.states for key in each if ".w" in key
        }
        dcp.load(target, checkpoint_id=tmp_path / f"step-{job.step:09d}", no_dist=True)
        for each in job.states:
            assert all(torch.equal(target[key], each[key]) for key in each if ".w" in key)
        for each in job.states:
            each[next(iter(each))].add_(100)


@pytest.mark.slow
def test_a_report_without_change_stays_below_1_kib():
    job = Job(MemoryStorage(), [state(0, num_tensors=1000)])
    job.save()
    saves, (message,) = job.write()
    assert len(message) < 1024
    assert saves[0].commit_files(RankReport.read_all([message])).step == job.step


def test_the_chunk_table_is_a_file_of_the_checkpoint_like_any_other(job):
    job.save()
    manifest = Catalog(job.storage).manifest("step-000000001")
    listed = {entry.path for entry in manifest.files}
    assert {"chunks-00000.json.z", "chunks-00001.json.z", "__0_0.distcp", "__0_1.distcp"} <= listed
    tables = [
        ChunkTable.from_bytes(job.read(f"chunks-{rank:05d}.json.z"), source=f"chunks-{rank:05d}.json.z")
        for rank in range(2)
    ]
    assert manifest.num_chunks == sum(len(list(table)) for table in tables) == 8
    assert {path for table in tables for path in table.files} == {p for p in listed if ".distcp" in p}


def test_a_coordinator_that_was_never_told_does_not_commit(job):
    job.save()
    saves, messages = job.write()
    job.means[0].reports = ReportCache()
    with pytest.raises(SaveError, match=r"ranks \[0, 1\] did not send the lengths of their chunks"):
        saves[0].commit_files(RankReport.read_all(messages))
    assert not job.storage.exists("step-000000002/COMMITTED")


def test_reports_read_back_as_they_were_sent():
    entry = FileEntry(path="a\nb\0\udcff", size_bytes=3, checksum="crc32:00")
    findings = Findings(1, {"": {0: b"\0\xff"}}, {"lr": 7})
    report = RankReport(
        files=[entry, replace(entry, size_bytes=4)],
        num_chunks=7,
        lengths={"__0_0.distcp": b"x"},
        evidence=findings,
        place=("/run", "node"),
        trained={"the model": "0f"},
    )
    reports = [report, RankReport(files=[]), replace(report, num_chunks=8), report]
    assert RankReport.read_all([each.to_bytes() for each in reports]) == reports


def test_tensors_are_written_no_faster_than_the_cap(job):
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    job.states[0]["rank0.large"] = torch.zeros(40 << 20, dtype=torch.uint8)
    job.means[0].reports = ReportCache(pace=Throttle(16 << 20, clock=lambda: now[0], sleep=sleep))
    job.save()
    assert slept == [1.0, 1.0]
    assert verify(job.storage, "step-000000001") == []
