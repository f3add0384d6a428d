"""Which checkpoints are known to be whole, so that nothing older is deleted in favour of one that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias, final

from ckpt_core.commit._catalog import Catalog
from ckpt_core.commit._inventory import Inventory
from ckpt_core.commit._verify import share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_LEAST_AT_ONCE: Final = 1 << 30
_MOST_AT_ONCE: Final = 16 << 30
_STOPS: Final = 8

_Key: TypeAlias = tuple[str, str, float]


@final
class Soundness:
    """What this process has verified, to the last byte, and what it has found damaged.

    Concurrency: `droppable` on one thread at a time, the others on any.

    Args:
        storage: the root.
        mark: told the name of what is damaged, and what is wrong with it.
    """

    def __init__(self, storage: Storage, mark: Callable[[str, str], None]) -> None:
        self._storage = storage
        self._mark = mark
        self._whole: set[_Key] = set()
        self._damaged: dict[_Key, str] = {}
        self._shares_done: dict[_Key, int] = {}

    def vouch(self, info: CheckpointInfo) -> None:
        """It has been verified, or is to be taken for whole."""
        self._whole.add(_key(info))
        self._damaged.pop(_key(info), None)

    def learn(self, info: CheckpointInfo, problem: str) -> None:
        """It was verified elsewhere: mark it if there is a problem, else take a mark away.

        Raises:
            CheckpointError: the marks were written by a newer version.
            OSError: the marks cannot be written; what was found is known to this process all the same.
        """
        catalog = Catalog(self._storage)
        if not problem:
            self.vouch(info)
            if info.damaged is not None:
                catalog.unmark(info.name)
            return
        self._distrust(info, problem)
        with suppress(CheckpointNotFoundError, CorruptCheckpointError):  # then it counts for nobody as it is
            catalog.mark_damaged(info.name, problem)

    def _distrust(self, info: CheckpointInfo, problem: str) -> None:
        self._whole.discard(_key(info))
        self._damaged[_key(info)] = problem

    def droppable(
        self,
        inventory: Inventory,
        choose: Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]],
        *,
        go_on: Callable[[], bool] = lambda: True,
    ) -> Sequence[CheckpointInfo]:
        """What may be deleted of what `choose` would delete: nothing, if nothing that stays is whole.

        If none that stays and is of the present lineage is known to be whole, the newest of them are verified
        until one is. What is damaged is marked and counts for nothing, so that `choose` is asked again.

        Args:
            inventory: of the root.
            choose: what should go of a history; it must not count what is marked.
            go_on: asked from time to time while much is being read; if not, all stays for now.
        """
        while True:
            history = inventory.history()
            if self._damaged:
                history = [self._judged(info) for info in history]
            drop = choose(history)
            names = {info.name for info in drop}
            stays = [
                info for info in history if info.usable and not info.abandoned and info.name not in names
            ]
            if not drop or any(_key(info) in self._whole and inventory.still_there(info) for info in stays):
                return drop
            if not stays:
                return ()
            # What has been read in part before comes first: else one that is always overtaken is never whole.
            candidate = max(stays, key=lambda info: (_key(info) in self._shares_done, info.step))
            if self._is_whole(candidate, go_on) is None:
                _logger.warning(
                    "%s/%s could not be verified in the time there was: nothing older is removed for now",
                    self._storage.url,
                    candidate.name,
                )
                return ()

    def _judged(self, info: CheckpointInfo) -> CheckpointInfo:
        """The checkpoint with what is known of it, also if the mark could not be written."""
        problem = self._damaged.get(_key(info))
        return info if problem is None or info.damaged is not None else replace(info, damaged=problem)

    def _is_whole(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> bool | None:
        """Whether it verifies; None if it was not allowed to end. What does not is marked."""
        try:
            files = Catalog(self._storage).manifest(info.name).files
        except (CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
            return self._tell(info, str(error))
        shares = max(1 + info.size_bytes // _MOST_AT_ONCE, min(_STOPS, 1 + info.size_bytes // _LEAST_AT_ONCE))
        for place in range(self._shares_done.pop(_key(info), 0), shares):
            failures = verify(self._storage, info.name, paths=share(files, place, shares))
            if failures:
                return self._tell(info, "; ".join(map(str, failures[:5])))
            if place + 1 < shares and not go_on():
                self._shares_done[_key(info)] = place + 1
                return None
        self.vouch(info)
        return True

    def _tell(self, info: CheckpointInfo, problem: str) -> bool:
        _logger.error(
            "%s/%s is damaged (%s): it is marked, and what is older is kept in its place",
            self._storage.url,
            info.name,
            problem,
        )
        self._distrust(info, problem)
        self._mark(info.name, problem)
        return False


def _key(info: CheckpointInfo) -> _Key:
    return info.name, info.save_id, info.created
