"""The uploads to one further tier, one after another, on a thread of every rank.

For each due checkpoint the coordinator decides whether it is uploaded now, and prepares the tier; the ranks
hear it over the job's Store. The training thread takes no part, and no collective is used.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from ckpt_core import messages
from ckpt_core.commit import Catalog
from ckpt_core.coordination import CommitChannel
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, UploadError, failure_text
from ckpt_core.options import Upload
from ckpt_core.storage import Storage
from ckpt_core.tiers import CheckpointCopy
from ckpt_core.tiers.uploading._attempt import Attempt, End, refuse_hanging
from ckpt_core.tiers.uploading._durable import DurableRoot
from ckpt_core.tiers.uploading._line import DueCheckpoint, Outcome, UploadLine
from ckpt_core.tiers.uploading._transfer import LASTING, Transfer
from ckpt_core.tiers.uploading._upload_context import UploadContext, described, upload_error
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_SHORTEST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 60.0
_END_SECONDS: Final = 10.0
_STOPPED_SECONDS: Final = 0.2
"""Times for the thread of an attempt to end, while uploads go on, and once they have been stopped."""


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What the coordinator says of a due checkpoint.

    Attributes:
        name: of the copy to make; "" if none is made.
        there: whether it is in the tier already.
        overdue: why it is late, if every rank is to report it now; another verdict follows.
    """

    name: str = ""
    there: bool = False
    overdue: str = ""


@final
@dataclass(kw_only=True, slots=True)
class _Turn:
    """The attempts to upload one checkpoint.

    Attributes:
        due: the checkpoint.
        began_at: on the clock.
        attempts: that have failed.
        problem: of the last one.
        overdue: whether it was reported.
        working: the directory of an attempt in the tier; "" before there is one.
    """

    due: DueCheckpoint
    began_at: float
    attempts: int = 0
    problem: str = ""
    overdue: bool = False
    working: str = ""

    def is_spent(self, now: float, seconds: float) -> bool:
        """Return whether it should have been there by now."""
        return now - self.began_at >= seconds

    @property
    def topic(self) -> str:
        """The name of the next verdict and its attempt, equal on all ranks."""
        kind = "last" if self.due.last else "due"
        return f"upload/{self.due.info.save_id}/{kind}/{self.attempts}{'/late' if self.overdue else ''}"


