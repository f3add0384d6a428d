"""Resumes from a local tier and from the bucket behind it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from benchmarks.buckets.bare import BareObstore
from benchmarks.buckets.clients import BucketTask
from benchmarks.comparison import Row, over, panel
from benchmarks.contenders import Entrant, Kind
from benchmarks.report import Report, Table
from ckpt_core import CheckpointManager, Upload

MEASURES = ("seconds", "received")
_HEADER = ("", "s, median [min, max]", "x", "received per byte", "received / missing")
_NOTES = (
    "Every resume is that of a new manager, its start included, into the same live tensors, which are "
    "overwritten before and compared after. Local files are in the page cache. Received: bytes from the "
    "server of the bucket per byte of the state, until the resume has returned; missing: bytes of the state "
    "that are on no local disk. With two nodes each is a process with a directory of its own, and a half of "
    "the state; its time is that of the slower one. The base of x is the resume "
    "from a local disk without an upload, and bare obstore for what comes from the bucket.",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """One resume: seconds, and bytes from the bucket per byte of the state."""

    seconds: float
    received: float


class Resume(Entrant):
    """Brings the newest checkpoint back."""

    task: BucketTask
    kind: ClassVar[Kind] = "ours"
    base: ClassVar[str] = "resume-disk"
    uploads: ClassVar[bool] = True
    missing: ClassVar[float] = 0.0
    verify: ClassVar[str | None] = None

    @property
    def root(self) -> Path:
        """The local tier."""
        return self.task.live.root / self.key

    def manager(self) -> CheckpointManager:
        """A manager as a new run makes it."""
        upload = Upload(
            f"s3://{self.task.server.bucket}/{self.key}", storage_options=self.task.server.storage_options
        )
        return CheckpointManager(self.root, upload=upload if self.uploads else None, verify=self.verify)

    def prepare(self) -> None:
        """Save once, and upload."""
        with self.manager() as manager:
            manager.save(1, {"model": dict(self.task.live.tensors)})

    def lose(self) -> None:
        """Lose what is to be lost before a resume."""

    def measured(self) -> Resumed:
        """Resume; what it took."""
        before = self.task.server.counters()["bytes_out"]
        seconds = self.resume()
        received = self.task.server.counters()["bytes_out"] - before
        self.task.live.check()
        return Resumed(seconds=seconds, received=received / self.task.size_bytes)

    def resume(self) -> float:
        """Resume in a new manager; seconds."""
        start = time.perf_counter()
        manager = self.manager()
        try:
            assert manager.resume({"model": dict(self.task.live.tensors)}) == 1
            return time.perf_counter() - start
        finally:
            manager.close()


@final
class ResumeDisk(Resume):
    """From a local disk without an upload."""

    key = "resume-disk"
    name = "ckpt-suite, disk only"
    uploads = False


@final
class ResumeWhole(Resume):
    """From the local tier, which is whole."""

    key = "resume-whole"
    name = "ckpt-suite, local tier whole"


class _ResumeLost(Resume):
    base = "obstore"
    missing = 1.0

    def lose(self) -> None:
        """Lose the local disk."""
        shutil.rmtree(self.root)


@final
class ResumeLost(_ResumeLost):
    """From the bucket."""

    key = "resume-lost"
    name = "ckpt-suite, local tier lost"


@final
class ResumeLostRead(_ResumeLost):
    """From the bucket, verified before anything live changes."""

    key = "resume-lost-read"
    name = 'ckpt-suite, lost, verify="read"'
    verify = "read"


@final
class ResumeBare(Resume):
    """As many bytes by bare obstore."""

    key = "obstore"
    name = "obstore get_range x 8"
    kind: ClassVar[Kind] = "limit"
    base = "obstore"
    missing = 1.0

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        self._client = BareObstore(task)

    def prepare(self) -> None:
        """Put the bytes."""
        self._client.save(0)

    def resume(self) -> float:
        """Get the bytes; seconds."""
        start = time.perf_counter()
        self._client.load(0)
        return time.perf_counter() - start


def one_resume(entrant: Resume, number: int) -> Resumed:
    """Lose, resume, compare."""
    del number
    entrant.lose()
    entrant.task.live.poison()
    return entrant.measured()


def report_resumes(title: str, rows: Sequence[Row[Resume]], conditions: Sequence[str]) -> Report:
    """Table, data and picture."""
    medians = {row.contender.key: row.median("seconds") for row in rows}
    body: list[list[str]] = []
    for row in rows:
        if not row.timings:
            body.append([row.contender.name, f"not run: {row.not_run}"])
            continue
        ratio = over(row.median("seconds"), medians.get(row.contender.base))
        received, missing = row.median("received"), row.contender.missing
        body.append(
            [
                row.contender.name,
                str(row.spread("seconds")),
                "" if ratio is None else f"{ratio:.2f}",
                "" if received is None else f"{received:.2f}",
                "" if received is None or not missing else f"{received / missing:.2f}",
            ]
        )
    return Report(
        benchmark="tiers-resume",
        title=title,
        table=[Table(_HEADER, body)],
        results={row.contender.key: row.as_json(MEASURES) for row in rows},
        panels=[panel(rows, "seconds", "A resume takes")],
        conditions=[*_NOTES, *conditions],
    )
