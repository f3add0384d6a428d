"""The roots that one Trainer uses, each with its manager; and safe removal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import final

from ckpt_core.commit import Catalog, Lease, remove
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.hosting import CheckpointPath, ManagersByRoot
from ckpt_core.manager import CheckpointManager
from ckpt_core.names import MARKER
from ckpt_core.saving import SaveHandle
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Log
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._options import Settings
from lightning_ckpt._state import LightningState
from lightning_ckpt.loops._takeover import job_note

_logger = logger_of(__name__)


@final
class Roots(ManagersByRoot):
    """The roots of one Trainer, with the lineage of its live state in each.

    A manager lives as long as a fit. The checkpoint that the live state comes from is remembered longer, so
    that another fit of the same Trainer continues the lineage of the first.

    Concurrency: main thread; `once`, `same`, `take_up`, `save` and `close` are collective,
    `remove` is for the coordinator.

    Attributes:
        training: whether a fit is running that saves by itself; see `Settings.for_root`.
    """

    def __init__(self, settings: Settings, log: Log) -> None:
        super().__init__(self._opened, deadline_seconds=settings.options.deadline_seconds)
        self.training = False
        self._settings = settings
        self._log = log
        self._written = set[str]()
        self._accepted = set[CheckpointPath]()
        self._newest: SaveHandle | None = None
        self._origins: dict[str, tuple[int, str]] = {}
        self._saved: list[tuple[str, SaveHandle]] = []
        self._taken_up = set[str]()

    def _opened(self, root: str, coordinator: Coordinator) -> CheckpointManager:
        return self._settings.manager(root, coordinator, training=self.training, log=self._log)

    def all_reduce_max(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return self.coordinator.all_reduce_max(numbers)

    def same(self, numbers: Sequence[int]) -> bool:
        """Return whether numbers are equal on every rank; one small all-reduce."""
        combined = self.all_reduce_max([*numbers, *(-number for number in numbers)])
        return combined == (*numbers, *(-number for number in numbers))

    def resumed(self, manager: CheckpointManager, place: CheckpointPath, step: int) -> None:
        self.loaded(manager)
        self._origins[place.root] = step, place.name
        self._taken_up.add(place.root)

    def forget(self, *, beyond: int) -> None:
        """Forget that the live state comes from checkpoints of later steps than this."""
        self._origins = {root: origin for root, origin in self._origins.items() if origin[0] <= beyond}

    def take_up(self, root: str) -> int | None:
        """Continue the lineage of `root` from the live state's checkpoint.

        Returns the step of that checkpoint, or None.
        """
        if root in self._origins and root not in self._taken_up:
            try:
                self.at(root).continue_from(name=self._origins[root][1])
            except CheckpointNotFoundError as error:
                _logger.warning("%s; it was there when this run saved or loaded it", error)
                del self._origins[root]
        self._taken_up.add(root)
        return self._origins[root][0] if root in self._origins else None

    def save(
        self,
        root: str,
        step: int,
        state: LightningState,
        *,
        name: str | None = None,
        metrics: Mapping[str, float],
        reason: str,
    ) -> SaveHandle | None:
        manager = self.at(root)
        self.wait(but=manager)
        if root != self._settings.root and root not in self._taken_up | self._origins.keys():
            # The host names what is there: continue from the newest.
            latest = self.once(manager.latest)
            if latest is not None and latest.step <= step:
                self._origins[root] = latest.step, latest.name
        self.take_up(root)
        noted = {"reason": reason, **job_note()}
        try:
            handle = manager.save(step, state, metrics=metrics, annotations=noted, name=name)
        except CheckpointError as error:
            for note in state.unstorable():
                error.add_note(note)
            raise
        if handle is not None:
            self._note_saved()
            self._saved.append((root, handle))
            self._newest = handle
            self._written.add(root)
            self._accepted.add(CheckpointPath(root, handle.name))
        return handle

    def is_taken(self, place: CheckpointPath) -> bool:
        """Return whether a name is in use, also in flight; coordinator only."""
        if place in self._accepted:
            return True
        if "://" not in place.root:
            return os.path.lexists(str(place))
        # The host's own client may have cached the listing from before the commit.
        return self._settings.storage_at(place.root).exists(f"{place.name}/{MARKER}")

    def settle(self) -> None:
        for manager in self:
            manager.wait_staged()

    def remove(self, place: CheckpointPath, remove_file: Callable[[], None]) -> None:
        """Remove a checkpoint once the save in flight is committed, unless it fails.

        Only where this run has saved itself: Lightning also removes what it resumed from elsewhere.
        """
        storage = self._settings.storage_at(place.root)
        if place.root not in self._written:
            with suppress(OSError, CheckpointError):
                if self.is_taken(place) or storage.exists(place.name):
                    _logger.warning(
                        "%s is kept although Lightning wants it removed: this run has saved nothing to %s, "
                        "so it belongs to another run",
                        place, place.root,
                    )  # fmt: skip
            return
        self._accepted.discard(place)
        # The manager that owns the root by then, and counts what is in it.
        manager = self.get(place.root)

        def ended(saved: Future[CheckpointInfo]) -> None:
            if Future.exception(saved) is None:  # looked at without taking it from the user
                _remove(storage, manager, place, remove_file)
            else:
                _logger.warning("%s is kept, because the save after it failed", place)

        if self._newest is None:
            _remove(storage, manager, place, remove_file)
        else:
            self._newest.committed.add_done_callback(ended)

    def close(self, *, farewell: bool = True) -> None:
        self._newest = None
        try:
            super().close(farewell=farewell)
        finally:
            self._note_saved()
            self._saved, self._taken_up = [], set()

    def _note_saved(self) -> None:
        for root, handle in self._saved:
            if handle.done() and handle.error is None:
                self._origins[root] = handle.step, handle.name
        self._saved = [each for each in self._saved if not each[1].done()]


def _remove(
    storage: Storage,
    manager: CheckpointManager | None,
    place: CheckpointPath,
    remove_file: Callable[[], None],
) -> None:
    """Remove a checkpoint, mostly on the background thread; log a failure."""
    try:
        if storage.exists(place.name):
            remove_file()
        elif manager is not None:
            manager.discard(place.name)
        else:  # after a fit, at the user's request
            with Lease.acquire(storage, "the removal of a checkpoint"):
                remove(storage, Catalog(storage).find(name=place.name))
    except CheckpointNotFoundError:
        _logger.debug("%s is gone already", place)
    except (OSError, CheckpointError) as error:
        # A whole checkpoint too many stays; the log and the listing show it.
        _logger.warning("%s was not removed: %s", place, error)
