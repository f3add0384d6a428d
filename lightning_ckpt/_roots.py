"""The roots that one Trainer saves to or loads from, each with its manager; and removal that never loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar, final

from ckpt_core.commit import Catalog, Lease, remove
from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.lifecycle import SaveHandle
from ckpt_core.manager import CheckpointManager
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._options import Settings
from lightning_ckpt._places import Place
from lightning_ckpt._state import LightningState

T = TypeVar("T")

_logger = logger_of(__name__)


@final
class Roots:
    """Managers by root, made when first needed.

    A manager lives as long as a fit; which checkpoint the live state comes from is remembered beyond that,
    so that another fit of the same Trainer goes on with the lineage of the first.

    Concurrency: main thread; `manager`, `once`, `same`, `take_up`, `save` and `close` are collective,
    `remove` is for the coordinator. The managers share one coordinator, whose background channel serves one
    save at a time: a save first waits for those in flight elsewhere, which also bounds the memory of copies.

    Attributes:
        training: whether a fit is running that saves by itself; see `Settings.for_root`.
    """

    def __init__(self, settings: Settings) -> None:
        self.training = False
        self._settings = settings
        self._coordinator: Coordinator | None = None
        self._managers: dict[str, CheckpointManager] = {}
        self._written: set[str] = set()
        self._newest: SaveHandle | None = None
        self._origins: dict[str, tuple[int, str]] = {}
        self._saved: list[tuple[str, SaveHandle]] = []
        self._taken_up: set[str] = set()

    def manager(self, root: str) -> CheckpointManager:
        """The manager of `root`."""
        if root not in self._managers:
            options = self._settings.for_root(root, training=self.training)
            self._managers[root] = CheckpointManager(
                self._settings.given(root),
                options=options,
                coordinator=self._agreement(),
                sinks=self._settings.sinks,
            )
        return self._managers[root]

    def once(self, decide: Callable[[], T]) -> T:
        """What the coordinator alone finds out, on every rank."""
        return self._agreement().run_on_coordinator(decide)

    def same(self, numbers: Sequence[int]) -> bool:
        """Whether these numbers are the same on every rank; one small all-reduce."""
        combined = self._agreement().all_reduce_max([*numbers, *(-number for number in numbers)])
        return combined == (*numbers, *(-number for number in numbers))

    def loaded(self, place: Place, step: int | None) -> None:
        """Note that the manager of a root has loaded the whole live state from there."""
        if step is not None:
            self._origins[place.root] = step, place.name
            self._taken_up.add(place.root)

    def forget(self, *, beyond: int) -> None:
        """Note that the live state does not come from checkpoints of later steps than this."""
        self._origins = {root: origin for root, origin in self._origins.items() if origin[0] <= beyond}

    def take_up(self, root: str) -> int | None:
        """Tell the manager of `root` which checkpoint there the live state comes from; its step, or None."""
        if root in self._origins and root not in self._taken_up:
            try:
                self.manager(root).continue_from(name=self._origins[root][1])
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
        """Save to a root; see `CheckpointManager.save`."""
        manager = self.manager(root)
        for other in self._managers.values():
            if other is not manager:
                other.wait()
        self._find_origin(root, step)
        self.take_up(root)
        annotations = {"reason": reason}
        try:
            handle = manager.save(step, state, metrics=metrics, annotations=annotations, name=name)
        except CheckpointError as error:
            for note in state.unstorable():
                error.add_note(note)
            raise
        if handle is not None:
            self._note_saved()
            self._saved.append((root, handle))
            self._newest = handle
            self._written.add(root)
        return handle

    def _find_origin(self, root: str, step: int) -> None:
        """Elsewhere than in the run's own root, whoever names the checkpoints goes on from what is there."""
        if root == self._settings.root or root in self._taken_up or root in self._origins:
            return
        latest = self.once(self.manager(root).latest)
        if latest is not None and latest.step <= step:
            self._origins[root] = latest.step, latest.name

    def wait(self) -> None:
        """Wait for every save in flight: what is looked for next may be one of them.

        Raises:
            SaveError: one failed.
        """
        for manager in self._managers.values():
            manager.wait()

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
        # The manager that owns the root by then, and counts what is in it.
        manager = self._managers.get(place.root)

        def ended(saved: Future[CheckpointInfo]) -> None:
            if saved.exception() is None:
                _remove(storage, manager, place, remove_file)
            else:
                _logger.warning("%s/%s is kept, because the save after it failed", place.root, place.name)

        if self._newest is None:
            _remove(storage, manager, place, remove_file)
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
        self._note_saved()
        self._saved, self._taken_up = [], set()
        if coordinator is not None and farewell:
            coordinator.close()
        if failure is not None:
            raise failure

    def _note_saved(self) -> None:
        for root, handle in self._saved:
            if handle.done() and handle.committed.exception() is None:
                self._origins[root] = handle.step, handle.name
        self._saved = [each for each in self._saved if not each[1].done()]

    def _agreement(self) -> Coordinator:
        if self._coordinator is None:
            deadline = self._settings.options.deadline_seconds
            self._coordinator = coordinator_for_job(deadline_seconds=deadline)
        return self._coordinator


def _remove(
    storage: Storage, manager: CheckpointManager | None, place: Place, remove_file: Callable[[], None]
) -> None:
    """Runs where the commit was made, mostly on the background thread; a failure only leaves too much."""
    try:
        if storage.exists(place.name):
            remove_file()
        elif manager is not None:
            manager.discard(place.name)
        else:  # after a fit, because a person asks for it
            with Lease.acquire(storage, "the removal of a checkpoint"):
                remove(storage, Catalog(storage).find(name=place.name))
    except CheckpointNotFoundError:
        _logger.debug("%s/%s is gone already", place.root, place.name)
    except (OSError, CheckpointError) as error:
        # What stays is a whole checkpoint too many; the person sees it in the log and in the listing.
        _logger.warning("%s/%s was not removed: %s", place.root, place.name, error)
