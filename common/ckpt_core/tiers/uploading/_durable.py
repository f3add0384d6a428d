"""The root of a further tier, as its owner sees it: the coordinator of the job."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, final

from ckpt_core.commit import Survey, abandon
from ckpt_core.coordination import Solo
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointExistsError, ConfigError
from ckpt_core.names import run_name
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.root import OwnerHooks, Ownership, Pruner
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.tiers import CheckpointCopy
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_WRONG: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ENOSPC}
"""Errors that waiting does not cure; others are of a service that is down for a while."""


@final
class DurableRoot:
    """The right to a further tier, its content and its retention. Coordinator only.

    Concurrency: one thread at a time.

    Args:
        upload: the option.
        storage: the tier.
        options: of the manager.
        telemetry: receives spans of removals.
        until_idle: stops the upload, for a later manager of this process that takes the tier over.
    """

    def __init__(
        self,
        upload: Upload,
        storage: Storage,
        options: CheckpointOptions,
        *,
        telemetry: Telemetry,
        until_idle: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._upload = upload
        self._spared: Collection[str] = ()
        self._reads_back = storage.supports_rename and options.verification != "off"
        self._patience_seconds = options.deadline_seconds / 2
        self._ownership = Ownership(
            storage,
            Solo(),
            job_name=options.job_name,
            until_idle=until_idle,
            hooks=OwnerHooks(spared=lambda: self._spared),
        )
        kept = replace(options, keep=upload.keep, upload=None)
        self._pruner = Pruner(storage, kept, ownership=self._ownership, telemetry=telemetry)

    def take(self, spared: Collection[str]) -> None:
        """Claim the tier, unless claimed already, and remove what nobody will continue.

        Args:
            spared: names of uploads that will be continued.

        Raises:
            ConfigError: it cannot be written; `is_passing` tells whether that may change.
            RootBusyError: another job uploads there.
        """
        self._spared = spared
        self._ownership.take()

    def check(self) -> None:
        """Refuse to continue after another job has taken the tier; see `Ownership.check`."""
        self._ownership.check()

    def survey(self) -> Survey:
        """Return the checkpoints that are there."""
        return self._ownership.inventory.survey()

    def begin(self, copy_as: Callable[[str | None], CheckpointCopy], info: CheckpointInfo) -> str | None:
        """Prepare the copy of a checkpoint; return its name there, None if it is there already.

        Where its own name belongs to another checkpoint, as after training went back, it gets one of its
        lineage.
        """
        self.check()
        try:
            return info.name if copy_as(None).begin() else None
        except CheckpointExistsError:
            other = run_name(info.name, info.lineage.id)
            if not info.lineage.id or other == info.name:
                raise
            return other if copy_as(other).begin() else None

    def commit(self, copy: CheckpointCopy) -> CheckpointInfo:
        """Commit a copy, of which every rank's files are there."""
        info = copy.finish(check=self.check)
        self._ownership.inventory.note_written(info)
        if not self._reads_back:
            # The service has compared what it stored, and reading it back may cost money.
            self._ownership.soundness.vouch(info)
        return info

    def prune(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> None:
        """Apply the retention of the tier, after the commit of `info` there."""
        if self._upload.keep is None:
            return
        deadline = time.monotonic() + self._patience_seconds
        try:
            self._pruner.apply(newest=info.step, go_on=lambda: go_on() and time.monotonic() < deadline)
        except (OSError, CheckpointError) as error:
            _logger.warning("old checkpoints in %s were not all removed: %s", self._storage.url, error)

    def drop(self, working: str) -> None:
        """Remove what an upload has left that nobody will continue."""
        try:
            self.check()
            abandon(self._storage, working)
            self._storage.abandon_uploads(lambda key: key.partition("/")[0] == working)
        except (OSError, CheckpointError) as error:
            _logger.warning("what is left of %s/%s was not removed: %s", self._storage.url, working, error)

    def release(self) -> None:
        """Give the tier back."""
        self._ownership.release()


def is_passing(error: ConfigError) -> bool:
    """Return whether a tier that could not be claimed may be there later."""
    cause = error.__cause__
    wrong = isinstance(cause, FileNotFoundError | PermissionError | NotADirectoryError)
    return isinstance(cause, OSError) and not wrong and cause.errno not in _WRONG