@final
class Uploader:
    """The uploads to one further tier.

    Concurrency: `start`, `stop`, `interrupt`, `abandon`, `join` and `release` on the main thread.

    Attributes:
        upload: the option.
        line: the due checkpoints.
        failure: why the last one was not uploaded, until that is raised.
        ending: whether the run is about to end.

    Args:
        upload: the option.
        target: the tier.
        context: of the job.
        durable: the tier's owner; None on all ranks but the coordinator.
    """

    def __init__(
        self, upload: Upload, target: Storage, context: UploadContext, durable: DurableRoot | None
    ) -> None:
        self.upload = upload
        self.line = UploadLine(upload.when_busy)
        self.failure: UploadError | None = None
        self.ending = False
        self._target = target
        self._context = context
        self._durable = durable
        self._channel: CommitChannel | None = None
        self._stopped = threading.Event()
        self._abandoned = threading.Event()
        self._interrupted = False
        self._running: Transfer | None = None
        self._hanging: Transfer | None = None
        # A daemon: the process must be able to end while storage hangs.
        self._thread = threading.Thread(target=self._loop, name="ckpt-upload", daemon=True)

    def start(self) -> None:
        """Begin to serve the line."""
        self._channel = self._context.open_channel()
        self._thread.start()

    def stop(self) -> None:
        """Leave what is not uploaded yet to the next run."""
        self._stopped.set()
        if self._running is not None:
            self._running.stop()
        self.line.close()

    def interrupt(self) -> None:
        """Cancel requests under way, where the client of the tier can."""
        self._interrupted = True
        if self._durable is not None:
            self._durable.leave()
        self._target.interrupt()

    def abandon(self) -> None:
        """Let the thread end by itself, whenever it wakes up, without the other ranks."""
        self._abandoned.set()
        if (channel := self._channel) is not None:
            channel.close()

    def release(self) -> None:
        """Give the tier back; coordinator only."""
        if self._durable is not None:
            self._durable.release()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    @property
    def stopped(self) -> bool:
        """Whether the rest is left to the next run."""
        return self._stopped.is_set()

    @property
    def hangs(self) -> bool:
        """Whether an upload that was given up still hangs in storage."""
        return self._hanging is not None and not self._hanging.end(0)

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended; False if `seconds` pass before."""
        until = time.monotonic() + seconds
        self._thread.join(max(0.0, seconds))
        hanging = self._hanging
        return self.ended and (hanging is None or hanging.end(max(0.0, until - time.monotonic())))

    def _loop(self) -> None:
        if self._durable is not None:
            self._durable.tidy()
        while (due := self.line.next()) is not None:
            outcome: Outcome = None
            try:
                outcome = self._serve(_Turn(due=due, began_at=self._context.clock()))
            except Exception as error:
                _logger.exception("the upload of step %d to %s ended", due.info.step, self.upload.url)
                outcome = upload_error(due.info, self.upload.url, failure_text(error))
            self.line.done(left=outcome is None and self._stopped.is_set())
            due.report(outcome)
            self._context.note(None)
        if self._channel is not None:
            self._channel.close()
        if self._context.process is not None:
            self._context.process.close()
        if self._abandoned.is_set():
            self.release()

    def _serve(self, turn: _Turn) -> Outcome:
        """Upload one checkpoint; return once it is there, or is not going to be."""
        while True:
            try:
                return self._attempt(turn)
            except CheckpointError as error:
                if self._abandoned.is_set():
                    return None
                self._note_failure(turn, error)
                if self.ending and _is_lost(error):
                    self.stop()  # at the end of a process nobody brings the Store back
                if _is_lasting(error):
                    return self._report(turn, turn.problem)

    def _attempt(self, turn: _Turn) -> CheckpointInfo | None:
        """Make one attempt; return the checkpoint if it is there, None if it was left."""
        info, word = turn.due.info, self._hear(turn)
        if word is not None and word.overdue:
            self._report(turn, word.overdue)
            word = self._hear(turn)
        if word is None or self._abandoned.is_set():
            return None
        if word.name:
            if not self.hangs:
                self._hanging = None
            attributes = {"step": info.step, "name": info.name, "size_bytes": info.size_bytes}
            attributes |= {"rank": self._context.rank, "to": self.upload.url}
            with self._context.telemetry.span("upload", **attributes):
                end = self._copy_with_all(turn, word.name)
            if end is not End.COMMITTED:
                return None
        elif not word.there:
            return None
        _logger.info("step %d is in %s", info.step, self.upload.url)
        if self._durable is not None and word.name:
            self._durable.prune(info, lambda: not self._stopped.is_set())
        return info

    def _hear(self, turn: _Turn) -> _Verdict | None:
        """Return the coordinator's verdict; None if this rank waits no longer."""
        channel = self._connected
        while True:
            try:
                return channel.broadcast(
                    turn.topic,
                    partial(self._decide, turn),
                    deadline_seconds=self._context.deadline_seconds,
                )
            except DeadlineError:
                # The coordinator may be pruning; its word counts whenever it comes.
                if self._durable is not None:
                    raise
                if self._stopped.is_set() or self.line.is_waited_for:
                    return None

    def _decide(self, turn: _Turn) -> _Verdict:
        """Decide on the next attempt, after a pause if one has failed; coordinator only."""
        durable, info = self._owner, turn.due.info
        if (
            turn.problem
            and turn.is_spent(self._context.clock(), self.upload.deadline_seconds)
            and not turn.overdue
        ):
            # Before the tier is asked: while it is down, every later verdict is an error.
            return _Verdict(overdue=turn.problem)
        if turn.attempts:
            longest = min(_LONGEST_PAUSE, self._context.deadline_seconds / 4)
            self._context.pause(self._stopped, min(_SHORTEST_PAUSE * 2.0 ** (turn.attempts - 1), longest))
        if self._stopped.is_set():
            return _Verdict()
        if self.line.overtakes or (turn.overdue and self.line.is_waited_for):
            if turn.working:
                durable.drop(turn.working)
            return _Verdict()
        with described(info, self.upload.url, self._context.rank):
            # A user may have marked it since.
            if Catalog(self._context.source).find(name=info.name).bad is not None or not durable.take():
                return _Verdict()
            name = durable.begin(partial(self._copy, info), info)
            if name is None:
                return _Verdict(there=True)
            turn.working = self._copy(info, name).working
        return _Verdict(name=name)

    def _copy_with_all(self, turn: _Turn, name: str) -> End:
        info = turn.due.info
        attempt = Attempt(
            info,
            partial(refuse_hanging, self._hanging, partial(self._copy, info, name)),
            self.upload,
            self._context,
            commit=lambda copy: DurableRoot.commit(self._owner, copy),
        )
        self._running = attempt.transfer
        try:
            return attempt.run(self._connected, turn.topic, self._stopped.is_set)
        finally:
            self._running = None
            if not attempt.transfer.end(_STOPPED_SECONDS if self._stopped.is_set() else _END_SECONDS):
                self._hanging = self._hanging or attempt.transfer

    def _copy(self, info: CheckpointInfo, as_name: str) -> CheckpointCopy:
        return CheckpointCopy.of(self._context.source, self._target, info.name, as_name=as_name)

    @property
    def _owner(self) -> DurableRoot:
        if self._durable is None:
            raise CoordinationError("only the coordinator decides on uploads and commits them")
        return self._durable

    @property
    def _connected(self) -> CommitChannel:
        if self._channel is None:
            self._channel = self._context.open_channel()
        return self._channel

    def _note_failure(self, turn: _Turn, error: CheckpointError) -> None:
        """Note a failed attempt, with a warning at the first."""
        if isinstance(error, CoordinationError) and not isinstance(error, DeadlineError) and self._channel:
            self._channel.close()  # the Store may be gone, and another one in its place
            self._channel = None
        if not turn.attempts and not _is_lasting(error) and not self._interrupted:
            _logger.warning("an upload is tried again: %s", error)
        turn.attempts += 1
        if not isinstance(error, UploadError):
            error = upload_error(turn.due.info, self.upload.url, str(error))
        if not self._interrupted:  # else it is left, whatever a cancelled request says
            turn.problem = str(error)

    def _report(self, turn: _Turn, problem: str) -> UploadError:
        """Report, once and on every rank, that a checkpoint is not in the tier in time."""
        info = turn.due.info
        turn.overdue = True
        self.failure = error = UploadError(problem, step=info.step, name=info.name)
        self._context.telemetry.point("upload.failed", step=info.step, to=self.upload.url, error=problem)
        _logger.error("%s", error)
        turn.due.report(error)
        return error


def _is_lost(error: CheckpointError) -> bool:
    """Return whether the Store is gone."""
    awaited = error.awaited if isinstance(error, DeadlineError) else ()
    return isinstance(error, CoordinationError) and not (error.failures or awaited)


def _is_lasting(error: CheckpointError) -> bool:
    return isinstance(error, LASTING) or (isinstance(error, UploadError) and error.lasting)
