"""The uploads to one further tier, on every rank: one after another, each by all ranks together.

For each due checkpoint the coordinator decides whether it is uploaded, and prepares the tier. Then every rank
copies the files that it wrote, and the ranks meet from time to time over the job's Store, each with its
progress or its failure. When all files are there, the coordinator commits. The training thread takes no part,
and no collective is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from ckpt_core import messages
from ckpt_core.coordination import CommitChannel
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, UploadError
from ckpt_core.options import Upload
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import CheckpointCopy, files_by_rank
from ckpt_core.tiers.uploading._durable import DurableRoot
from ckpt_core.tiers.uploading._line import DueCheckpoint, Outcome, UploadLine
from ckpt_core.tiers.uploading._transfer import LASTING, RankProgress, Transfer
from ckpt_core.types import CheckpointInfo, FileEntry

_logger = logger_of(__name__)

_LONGEST_PAUSE: Final = 60.0
_SHORTEST_MEETING: Final = 0.1
_LONGEST_MEETING: Final = 10.0
_GROWTH: Final = 0.25
"""The ranks meet again after this share of the time that the upload has taken so far."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadContext:
    """What the uploads of one manager share.

    Attributes:
        source: the root.
        rank: of this process.
        world_size: number of ranks.
        deadline_seconds: the longest wait of ranks for one another.
        open_channel: opens a channel to the other ranks.
        telemetry: receives spans.
        note: called on the coordinator with bytes done and in all, or None when an upload has ended.
        clock: monotonic seconds.
        pause: waits for an event; returns whether it was set.
    """

    source: Storage
    rank: int
    world_size: int
    deadline_seconds: float
    open_channel: Callable[[], CommitChannel]
    telemetry: Telemetry
    note: Callable[[Progress | None], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[threading.Event, float], bool] = threading.Event.wait


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
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


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Word:
    """What the coordinator says of a due checkpoint.

    Attributes:
        name: of the copy; "" if none is made.
        there: whether it is in the tier already.
        overdue: why it is late, if every rank is to say so now.
    """

    name: str = ""
    there: bool = False
    overdue: str = ""


@dataclass(kw_only=True, slots=True)
class _Attempts:
    """The attempts to upload one checkpoint."""

    due: DueCheckpoint
    began_at: float
    number: int = 0
    reported: bool = False
    working: str = ""
    failure: CheckpointError | None = None

    @property
    def topic(self) -> str:
        return f"upload/{self.due.info.save_id}/{self.number}"


