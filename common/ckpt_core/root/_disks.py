"""The disks that make up the root of a job: one, or one of each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError
from ckpt_core.groups import GroupedStorage, form_groups
from ckpt_core.root._holdings import refuse_other_roots, sees_claim
from ckpt_core.storage import Storage

_logger = logger_of(__name__)


@final
class Disks:
    """The disks of a root, found when the job takes it.

    Concurrency: main thread.

    Args:
        storage: the root; spans the disks of all nodes after `find`, if there are several.
        coordinator: the ranks of the job.
    """

    def __init__(self, storage: Storage, coordinator: Coordinator) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._taken = ""

    def find(
        self,
        owner_id: str,
        urls: Sequence[str],
        *,
        claim: Callable[[Storage], None],
        survey: Callable[[], str],
    ) -> str:
        """Find the disks, and claim those of other nodes. Collective.

        With one shared disk that is one exchange.

        Args:
            owner_id: of the claim that the coordinator has just written to its root.
            urls: of every rank's root.
            claim: called on the coordinator with each further disk.
            survey: called on the coordinator in the end; reads the root.

        Returns:
            The result of `survey`, on every rank.

        Raises:
            ConfigError: ranks would write to different places, or cannot write.
            RootBusyError: another live job writes to the disk of a node.
        """
        coordinator, storage = self._coordinator, self._storage

        def decide(sees: list[bool]) -> list[str]:
            refuse_other_roots(sees, urls)
            return [survey() if all(sees) else ""] * len(sees)

        sees = sees_claim(storage, owner_id, urls, rank=coordinator.rank)
        found = coordinator.gather_scatter(sees, decide, what="comparing the roots")
        if found:
            return found
        assert isinstance(storage, GroupedStorage)
        self._taken, groups = owner_id, form_groups(storage, coordinator)
        if coordinator.is_coordinator:
            _logger.info("%s is a disk of its own for each of: %s", storage.url, groups)

        def claim_all() -> str:
            for part in storage.parts[1:]:
                claim(part)
            return survey()

        return coordinator.run_on_coordinator(claim_all, what="taking the disks of all nodes")

    def leave(self) -> None:
        """Let go of the disks of other nodes; the coordinator has released the root.

        Until it has, the other ranks wait: the lock on each disk is released there.
        """
        storage = self._storage
        if not isinstance(storage, GroupedStorage) or storage.num_disks == 1:
            return
        with suppress(CoordinationError):
            channel = self._coordinator.commit_channel()
            topic = f"leaving the disks of nodes ({self._taken})"
            channel.broadcast(topic, lambda: None, deadline_seconds=storage.patience_seconds)
        storage.leave()
