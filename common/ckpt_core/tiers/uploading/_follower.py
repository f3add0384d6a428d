"""The threads that bring committed checkpoints to a further tier.

The coordinator's thread follows the root: it takes what is due, copies it, and commits it in the tier. The
training takes no part, and nobody waits for anybody. The other ranks hear of it by words over the job's
Store. Where each node has a disk of its own, the coordinator's word lets a rank of each send what lies on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, final

from typing_extensions import override

from ckpt_core.commit import Catalog
from ckpt_core.coordination import CommitChannel
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    DeadlineError,
    IncompatibleCheckpointError,
    RootBusyError,
    UploadError,
    failure_text,
)
from ckpt_core.groups import holders
from ckpt_core.messages import message
from ckpt_core.options import Upload
from ckpt_core.storage import Storage, Throttle
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import (
    CheckpointCopy,
    Choices,
    CopyProcess,
    CopyTerms,
    Rows,
)
from ckpt_core.tiers.uploading._due import DueCheckpoint, Outcome, UploadLine
from ckpt_core.tiers.uploading._tier_root import TierRoot
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_LASTING: Final = (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
)
"""Errors that another try would meet again."""
_SHORTEST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 60.0
_MOST_DOUBLINGS: Final = 10
_FOREVER: Final = 1e7
"""Seconds: files of any size may be on their way, and the end of the run ends the wait for them."""


class StoppedError(CheckpointError):
    """The upload was stopped; a later one continues it."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _UploadWord:
    """What the coordinator says of an upload.

    Attributes:
        save_id: of the checkpoint; "" when nothing more is said.
        problem: why it is late, or will not be there.
        source: its name in the root, if disks are to send files of it.
        content: its manifest.
        choices: how they are compressed, if at all.
    """

    save_id: str = ""
    ended: bool = False
    there: bool = False
    problem: str = ""
    source: str = ""
    name: str = ""
    shares: Sequence[Sequence[str]] = ()
    content: bytes = b""
    choices: Choices = field(default_factory=dict[str, str])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadJob:
    """What the threads of uploads know of the job."""

    source: Storage
    rank: int
    open_channel: Callable[[], CommitChannel]
    deadline_seconds: float
    telemetry: Telemetry
    sign: Callable[[str, bytes], bytes] | None = None


class TierThread:
    """A thread that brings checkpoints to one tier, or hears how they get there.

    Attributes:
        stopped: whether what is not there yet is left to the next run.
        failure: why the last one was not uploaded, until that is raised.
        ending: whether the run is about to end.
    """

    def __init__(self, target: Storage, upload: Upload, job: UploadJob) -> None:
        self.upload = upload
        self.line = UploadLine(upload.when_busy)
        self.stopped = threading.Event()
        self.failure: UploadError | None = None
        self.ending = False
        self._source, self._target, self._job = job.source, target, job
        self._process = CopyProcess.between(job.source, target, upload, deadline_seconds=job.deadline_seconds)
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
        self.stopped.set()
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
        self._end_process()
        self._target.interrupt()

    def release(self) -> None:
        """Give the tier back."""

    def report(self, due: DueCheckpoint, problem: str) -> UploadError:
        """Report that a checkpoint is not in the tier in time."""
        info = due.info
        self.failure = error = UploadError(problem, step=info.step, name=info.name)
        self._job.telemetry.point("upload.failed", step=info.step, to=self.upload.url, error=problem)
        _logger.error("%s", error)
        due.report(error)
        return error

    @property
    def _channel(self) -> CommitChannel:
        if self._opened is None:
            self._opened = self._job.open_channel()
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

    def _terms(self, progress: Callable[[int], None] = lambda _: None) -> CopyTerms:
        rate = self.upload.bytes_per_second
        return CopyTerms(
            pace=None if rate is None else Throttle(rate, sleep=self.stopped.wait),
            bytes_per_second=rate,
            compress=self.upload.compress,
            progress=progress,
            stop=self._raise_if_stopped,
        )

    def _send(self, copy: CheckpointCopy, paths: Sequence[str], progress: Callable[[int], None]) -> Rows:
        """Copy files, in a process of its own where that pays."""
        wanted, terms, process = set(paths), self._terms(progress), self._process
        entries = [entry for entry in copy.entries if entry.path in wanted]
        attributes = {"step": copy.manifest.step, "name": copy.source_name, "to": self.upload.url}
        attributes |= {"rank": self._job.rank, "size_bytes": sum(entry.size_bytes for entry in entries)}
        with self._job.telemetry.span("upload", **attributes):
            rows = None if process is None else process.copy_files(copy, entries, terms)
            return copy.copy_files(entries, terms) if rows is None else rows

    def _raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise StoppedError("the upload was stopped")

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()

    def _meet(self, work: Callable[[], Rows]) -> Sequence[Rows]:
        """Work, and wait until every disk has; return or raise what came of it."""
        return self._channel.commit_barrier(
            f"{self._words}/sent", _outcome(work), list, deadline_seconds=_FOREVER
        )


