"""The right to write to a root, taken once, before the first byte, by the coordinator for all ranks."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Collection
from typing import final

from ckpt_core.commit import Lease, collect_orphans, quarantine
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.storage import Storage

_logger = logging.getLogger(__name__)


@final
class Ownership:
    """Holds the lease of a root, and the damaged checkpoints that this job may move out of its way.

    Concurrency: `take` and `release` on the main thread, `take` collective; `check` on any thread of the
    coordinator.
    """

    def __init__(self, storage: Storage, coordinator: Coordinator) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._lease: Lease | None = None
        self._taken = False
        self._damaged: set[str] = set()

    def take(self) -> None:
        """Claim the root, unless it is claimed already, and clear away what crashed saves left.

        Raises:
            ConfigError: the root cannot be written.
            RootBusyError: another live job writes to it.
        """
        if not self._taken:
            self._coordinator.once(self._acquire)
            self._taken = True

    def check(self) -> None:
        """Refuse to go on after another job has taken the root.

        Raises:
            RootBusyError: it has.
        """
        if self._lease is not None:
            self._lease.check()

    def clear_name(self, name: str) -> None:
        """`check`, and move a damaged checkpoint of that name aside."""
        self.check()
        if name in self._damaged:
            moved = quarantine(self._storage, name)
            _logger.warning("damaged %s/%s was moved to %s", self._storage.url, name, moved)
            self._damaged.discard(name)

    def note_damaged(self, names: Collection[str]) -> None:
        """Remember checkpoints that did not verify: a later save of the same name takes their place."""
        self._damaged |= set(names)

    def release(self) -> None:
        """Give the root back."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._taken = False

    def _acquire(self) -> None:
        try:
            self._storage.check_root()
            self._lease = Lease.acquire(self._storage, job=" ".join(sys.argv[:1]) or "python")
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {self._storage.url}: {error}. {_remedy(error)}"
            ) from error
        try:
            orphans = collect_orphans(self._storage, keep=())
        except OSError as error:
            # They only take space; the next job tries again.
            _logger.warning("what crashed saves left in %s was not removed: %s", self._storage.url, error)
            return
        if orphans:
            _logger.warning(
                "removed what crashed saves left in %s: %s", self._storage.url, ", ".join(orphans)
            )


def _remedy(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free space there, or choose another directory"
    return "Choose a directory this job may write to"
