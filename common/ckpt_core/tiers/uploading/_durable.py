"""The root of a further tier, as its owner sees it: the coordinator of the job."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, final

from ckpt_core.commit import abandon
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
        spared: names of unfinished uploads that may be continued.
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
        self._storage = storage
        self._upload = upload
        self._reads_back = storage.supports_rename and options.verification != "off"
        self._patience_seconds = options.deadline_seconds / 2
        self._ownership = Ownership(
            storage,
            Solo(),
            job_name=options.job_name,
            until_idle=until_idle,
            hooks=OwnerHooks(spared=lambda: spared),
        )
        kept = replace(options, keep=upload.keep, upload=None)
        self._pruner = Pruner(storage, kept, ownership=self._ownership, telemetry=telemetry)

    def take(self) -> None:
        """Claim the tier, unless claimed already, and remove what nobody will continue.

        Raises:
            ConfigError: it cannot be written.
            OSError: it cannot be reached, and may be later.
            RootBusyError: another job uploads there.
        """
        try:
            self._ownership.take()
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and _is_passing(error.__cause__):
                raise error.__cause__ from None
            raise

    def check(self) -> None:
        """Refuse to continue after another job has taken the tier; see `Ownership.check`."""
        self._ownership.check()

    def content(self) -> Sequence[CheckpointInfo]:
        """Claim the tier, return its checkpoints; none while it cannot be reached.

        Raises:
            ConfigError: see `take`.
            RootBusyError: see `take`.
        """
        try:
            self.take()
            return self._ownership.inventory.survey().everything
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            _logger.warning("%s cannot be reached, uploads are tried later: %s", self._upload.url, error)
            return ()

    def begin(self, copy_as: Callable[[str], CheckpointCopy], info: CheckpointInfo) -> str | None:
        """Prepare a copy; return its name, or None if the checkpoint is there already.

        Where its own name belongs to another checkpoint, as after training went back, it gets one of its
        lineage.
        """
        self.check()
        try:
            return info.name if copy_as(info.name).begin() else None
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
            _logger.warning("the unfinished %s/%s was not removed: %s", self._storage.url, working, error)

    def release(self) -> None:
        """Give the tier back."""
        self._ownership.release()


def _is_passing(error: OSError) -> bool:
    """Return whether a tier that could not be claimed may be there later."""
    wrong = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | CheckpointError)
    return not wrong and error.errno not in _WRONG
