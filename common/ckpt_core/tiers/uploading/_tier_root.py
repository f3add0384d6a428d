"""The root of a further tier, as its owner sees it: the coordinator of the job."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, final

from ckpt_core.commit import Owner, Survey, abandon, working_name
from ckpt_core.coordination import Solo
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, RootBusyError, UploadError, failure_text
from ckpt_core.names import WRITER, run_name
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.retention import keeps_weights
from ckpt_core.root import OwnerHooks, Ownership, Pruner
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import Asked, CheckpointCopy, Rows, ask
from ckpt_core.tiers.uploading._demotions import demoter_of
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)

_WRONG: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ENOSPC}
"""Errors that waiting does not cure; others are of a service that is down for a while."""


@final
class TierRoot:
    """The right to a further tier, its content and its retention. Coordinator only.

    `until_idle` stops the upload, for a later manager of this process that takes the tier over. `spared` are
    names of unfinished uploads that may be continued; `refusal` is why the last try was refused, if it was.

    Concurrency: `take` and `release` on any thread, one at a time; the others on the thread that uploads.
    """

    def __init__(
        self,
        upload: Upload,
        storage: Storage,
        options: CheckpointOptions,
        *,
        telemetry: Telemetry,
        until_idle: Callable[[], None],
        spared: Collection[str],
    ) -> None:
        self.url = upload.url
        self.taken = False
        self.refusal: CheckpointError | None = None
        self._guard = threading.Lock()
        self._leaving = False
        self._found: Survey | None = None
        self._dropped = self._spared = frozenset(spared)
        self.storage = storage
        self._keeps = upload.keep is not None
        self._reads_back = storage.supports_rename and options.verification != "off"
        self._patience_seconds = options.deadline_seconds / 2
        self._ownership = Ownership(
            storage,
            Solo(),
            until_idle=until_idle,
            hooks=OwnerHooks(spared=lambda: self._spared),
            elsewhere=self._note_found,
        )
        kept = replace(options, save=None, keep=upload.keep, upload=None)
        demoter = None
        if keeps_weights(upload.keep):
            demoter = demoter_of(storage, upload.storage_options, options.manifest_signer)
        self._pruner = Pruner(storage, kept, ownership=self._ownership, telemetry=telemetry, demoter=demoter)
        self._asked: Asked[Survey] | None = None

    def ask(self) -> Asked[Survey]:
        """Claim and list the tier on a thread of its own."""
        self._asked = ask(self._open)
        return self._asked

    @property
    def everything(self) -> Sequence[CheckpointInfo]:
        """What was found there; nothing if it is not claimed yet."""
        answer = None if self._asked is None else self._asked.answer
        known = answer is not None and answer.done() and answer.exception() is None
        return answer.result().everything if answer is not None and known else ()

    def take(self) -> bool:
        """Claim the tier, unless claimed already, and remove what nobody will continue.

        False if it is about to be given back.

        Raises:
            ConfigError: it cannot be written.
            OSError: it cannot be reached, and may be later.
            RootBusyError: another job uploads there.
        """
        with self._guard:
            if self._leaving:
                return False
            try:
                self._ownership.take()
            except ConfigError as error:
                cause = error.__cause__
                wrong = FileNotFoundError | PermissionError | NotADirectoryError | CheckpointError
                if isinstance(cause, OSError) and not isinstance(cause, wrong) and cause.errno not in _WRONG:
                    raise cause from None
                self.refusal = error
                raise
            except CheckpointError as error:
                self.refusal = error
                raise
            except OSError:
                self.refusal = None
                raise
            self.taken, self.refusal = True, None
            return True

    def continues(self, due: Sequence[CheckpointInfo]) -> None:
        """Note what this run uploads of what was left."""
        going = {working_name(self.storage, info.name, info.save_id) for info in due}
        self._dropped = self._spared - going - {info.name for info in self.everything}

    def tidy(self) -> None:
        """Remove unfinished uploads that this run does not continue; a claimed tier only."""
        try:
            left = self._dropped & self.storage.directories("") if self._dropped and self.taken else ()
        except OSError as error:
            _logger.warning("%s was not searched for unfinished uploads: %s", self.url, failure_text(error))
            return
        for working in left:
            self.drop(working)

    def begin(self, copy: CheckpointCopy, info: CheckpointInfo) -> bool:
        """Prepare a copy; False if the checkpoint is there already.

        Where its own name belongs to another checkpoint, as after training went back, it gets one of its
        lineage.
        """
        self._check(reclaim=True)
        begun = copy.begin(otherwise=run_name(info.name, info.lineage.id) if info.lineage.id else "")
        if copy.name != info.name:
            _logger.info("%s has %s already, so that it is uploaded as %s", self.url, info.name, copy.name)
        return begun

    def commit(self, copy: CheckpointCopy, rows: Rows, sign: Callable[[bytes], bytes] | None) -> None:
        """Commit a copy, of which every file is there; see `CheckpointCopy.finish`."""
        info = copy.finish(rows, sign=sign, check=self._check)
        self._ownership.inventory.note_written(info)
        if not self._reads_back:
            # The service has compared what it stored, and reading it back may cost money.
            self._ownership.inventory.vouch(info)

    def prune(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> None:
        """Apply the retention of the tier, after the commit of `info` there."""
        if not self._keeps:
            return
        deadline = time.monotonic() + self._patience_seconds
        try:
            self._pruner.apply(
                newest=info.step, go_on=lambda: go_on() and time.monotonic() < deadline, until=deadline
            )
        except (OSError, CheckpointError) as error:
            _logger.warning("old checkpoints in %s were not all removed: %s", self.storage.url, error)

    def drop(self, working: str) -> None:
        """Remove what an upload has left that nobody will continue."""
        try:
            self._check()
            abandon(self.storage, working)
            self.storage.abandon_uploads(lambda key: key.partition("/")[0] == working)
        except (OSError, CheckpointError) as error:
            _logger.warning("the unfinished %s/%s was not removed: %s", self.storage.url, working, error)

    def leave(self) -> None:
        """Begin no claim any more; `release` follows."""
        self._leaving = True

    def release(self) -> None:
        """Give the tier back; waits for a claim under way."""
        self.leave()
        self._pruner.close()
        with self._guard:
            self._ownership.release()

    def _check(self, *, reclaim: bool = False) -> None:
        """Refuse to continue after another job has taken the tier.

        At the begin of an attempt only, a claim that somebody has removed is made again.
        """
        try:
            self._ownership.check(reclaim=reclaim)
        except RootBusyError as error:
            taker = Owner.of(self.storage)
            if taker is None and not self.storage.exists(WRITER):
                raise UploadError(f"{self.url}/{WRITER} was removed during the upload") from error
            raise RootBusyError(
                f"{self.url} was taken over by {taker or 'another job, whose claim cannot be read'}: this "
                "job uploads nothing there any more; its saves go on. If this is the job that should "
                "upload, stop the other one and restart this one"
            ) from error

    def _open(self) -> Survey:
        if not self.take():
            raise UploadError(f"the uploads to {self.url} have ended")
        found, self._found = self._found, None
        return found or self._ownership.inventory.survey()

    def _note_found(self, survey: Survey) -> tuple[Sequence[CheckpointInfo], Lineage]:
        """Keep what was found at the claim; no other tier counts here."""
        self._found = survey
        return (), survey.lineage
