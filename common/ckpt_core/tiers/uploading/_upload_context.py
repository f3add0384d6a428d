"""What the uploads of a manager share, and what is known of a running one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from ckpt_core.coordination import CommitChannel
from ckpt_core.errors import CheckpointError, UploadError, failure_text
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import CopyProcess
from ckpt_core.types import CheckpointInfo


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadProgress:
    """How far an upload is, over all ranks."""

    name: str
    done_bytes: int
    size_bytes: int
    seconds: float

    @property
    def text(self) -> str:
        """Percent and rate, for people."""
        percent = 100 * self.done_bytes // self.size_bytes if self.size_bytes else 100
        rate = self.done_bytes / self.seconds / 1e6 if self.seconds > 0 else 0.0
        return f"{percent} % of {self.size_bytes / 1e6:.1f} MB, {rate:.1f} MB/s"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadContext:
    """What the uploads to one tier know of the job.

    Attributes:
        source: the root.
        rank: of this process.
        world_size: number of ranks.
        deadline_seconds: the longest wait of ranks for one another.
        open_channel: opens a channel to the other ranks.
        telemetry: receives spans.
        note: called on the coordinator with the progress, or with None when an upload has ended.
        clock: monotonic seconds.
        process: copies the files of this rank; None if a thread does.
        pause: waits for an event, at most so many seconds.
    """

    source: Storage
    rank: int
    world_size: int
    deadline_seconds: float
    open_channel: Callable[[], CommitChannel]
    telemetry: Telemetry
    note: Callable[[UploadProgress | None], None]
    process: CopyProcess | None = None
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[threading.Event, float], object] = threading.Event.wait


@contextmanager
def described(info: CheckpointInfo, url: str, rank: int) -> Generator[None]:
    """Raise what storage raises as an `UploadError`, which reaches every rank as such."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        text = failure_text(error)
        raise upload_error(info, url, f"rank {rank}: {text}", failures={rank: text}) from error


def upload_error(
    info: CheckpointInfo,
    url: str,
    problem: str,
    *,
    failures: dict[int, str] | None = None,
    lasting: bool = False,
) -> UploadError:
    """Return the error of a checkpoint that is not in a tier."""
    return UploadError(
        f"step {info.step} is not in {url}: {problem}",
        step=info.step,
        name=info.name,
        failures=failures or {},
        lasting=lasting,
    )
