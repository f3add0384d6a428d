"""The roots that one Trainer saves to or loads from, each with its manager; and removal that never loses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar, final

from ckpt_core.commit import Catalog, remove
from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.lifecycle import SaveHandle
from ckpt_core.manager import CheckpointManager
from ckpt_core.state import StateSource
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._options import Settings
from lightning_ckpt._places import Place

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@final
class Roots:
    """Managers by root, made when first needed.

    Concurrency: main thread; `manager`, `once`, `same`, `save` and `close` are collective, `remove` is for
    the coordinator. The managers share one coordinator, whose background channel serves one save at a time:
    a save first waits for those in flight elsewhere, which also bounds the memory of staged copies.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._coordinator: Coordinator | None = None
        self._managers: dict[str, CheckpointManager] = {}
        self._written: set[str] = set()
        self._newest: SaveHandle | None = None

    def manager(self, root: str) -> CheckpointManager:
        """The manager of `root`."""
        if root not in self._managers:
            options = self._settings.for_root(root)
            self._managers[root] = CheckpointManager(
                self._settings.given(root),
                options=options,
                coordinator=self._agreement(),
                sinks=self._settings.sinks,
            )
        return self._managers[root]

    def once(self, decide: Callable[[], T]) -> T:
        """What the coordinator alone finds out, on every rank."""
        return self._agreement().once(decide)

    def same(self, numbers: Sequence[int]) -> bool:
        """Whether these numbers are the same on every rank; one small all-reduce."""
        combined = self._agreement().combine([*numbers, *(-number for number in numbers)])
        return combined == (*numbers, *(-number for number in numbers))

    def save(
        self,
        place: Place,
        step: int,
        state: StateSource,
        *,
        metrics: Mapping[str, float],
        reason: str,
        replace: bool = True,
    ) -> SaveHandle | None:
        """Save under a place; see `CheckpointManager.save`. Without `replace`, under the step's own name."""
        manager = self.manager(place.root)
        for other in self._managers.values():
            if other is not manager:
                other.wait()
        handle = manager.save(
            step,
            state,
            metrics=metrics,
            annotations={"reason": reason},
            name=place.name if replace else None,
        )
        if handle is not None:
            self._newest = handle
            self._written.add(place.root)
        return handle

    def settle(self) -> None:
        """Return when every save in flight has its copy, so that weights may change by whatever means."""
        for manager in self._managers.values():
            manager.wait_staged()

    def remove(self, place: Place, remove_file: Callable[[], None]) -> None:
        """Remove a checkpoint once the save in flight is committed; keep it if that save fails.

        Only where this run has saved itself: Lightning also asks for what it merely resumed from elsewhere.
        """
        if place.root not in self._written:
            _logger.warning(
                "%s/%s is kept although its removal was asked for: this run has saved nothing to %s, "
                "so it belongs to another run",
                place.root, place.name, place.root,
            )  # fmt: skip
            return
        storage = self._settings.storage_at(place.root)

        def ended(saved: Future[CheckpointInfo]) -> None:
            if saved.exception() is None:
                _remove(storage, place, remove_file)
            else:
                _logger.warning("%s/%s is kept, because the save after it failed", place.root, place.name)

        if self._newest is None:
            _remove(storage, place, remove_file)
        else:
            self._newest.committed.add_done_callback(ended)

    def close(self, *, farewell: bool = True) -> None:
        """Wait for every save in flight and let go of everything; managers are made anew when needed.

        Args:
            farewell: whether the other ranks are closing, too, and may be waited for.

        Raises:
            SaveError: a save failed; all managers are closed all the same.
        """
        managers, coordinator = list(self._managers.values()), self._coordinator
        self._managers, self._coordinator, self._newest = {}, None, None
        failure: CheckpointError | None = None
        for manager in managers:
            try:
                manager.close()
            except CheckpointError as error:
                failure = failure or error
        if coordinator is not None and farewell:
            coordinator.close()
        if failure is not None:
            raise failure

    def _agreement(self) -> Coordinator:
        if self._coordinator is None:
            deadline = self._settings.options.deadline_seconds
            self._coordinator = coordinator_for_job(deadline_seconds=deadline)
        return self._coordinator


def _remove(storage: Storage, place: Place, remove_file: Callable[[], None]) -> None:
    """Runs where the commit was made, mostly on the background thread; a failure only leaves too much."""
    try:
        if storage.exists(place.name):
            remove_file()
        else:
            remove(storage, Catalog(storage).find(name=place.name))
    except CheckpointNotFoundError:
        _logger.debug("%s/%s is gone already", place.root, place.name)
    except (OSError, CheckpointError) as error:
        # What stays is a whole checkpoint too many; the person sees it in the log and in the listing.
        _logger.warning("%s/%s could not be removed: %s", place.root, place.name, error)