def _outcome(work: Callable[[], Rows]) -> Rows | BaseException:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return error


@final
class Follower(TierThread):
    """Uploads what is due to one further tier; on the coordinator.

    `note` is called with a copy and the bytes done, or with None when an upload has ended.
    """

    def __init__(
        self,
        tier: TierRoot,
        upload: Upload,
        job: UploadJob,
        note: Callable[[CheckpointCopy | None, int], None],
    ) -> None:
        super().__init__(tier.storage, upload, job)
        self._root = tier
        self._note = note
        self._unsaid: list[_UploadWord] = []
        self._working = ""
        self.clock: Callable[[], float] = time.monotonic
        self.pause: Callable[[threading.Event, float], object] = threading.Event.wait

    @override
    def run(self) -> None:
        give_way()
        self._root.tidy()
        while (due := self.line.next()) is not None:
            try:
                outcome = self._serve(due)
            except Exception as error:
                _logger.exception("the upload of step %d to %s ended", due.info.step, self.upload.url)
                outcome = self._tell(due, str(_upload_error(due.info, self.upload.url, failure_text(error))))
            self.line.done(due, left=outcome is None and self.stopped.is_set())
            due.report(outcome)
            self._note(None, 0)
            there = isinstance(outcome, CheckpointInfo)
            self._say(_UploadWord(save_id=due.info.save_id, ended=True, there=there))
        self._say(_UploadWord())
        self._hang_up()
        self.stopped.set()
        self._end_process()
        if self._abandoned:
            self.release()

    @override
    def interrupt(self) -> None:
        self._root.leave()
        super().interrupt()

    @override
    def release(self) -> None:
        self._root.release()

    def _serve(self, due: DueCheckpoint) -> Outcome:
        """Upload one checkpoint; return once it is there, or is not going to be."""
        began, attempts, late = self.clock(), 0, False
        longest = min(_LONGEST_PAUSE, self._job.deadline_seconds / 4)
        self._working = ""
        while not self._gives_way(late=late):
            try:
                return self._attempt(due.info)
            except (CheckpointError, OSError) as error:
                problem, lasting = self._problem(due.info, error), _is_lasting(error)
            if not problem:
                break
            if lasting:
                return self._tell(due, problem)
            if not attempts:
                _logger.warning("an upload is tried again: %s", problem)
            if not late and self.clock() - began >= self.upload.deadline_seconds:
                late = True
                self._tell(due, problem)
            self.pause(self.stopped, min(_SHORTEST_PAUSE * 2.0**attempts, longest))
            attempts = min(attempts + 1, _MOST_DOUBLINGS)
        return None

    def _gives_way(self, *, late: bool) -> bool:
        """Return whether what was begun is left, or dropped for a newer checkpoint."""
        if self.stopped.is_set():
            return True
        overtaken = self.line.overtakes or (late and self.line.is_waited_for)
        if overtaken and self._working:
            self._root.drop(self._working)
        return overtaken

    def _problem(self, info: CheckpointInfo, error: Exception) -> str:
        """Return why an attempt has failed; "" if the upload is left."""
        lost = isinstance(error, CoordinationError) and not error.failures
        if lost:
            self._hang_up()  # the Store may be gone, and another one in its place
        if isinstance(error, StoppedError) or self.stopped.is_set() or (lost and self.ending):
            self.stop()  # whatever a cancelled request says
            return ""
        if isinstance(error, UploadError):
            return str(error)
        text = str(error) if isinstance(error, CheckpointError) else f"rank 0: {failure_text(error)}"
        return str(_upload_error(info, self.upload.url, text))

    def _attempt(self, info: CheckpointInfo) -> CheckpointInfo | None:
        """Make one attempt; return the checkpoint if it is there, None if it is left."""
        # A user may have marked it since.
        if Catalog(self._source).find(name=info.name).bad is not None or not self._root.take():
            return None
        copy = CheckpointCopy.of(self._source, self._target, info.name)
        sign = None if self._job.sign is None else partial(self._job.sign, info.name)
        own = set(self._shares(copy)[0])
        share = [entry for entry in copy.manifest.files if entry.path in own]
        copy = copy.chosen(share, replace(self._terms(), sign=sign))
        begun = self._root.begin(copy, info)
        if begun:
            self._working = copy.working
            rows = self._bring(copy)
            self._root.commit(copy, rows, sign)
        _logger.info("step %d is in %s", info.step, self.upload.url)
        if begun:
            self._root.prune(info, lambda: not self.stopped.is_set())
        return info

    def _shares(self, copy: CheckpointCopy) -> Sequence[Sequence[str]]:
        """Return the files that lie on each disk of the root."""
        files, source = copy.entries, self._source
        if source.num_disks == 1:
            return [[entry.path for entry in files]]
        disks = holders(source, copy.source_name, files)
        return [
            [entry.path for entry, disk in zip(files, disks, strict=True) if max(disk, 0) == number]
            for number in range(source.num_disks)
        ]

    def _bring(self, copy: CheckpointCopy) -> Rows:
        """Bring all files to the tier, those on disks of other nodes by their ranks."""
        note, shares = partial(self._note, copy), self._shares(copy)
        note(0)
        send = partial(self._send, copy, shares[0], note)
        if len(shares) == 1:
            return send()
        self._say(
            _UploadWord(
                save_id=copy.manifest.save_id,
                source=copy.source_name,
                name=copy.name,
                shares=shares,
                content=copy.content,
                choices=copy.choices,
            )
        )
        if self._unsaid:
            raise CoordinationError(
                "the job's store is gone: nothing can be sent from the disks of other nodes"
            )
        return {path: row for rows in self._meet(send) for path, row in rows.items()}

    def _tell(self, due: DueCheckpoint, problem: str) -> UploadError:
        """Report on every rank that a checkpoint is not in the tier in time."""
        error = self.report(due, problem)
        self._say(_UploadWord(save_id=due.info.save_id, problem=problem))
        return error

    def _say(self, word: _UploadWord) -> None:
        """Say this, after what could not be said before."""
        if self._abandoned:
            return  # the Store may hang, and the tier is to be given back
        self._unsaid.append(word)
        try:
            while self._unsaid:
                self._channel.broadcast(
                    str(self._words), partial(self._unsaid.__getitem__, 0), deadline_seconds=_FOREVER
                )
                self._words += 1
                del self._unsaid[0]
        except CoordinationError as error:
            self._hang_up()
            _logger.warning("other ranks do not hear how uploads to %s end: %s", self.upload.url, error)


