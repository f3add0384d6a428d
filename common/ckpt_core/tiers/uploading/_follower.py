"""The threads that bring committed checkpoints to a further tier.

The coordinator's thread follows the root: it takes what is due, copies it, and commits it in the tier. The
training takes no part, and nobody waits for anybody. The other ranks hear of it by words over the job's
Store. Where each node has a disk of its own, the coordinator's word lets a rank of each send what
lies on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from typing_extensions import override

from ckpt_core.commit import Catalog
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, UploadError, failure_text
from ckpt_core.groups import holders
from ckpt_core.messages import message
from ckpt_core.tiers import CheckpointCopy
from ckpt_core.tiers.uploading._line import DueCheckpoint, Outcome
from ckpt_core.tiers.uploading._sender import (
    FOREVER,
    LASTING,
    Ranks,
    Sender,
    StoppedError,
    TierThread,
    upload_error,
)
from ckpt_core.tiers.uploading._tier_root import TierRoot
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_SHORTEST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 60.0
_MOST_DOUBLINGS: Final = 10


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _UploadWord:
    """What the coordinator says of an upload.

    Attributes:
        save_id: of the checkpoint; "" when nothing more is said.
        ended: whether nothing more happens to it.
        there: whether it is in the tier.
        problem: why it is late, or will not be there.
        source: its name in the root, if disks are to send files of it.
        name: its name in the tier.
        shares: for each disk the paths to send.
    """

    save_id: str = ""
    ended: bool = False
    there: bool = False
    problem: str = ""
    source: str = ""
    name: str = ""
    shares: Sequence[Sequence[str]] = ()


@final
class Follower(TierThread):
    """Uploads what is due to one further tier; on the coordinator.

    Args:
        sender: of this process.
        root: the tier.
        ranks: the others.
        note: called with a copy and the bytes done, or with None when an upload has ended.
    """

    def __init__(
        self,
        sender: Sender,
        root: TierRoot,
        ranks: Ranks,
        note: Callable[[CheckpointCopy | None, int], None],
    ) -> None:
        super().__init__(sender, ranks)
        self._root = root
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
                outcome = self._tell(due, str(upload_error(due.info, self.upload.url, failure_text(error))))
            self.line.done(due, left=outcome is None and self.sender.stopped.is_set())
            due.report(outcome)
            self._note(None, 0)
            there = isinstance(outcome, CheckpointInfo)
            self._say(_UploadWord(save_id=due.info.save_id, ended=True, there=there))
        self._say(_UploadWord())
        self._hang_up()
        self.sender.close()
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
        longest = min(_LONGEST_PAUSE, self._ranks.deadline_seconds / 4)
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
            self.pause(self.sender.stopped, min(_SHORTEST_PAUSE * 2.0**attempts, longest))
            attempts = min(attempts + 1, _MOST_DOUBLINGS)
        return None

    def _gives_way(self, *, late: bool) -> bool:
        """Return whether what was begun is left, or dropped for a newer checkpoint."""
        if self.sender.stopped.is_set():
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
        if isinstance(error, StoppedError) or self.sender.stopped.is_set() or (lost and self.ending):
            self.stop()  # whatever a cancelled request says
            return ""
        if isinstance(error, UploadError):
            return str(error)
        text = str(error) if isinstance(error, CheckpointError) else f"rank 0: {failure_text(error)}"
        return str(upload_error(info, self.upload.url, text))

    def _attempt(self, info: CheckpointInfo) -> CheckpointInfo | None:
        """Make one attempt; return the checkpoint if it is there, None if it is left."""
        # A user may have marked it since.
        if Catalog(self.sender.source).find(name=info.name).bad is not None or not self._root.take():
            return None
        copy = self.sender.copy(info.name, info.name)
        begun = self._root.begin(copy, info)
        if begun:
            self._working = copy.working
            self._bring(copy)
            self._root.commit(copy)
        _logger.info("step %d is in %s", info.step, self.upload.url)
        if begun:
            self._root.prune(info, lambda: not self.sender.stopped.is_set())
        return info

    def _bring(self, copy: CheckpointCopy) -> None:
        """Bring all files to the tier, those on disks of other nodes by their ranks."""
        files, source = copy.manifest.files, self.sender.source
        own, note = files, partial(self._note, copy)
        note(0)
        if source.num_disks == 1:
            self._send(copy, own, note)
            return
        disks = holders(source, copy.source_name, files)
        shares = [
            [entry for entry, disk in zip(files, disks, strict=True) if max(disk, 0) == number]
            for number in range(source.num_disks)
        ]
        self._say(
            _UploadWord(
                save_id=copy.manifest.save_id,
                source=copy.source_name,
                name=copy.name,
                shares=[[entry.path for entry in share] for share in shares],
            )
        )
        if self._unsaid:
            raise CoordinationError(
                "the job's store is gone: nothing can be sent from the disks of other nodes"
            )
        problem: Exception | None = None
        try:
            self._send(copy, shares[0], note)
        except Exception as error:  # noqa: BLE001 - raised on every rank
            problem = error
        self._meet(problem)

    def _tell(self, due: DueCheckpoint, problem: str) -> UploadError:
        """Report on every rank that a checkpoint is not in the tier in time."""
        error = self.report(due, problem)
        self._say(_UploadWord(save_id=due.info.save_id, problem=problem))
        return error

    def _say(self, word: _UploadWord) -> None:
        """Say this, after what could not be said before."""
        self._unsaid.append(word)
        try:
            while self._unsaid:
                self._channel.broadcast(
                    str(self._words), partial(self._unsaid.__getitem__, 0), deadline_seconds=FOREVER
                )
                self._words += 1
                del self._unsaid[0]
        except CoordinationError as error:
            self._hang_up()
            _logger.warning("other ranks do not hear how uploads to %s end: %s", self.upload.url, error)


@final
class UploadListener(TierThread):
    """Hears how uploads end, and sends the files of a disk; on all other ranks.

    Args:
        sender: of this process.
        ranks: the others.
        disk: the number of the disk whose files this rank sends; None for none.
    """

    def __init__(self, sender: Sender, ranks: Ranks, disk: int | None) -> None:
        super().__init__(sender, ranks)
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
        self.sender.close()
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
                    str(self._words), _UploadWord, deadline_seconds=self._ranks.deadline_seconds
                )
            except DeadlineError:
                continue  # it may be pruning; its word counts whenever it comes
            except CoordinationError as error:
                self._hang_up()
                if self.ending or self.sender.stopped.wait(_LONGEST_PAUSE / 4):
                    _logger.warning("how uploads to %s end is not known here: %s", self.upload.url, error)
                    return None
            else:
                self._words += 1
                return word
        return None

    def _send_share(self, word: _UploadWord) -> None:
        problem: Exception | None = None
        try:
            if self._disk is not None and (paths := set(word.shares[self._disk])):
                copy = self.sender.copy(word.source, word.name)
                share = [entry for entry in copy.manifest.files if entry.path in paths]
                self._send(copy, share, lambda _: None)
        except Exception as error:  # noqa: BLE001 - the coordinator reports it
            problem = error
        try:
            self._meet(problem)
        except CheckpointError as error:
            _logger.debug("the upload to %s is not complete: %s", self.upload.url, error)


def _is_lasting(error: Exception) -> bool:
    if isinstance(error, CoordinationError):
        lasting = {kind.__name__ for kind in LASTING}
        return any(cause.kind in lasting for cause in error.causes.values())
    return isinstance(error, LASTING) or (isinstance(error, UploadError) and error.lasting)