@final
class Uploader:
    """The uploads to one further tier.

    Attributes:
        line: the due checkpoints.
        failure: the last one that was not uploaded, until it is raised.

    Concurrency: `start`, `stop` and `join` on any thread; the rest on a thread of its own.

    Args:
        upload: the option.
        target: the tier.
        context: of the manager.
        durable: the tier's owner; None on all ranks but the coordinator.
    """

    def __init__(
        self, upload: Upload, target: Storage, context: UploadContext, durable: DurableRoot | None
    ) -> None:
        self.upload = upload
        self.line = UploadLine(upload.when_busy)
        self.failure: UploadError | None = None
        self._target = target
        self._context = context
        self._durable = durable
        self._channel: CommitChannel | None = None
        self._stopped = threading.Event()
        self._hanging: Transfer | None = None
        self._thread = threading.Thread(target=self._loop, name="ckpt-upload", daemon=True)

    def start(self) -> None:
        """Begin to serve the line."""
        self._channel = self._context.open_channel()
        self._thread.start()

    def stop(self) -> None:
        """Leave what is not uploaded yet to the next run."""
        self._stopped.set()
        self.line.close()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; False if `seconds` pass before."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (due := self.line.next()) is not None:
            outcome: Outcome = None
            try:
                outcome = self._serve(_Attempts(due=due, began_at=self._context.clock()))
            except Exception as error:
                _logger.exception("the upload of step %d to %s ended", due.info.step, self.upload.url)
                outcome = self._error(due.info, f"{type(error).__name__}: {error}")
            finally:
                due.report(outcome)
                self._context.note(None)
                self.line.done()
        if self._channel is not None:
            self._channel.close()

    def _serve(self, attempts: _Attempts) -> Outcome:
        """Upload one checkpoint; return once it is there, or is not going to be."""
        info = attempts.due.info
        while True:
            try:
                word = self._decided(attempts)
                if word is None:
                    return None
                if word.overdue:
                    self._tell(attempts, word.overdue)
                if word.there:
                    return self._there(info)
                if not word.name:
                    return None
                with self._context.telemetry.span(
                    "upload", step=info.step, rank=self._context.rank, to=self.upload.url
                ):
                    done = self._attempt(attempts, word.name)
            except CheckpointError as error:
                if self._failed(attempts, error):
                    return self.failure
            else:
                return None if done is None else self._there(done)

    def _there(self, info: CheckpointInfo) -> CheckpointInfo:
        _logger.info("step %d is in %s", info.step, self.upload.url)
        return info

    def _decided(self, attempts: _Attempts) -> _Word | None:
        """Return the coordinator's word; None if this rank leaves."""
        while True:
            try:
                return self._need_channel().broadcast(
                    attempts.topic,
                    lambda: self._decide(attempts),
                    deadline_seconds=self._context.deadline_seconds,
                )
            except DeadlineError:
                # The coordinator may be pruning, or waiting for a service; its word counts whenever it comes.
                if self._stopped.is_set() or self.line.is_waited_for or self._durable is not None:
                    return None

    def _decide(self, attempts: _Attempts) -> _Word:
        """Decide on the next attempt; coordinator only."""
        durable, late = self._durable, ""
        if durable is None:
            raise CoordinationError("only the coordinator decides on uploads")
        if attempts.number:
            pause = min(2.0 ** (attempts.number - 1), _LONGEST_PAUSE, self._context.deadline_seconds / 4)
            self._context.pause(self._stopped, pause)
        over = self._context.clock() - attempts.began_at >= self.upload.deadline_seconds
        if attempts.number and over and not attempts.reported:
            late = f"{attempts.failure}"
        if self._stopped.is_set():
            return _Word(overdue=late)
        if self.line.overtakes or (attempts.number and over and self.line.is_waited_for):
            if attempts.working:
                durable.drop(attempts.working)
            return _Word(overdue=late)
        durable.take(())
        info = attempts.due.info
        name = durable.begin(lambda name: self._copy(info.name, name), info)
        if name is None:
            return _Word(there=True, overdue=late)
        attempts.working = self._copy(info.name, name).working
        return _Word(name=name, overdue=late)

    def _copy(self, name: str, there: str | None) -> CheckpointCopy:
        return CheckpointCopy.of(self._context.source, self._target, name, there)

    def _attempt(self, attempts: _Attempts, name: str) -> CheckpointInfo | None:
        """Copy this rank's files and meet the others until all are there; None if left."""
        info, context = attempts.due.info, self._context
        self._require_idle()
        transfer = Transfer(
            lambda: self._copy(info.name, name),
            self._share,
            bytes_per_second=self.upload.bytes_per_second,
            patience_seconds=context.deadline_seconds,
            clock=context.clock,
        )
        transfer.start()
        began = context.clock()
        meeting = 0
        try:
            while True:
                took = (context.clock() - began) * _GROWTH
                own = transfer.progress(min(max(took, _SHORTEST_MEETING), _LONGEST_MEETING))
                if self._stopped.is_set():
                    transfer.stop()
                    own = transfer.progress(0)
                answer = self._meet(attempts, name, own, f"{attempts.topic}/{meeting}", began)
                if answer in _ENDS:
                    return info if answer == _COMMITTED else None
                meeting += 1
        finally:
            if not transfer.end(_LONGEST_MEETING):
                self._hanging = transfer

    def _meet(
        self, attempts: _Attempts, name: str, own: RankProgress, topic: str, began: float
    ) -> bytes:
        """Exchange progress with all ranks; the coordinator commits when all have ended."""
        info = attempts.due.info

        def combine(reports: list[bytes]) -> bytes:
            ranks = [_decoded(report) for report in reports]
            self._require_no_failure(info, ranks)
            if any(rank.left for rank in ranks):
                return _LEFT
            progress = Progress(
                name=info.name,
                done_bytes=sum(rank.done_bytes for rank in ranks),
                size_bytes=sum(rank.size_bytes for rank in ranks),
                seconds=self._context.clock() - began,
            )
            self._context.note(progress)
            if not all(rank.ended for rank in ranks):
                return _GO_ON
            self._commit(info, name)
            return _COMMITTED

        answer = self._need_channel().commit_barrier(
            topic, messages.encode(own), combine, deadline_seconds=self._context.deadline_seconds
        )
        if answer == _COMMITTED and self._durable is not None:
            self._durable.prune(info, lambda: not self._stopped.is_set())
        return answer

    def _commit(self, info: CheckpointInfo, name: str) -> None:
        if self._durable is None:
            raise CoordinationError("only the coordinator commits")
        self._durable.commit(self._copy(info.name, name))

    def _require_no_failure(self, info: CheckpointInfo, ranks: Sequence[RankProgress]) -> None:
        failures = {rank: each.failure for rank, each in enumerate(ranks) if each.failure}
        if failures:
            named = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            lasting = any(each.lasting for each in ranks)
            raise self._error(info, named, failures, lasting=lasting)

    def _share(self, copy: CheckpointCopy) -> Sequence[FileEntry]:
        """Return the files that this rank uploads: its own, and those of ranks that are not there."""
        rank, size = self._context.rank, self._context.world_size
        found = files_by_rank(copy.manifest)
        return [entry for writer, files in found.items() if writer % size == rank for entry in files]

    def _require_idle(self) -> None:
        """Refuse to begin while a copy that was given up still hangs; raised on this rank only."""
        hanging = self._hanging
        if hanging is not None and hanging.end(0):
            self._hanging = None

    def _need_channel(self) -> CommitChannel:
        if self._channel is None:
            self._channel = self._context.open_channel()
        return self._channel

    def _failed(self, attempts: _Attempts, error: CheckpointError) -> bool:
        """Note a failed attempt; return whether there is no other."""
        info = attempts.due.info
        if isinstance(error, CoordinationError) and not isinstance(error, DeadlineError | UploadError):
            self._reconnect()
        lasting = isinstance(error, LASTING) or (isinstance(error, UploadError) and error.lasting)
        if lasting:
            self._tell(attempts, str(error))
            return True
        if not attempts.number:
            _logger.warning(
                "the upload of step %d to %s failed, and is tried again: %s", info.step, self.upload.url, error
            )
        attempts.failure = error
        attempts.number += 1
        return False

    def _reconnect(self) -> None:
        """Drop the channel: the Store may be gone, and another one in its place."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _tell(self, attempts: _Attempts, problem: str) -> None:
        """Tell once, on every rank, that a checkpoint is not in the tier."""
        info = attempts.due.info
        attempts.reported = True
        self.failure = error = self._error(info, problem)
        self._context.telemetry.point("upload.failed", step=info.step, to=self.upload.url, error=problem)
        _logger.error("%s", error)
        attempts.due.report(error)

    def _error(
        self,
        info: CheckpointInfo,
        problem: str,
        failures: Mapping[int, str] | None = None,
        *,
        lasting: bool = False,
    ) -> UploadError:
        details: dict[str, Any] = {"failures": dict(failures or {}), "lasting": lasting}
        return UploadError(
            f"step {info.step} is not in {self.upload.url}: {problem}", step=info.step, name=info.name, **details
        )


_GO_ON: Final = b"go on"
_LEFT: Final = b"left"
_COMMITTED: Final = b"committed"
_ENDS: Final = {_LEFT, _COMMITTED}


def _decoded(report: bytes) -> RankProgress:
    found = messages.decode(report)
    if not isinstance(found, RankProgress):
        raise CoordinationError("a report of an upload that is none")
    return found