@final
class UploadListener(TierThread):
    """Hears how uploads end, and sends the files of a disk; on all other ranks.

    `disk` is the number of the disk whose files this rank sends; None for none.
    """

    def __init__(self, target: Storage, upload: Upload, job: UploadJob, disk: int | None) -> None:
        super().__init__(target, upload, job)
        self._disk = disk

    @override
    def run(self) -> None:
        give_way()
        early: list[_UploadWord] = []  # of saves whose commit is not known here yet
        while True:
            self.line.await_any()  # a rank that waits asks the Store again and again
            early = [word for word in early if not self._act(word)]
            if not self.line.is_waited_for and not self.line.closed:
                continue
            word = self._hear()
            if word is None or not word.save_id:
                break
            if word.name:
                self._send_share(word)
            else:
                early.append(word)
        for word in early:
            self._act(word)
        self.line.close()
        self._hang_up()
        self.stopped.set()
        self._end_process()
        while (due := self.line.next()) is not None:
            self.line.done(due)
            due.report(None)

    @override
    def wait(self, seconds: float) -> bool:
        return self.join(seconds) if self.line.closed else super().wait(seconds)

    def _act(self, word: _UploadWord) -> bool:
        """Note a word on a checkpoint; False if it is not due here yet."""
        due = self.line.find(word.save_id)
        if due is not None and word.problem:
            self.report(due, word.problem)
        if due is not None and word.ended:
            self.line.done(due)
            due.report(due.info if word.there else None)
        return due is not None

    def _hear(self) -> _UploadWord | None:
        """Wait for the next word; None if there will be none."""
        while not self._abandoned:
            try:
                word = self._channel.broadcast(
                    str(self._words), _UploadWord, deadline_seconds=self._job.deadline_seconds
                )
            except DeadlineError:
                continue  # it may be pruning; its word counts whenever it comes
            except CoordinationError as error:
                self._hang_up()
                if self.ending or self.stopped.wait(_LONGEST_PAUSE / 4):
                    _logger.warning("how uploads to %s end is not known here: %s", self.upload.url, error)
                    return None
            else:
                self._words += 1
                return word
        return None

    def _send_share(self, word: _UploadWord) -> None:
        def work() -> Rows:
            if self._disk is None or not (paths := word.shares[self._disk]):
                return {}
            copy = CheckpointCopy.again(
                self._source,
                self._target,
                word.source,
                word.content,
                as_name=word.name,
                choices=word.choices,
            )
            return self._send(copy, paths, lambda _: None)

        try:
            self._meet(work)
        except CheckpointError as error:
            _logger.debug("the upload to %s is not complete: %s", self.upload.url, error)


def _is_lasting(error: Exception) -> bool:
    if isinstance(error, CoordinationError):
        lasting = {kind.__name__ for kind in _LASTING}
        return any(cause.kind in lasting for cause in error.causes.values())
    return isinstance(error, _LASTING) or (isinstance(error, UploadError) and error.lasting)


def _upload_error(info: CheckpointInfo, url: str, problem: str) -> UploadError:
    """Return the error of a checkpoint that is not in a tier."""
    return UploadError(f"step {info.step} is not in {url}: {problem}", step=info.step, name=info.name)
