"""What the threads that bring checkpoints to a further tier have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.coordination import CommitChannel
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
    UploadError,
)
from ckpt_core.options import Upload
from ckpt_core.storage import Storage, Throttle
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import CheckpointCopy, CopyProcess, CopyTerms
from ckpt_core.tiers.uploading._line import DueCheckpoint, UploadLine
from ckpt_core.types import CheckpointInfo, FileEntry

_logger = logger_of(__name__)

LASTING: Final = (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
)
"""Errors that another try would meet again."""
FOREVER: Final = 1e7
"""Seconds: files of any size may be on their way, and the end of the run ends the wait for them."""


class StoppedError(CheckpointError):
    """The upload was stopped; a later one continues it."""


def upload_error(
    info: CheckpointInfo, url: str, problem: str, *, failures: dict[int, str] | None = None
) -> UploadError:
    """Return the error of a checkpoint that is not in a tier."""
    text = f"step {info.step} is not in {url}: {problem}"
    return UploadError(text, step=info.step, name=info.name, failures=failures or {})


@final
class Sender:
    """Sends files to a tier, in a process of its own where that pays.

    Concurrency: `send` on one thread, the others on any.

    Attributes:
        source: the root.
        target: the tier.
        upload: the option.
        stopped: whether to end; what is not there is left to the next run.
    """

    def __init__(self, source: Storage, target: Storage, upload: Upload, deadline_seconds: float) -> None:
        self.source, self.target, self.upload = source, target, upload
        self.stopped = threading.Event()
        self._process = CopyProcess.between(source, target, upload, deadline_seconds=deadline_seconds)

    def copy(self, name: str, as_name: str) -> CheckpointCopy:
        """Return a copy of a checkpoint to the tier."""
        return CheckpointCopy.of(self.source, self.target, name, as_name=as_name)

    def send(
        self,
        copy: CheckpointCopy,
        entries: Sequence[FileEntry],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copy files; errors as by `CheckpointCopy.copy_files`, or `StoppedError`."""
        rate = self.upload.bytes_per_second
        pace = None if rate is None else Throttle(rate, sleep=self._pause)
        terms = CopyTerms(pace=pace, progress=progress, stop=self._raise_if_stopped)
        process = self._process
        if process is None or not process.copy_files(copy, entries, terms, bytes_per_second=rate):
            copy.copy_files(entries, terms)

    def close(self) -> None:
        """Stop, and end the process, which may hang."""
        self.stopped.set()
        if self._process is not None:
            self._process.close()

    def _pause(self, seconds: float) -> None:
        self.stopped.wait(seconds)

    def _raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise StoppedError("the upload was stopped")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How the thread of a rank is heard by those of the others.

    Attributes:
        rank: of this process.
        open_channel: to the other ranks.
        deadline_seconds: the longest wait for one word.
        telemetry: receives spans.
    """

    rank: int
    open_channel: Callable[[], CommitChannel]
    deadline_seconds: float
    telemetry: Telemetry


class TierThread:
    """A thread that brings checkpoints to one tier, or hears how they get there.

    Attributes:
        sender: of this process.
        line: the due checkpoints.
        failure: why the last one was not uploaded, until that is raised.
        ending: whether the run is about to end.
    """

    def __init__(self, sender: Sender, ranks: Ranks) -> None:
        self.sender, self.upload = sender, sender.upload
        self.line = UploadLine(sender.upload.when_busy)
        self.failure: UploadError | None = None
        self.ending = False
        self._ranks = ranks
        self._words = 0
        self._abandoned = False
        self._opened: CommitChannel | None = None
        # A daemon: the process must be able to end while storage hangs.
        self._thread = threading.Thread(target=self.run, name="ckpt-upload", daemon=True)

    def run(self) -> None:
        """Serve the line until it is closed; on the thread."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to serve the line."""
        self._thread.start()

    def stop(self) -> None:
        """Leave what is not uploaded yet to the next run."""
        self.sender.stopped.set()
        self.line.close()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is due; False if `seconds` pass before."""
        return self.line.wait(seconds)

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; False if `seconds` pass before."""
        self._thread.join(max(0.0, seconds))
        return self.ended

    def interrupt(self) -> None:
        """Cancel requests under way, where the client of the tier can."""
        self.sender.close()
        self.sender.target.interrupt()

    def release(self) -> None:
        """Give the tier back."""

    def report(self, due: DueCheckpoint, problem: str) -> UploadError:
        """Report that a checkpoint is not in the tier in time."""
        info = due.info
        self.failure = error = UploadError(problem, step=info.step, name=info.name)
        self._ranks.telemetry.point("upload.failed", step=info.step, to=self.upload.url, error=problem)
        _logger.error("%s", error)
        due.report(error)
        return error

    @property
    def _channel(self) -> CommitChannel:
        if self._opened is None:
            self._opened = self._ranks.open_channel()
        return self._opened

    def _hang_up(self) -> None:
        channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()

    def abandon(self) -> None:
        """Let the thread end by itself, whenever it wakes up, without the other ranks."""
        self._abandoned = True
        if (channel := self._opened) is not None:
            channel.close()

    def _send(
        self, copy: CheckpointCopy, entries: Sequence[FileEntry], progress: Callable[[int], None]
    ) -> None:
        info = copy.manifest
        attributes = {"step": info.step, "name": copy.source_name, "to": self.upload.url}
        attributes |= {"rank": self._ranks.rank, "size_bytes": sum(entry.size_bytes for entry in entries)}
        with self._ranks.telemetry.span("upload", **attributes):
            self.sender.send(copy, entries, progress)

    def _meet(self, problem: Exception | None) -> None:
        """Wait until every disk has sent its files; raise what failed on any."""
        self._channel.commit_barrier(
            f"{self._words}/sent", problem or b"", lambda _: b"", deadline_seconds=FOREVER
        )
