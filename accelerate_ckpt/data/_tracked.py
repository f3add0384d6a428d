"""One prepared data loader: where it is in its epoch, and how it gets back there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast, final
from weakref import WeakKeyDictionary

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import IterableDataset

from accelerate_ckpt.data._layout import (
    LoaderLayout,
    is_copy,
    order_of,
    place_rest,
    sampler_of,
    skip_batches_of_the_users,
    skip_samplers,
    swap_sampler,
)
from accelerate_ckpt.data._saved import Reentry, Saved
from accelerate_ckpt.data._starts import (
    Prepared,
    generator_state,
    is_persistent,
    lend_generator,
    put_seeds_back,
    rewind,
    rewinding,
    set_generator,
    start_here,
)
from ckpt_core.data import Draws, batches_in
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import shadow
from ckpt_core.state import load_rng_state, rng_state

_logger = logger_of(__name__)

# Called once per batch, after it was fetched and before it is handed out.
_SEAM = "_update_state_dict"
_DISPATCHER_SEAM = "slice_fn"
_ITERATOR = "__iter__"


@final
@dataclass(kw_only=True, slots=True)
class LoaderEpoch:
    """An epoch that a loader, or a copy of it, is in.

    Attributes:
        loader: what iterates.
        active: whether it has begun and not ended.
        start: what its order is drawn from.
        skipped: fetches that its batch sampler skips.
        count: batches that came to the user until now, and those that the loader itself skips.
        before: how much of each order was seen before it began; empty for nothing.
        rng: random state to be put back right before the first batch, or at the end if there is none.
        at_edge: whether that state was put back at the beginning already.
        iterator: the iterator of the base loader, while it exists.
        thread: the one that has fetched the last batch.
    """

    loader: Any
    active: bool = False
    start: Mapping[str, Any] = field(default_factory=dict[str, Any])
    skipped: int = 0
    count: int = 0
    before: Sequence[int] = ()
    rng: Mapping[str, Any] | None = None
    at_edge: bool = False
    iterator: Callable[[], Any] = lambda: None
    thread: int | None = None


@final
class TrackedLoader:
    """One prepared loader, and the copies of it that skip batches. Main thread only.

    Attributes:
        trains: whether an optimizer has made a step with its batches.
        copies: made by `skip_first_batches`; whether each is the rest of an epoch already.
    """

    def __init__(self, loader: Any) -> None:
        self.trains = self._told = False
        self.copies: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._loader = loader
        self._layout = LoaderLayout.of(loader)
        self._epoch = LoaderEpoch(loader=loader)
        self._draws = Draws()
        self._interrupted: LoaderEpoch | None = None
        self._saved: Saved | None = None
        self._reentry: Reentry | None = None
        # Whether the next iterator is made already, and draws no base seed from the global generator.
        self._made = _is_stateful(loader) or (is_persistent(loader) and loader.iteration > 0)
        self._prepared: Mapping[str, Any] | None = None
        self._first_sampler: Any = None
        self._undo: list[Callable[[], None]] = []
        self._watch(loader)

    def made_after(self, before: Prepared | None) -> None:
        """Note the state before `prepare` made the loader.

        Stock Accelerate draws the order of a stateful loader's first epoch there, from the sampler that the
        loader had then: with workers, or if it is torchdata's on one process.
        """
        loader = self._loader
        if before is None or not (_is_stateful(loader) and (loader.num_workers or before.has_drawn(loader))):
            return
        if before.generator is None and getattr(loader, "synchronized_generator", None) is not None:
            before = before.with_new_generator()
        self._prepared = before.start(loader)
        if before.sampler is not sampler_of(loader):
            self._first_sampler = before.sampler

    def is_origin_of(self, loader: Any) -> bool:
        """Return whether `skip_first_batches` has made a loader from this one."""
        return is_copy(loader, self._loader)

    def adopt(self, copy: Any) -> None:
        """Track a copy that skips batches, and let it go on from the saved position."""
        if copy in self.copies:
            return
        self.copies[copy] = False
        if isinstance(copy, DataLoaderDispatcher):
            copy.submesh_tp = self._loader.submesh_tp  # stock forgets it, and deals out what all must see
        self._watch(copy)
        saved = self._saved
        if saved is not None and saved.is_rest(copy=True, stateful=False):
            place_rest(copy, saved.cuts, sampler=saved.sampler)
            self.copies[copy] = True
        elif saved is not None or self._is_awaited():
            skip_batches_of_the_users(
                copy, self._loader, fetched=None if saved is None else saved.batches * self._layout.fetches
            )

    def begun(self, loader: Any) -> None:
        """Note that the loader, or a copy of it, begins an epoch."""
        self._undo_all()
        self._interrupted = None
        skipped = sum(each.skip_batches for each in skip_samplers(loader))
        # A dispatcher cuts the first batch once more, to fill up the last one.
        cuts = int(isinstance(loader, DataLoaderDispatcher) and not loader._drop_last)
        self._epoch = epoch = LoaderEpoch(loader=loader, active=True, skipped=skipped, count=-cuts)
        original = loader is self._loader
        saved, self._saved = self._saved, None
        left = saved is not None and saved.left and original and not _is_stateful(loader)
        if saved is not None and not left:
            self._go_on(epoch, saved)
        else:
            if self._reentry is not None and (left or self._is_awaited()):
                if not left:
                    _tell_of_skip_after_edge(epoch, self._loader, self._layout.fetches)
                epoch.rng, epoch.at_edge = self._reentry.take(), True
                load_rng_state(epoch.rng)
            if saved is not None:
                set_generator(loader, {"generator": saved.position["generator"]})
            epoch.start = (original and self._prepared) or start_here(loader, made=original and self._made)
        if epoch.start.get("anew") and self._reentry is not None:
            self._undo.append(lend_generator(loader.base_dataloader))
        if original:
            self._made, self._prepared = is_persistent(loader), None

    def ended(self, loader: Any) -> None:
        """Note that the loader, or a copy of it, has ended an epoch."""
        epoch = self._epoch
        if epoch.loader is not loader:
            return
        epoch.active = False
        self._undo_all()
        if loader is self._loader and epoch.before and is_persistent(loader):
            # Its iterator, kept for later epochs, knows only the rest.
            _forget_state(loader.base_dataloader)
        if epoch.rng is None:
            # A copy that skips batches finishes the original's epoch.
            self._loader.iteration = loader.iteration
            return
        # It had no batch: what comes next goes on from the load.
        load_rng_state(epoch.rng)
        epoch.rng = None
        if epoch.at_edge:
            set_generator(self._loader, epoch.start)

    def position(self) -> dict[str, Any]:
        """Return epoch, position, start of the order and a stateful loader's state."""
        if self._saved is not None:
            return {**self._saved.position, "trains": self.trains}
        epoch, layout = self._epoch, self._layout
        if epoch.thread not in {None, threading.get_ident()} and not self._told:
            self._told = True
            _logger.warning(
                "another thread draws the batches of a %s, and may be ahead of the loop: the position that "
                "is saved is that of the thread, so that a resume in the middle of an epoch passes over what "
                "was drawn ahead. Save between epochs, or let the loop draw its batches itself",
                type(self._loader).__name__,
            )
        ended = epoch.active and bool(epoch.loader.end_of_dataloader)
        within = epoch.active and not ended
        fetched = epoch.skipped + epoch.count * layout.fetches if within else 0
        start, left = epoch.start, within and epoch.iterator() is None
        before = self._draws.before if within and not left else None
        exact = type(self._loader) is DataLoaderShard and not (
            _is_stateful(self._loader) or isinstance(self._loader.dataset, IterableDataset)
        )
        if within:
            self._draws.tell(self._loader, ahead=before is not None and not exact)
        if not within:
            start = self._prepared or start_here(self._loader, made=self._made)
        return {
            "iteration": (epoch.loader if epoch.active else self._loader).iteration + int(ended),
            "within": within,
            "start": dict(start),
            "state": epoch.loader.state_dict() if _is_stateful(epoch.loader) else None,
            "trains": self.trains,
            "made": self._made,
            "batches": fetched // layout.fetches,
            "taken": [a + b for a, b in zip_longest(layout.taken(fetched), epoch.before, fillvalue=0)],
            "rest": within and any(epoch.before),
            "layout": asdict(layout),
            "order": order_of(self._loader),
            "ended": ended,
            "left": left,
            "before": before if exact else None,
            "generator": generator_state(self._loader),
        }

    def restore(
        self, index: int, position: Mapping[str, Any], reentry: Reentry, *, goes_on: bool, same_ranks: bool
    ) -> list[str]:
        """Go back to a position, but for values that belong to another rank; return notes."""
        self._undo_all()
        self._interrupted = self._epoch if self._epoch.active else None
        self._epoch = LoaderEpoch(loader=self._loader)
        self._reentry = reentry
        self._loader.iteration = position["iteration"]
        self.trains = position.get("trains", False)
        start, within = position["start"], position["within"]
        self._made = position.get("made", bool(start.get("anew")))
        prepared = bool(start.get("prepared"))
        self._prepared = start if prepared and not within else None
        saved = Saved(
            index=index,
            position=position,
            layout=self._layout,
            same_ranks=same_ranks,
            sampler=self._first_sampler if prepared else None,
        )
        self._saved = saved if within and goes_on else None
        put_seeds_back(self._loader, start)()
        if _is_stateful(self._loader):
            self._load_own_state(saved)
        if not within:
            set_generator(self._loader, start)
        if position.get("ended") and self.trains and _is_stateful(self._loader):
            return [saved.note_on_end()]
        return [] if self._saved is None else saved.notes(self._loader)

    def release(self) -> None:
        """Undo everything that was put into the loader and its copies."""
        self._undo_all()
        for loader in (self._loader, *self.copies):
            _unwatch(loader)
        self.copies.clear()

    def _is_awaited(self) -> bool:
        """Return whether this loader goes on from a save between epochs."""
        reentry = self._reentry
        return reentry is not None and reentry.rng is not None and self in reentry.at_edge

    def _go_on(self, epoch: LoaderEpoch, saved: Saved) -> None:
        """Begin the epoch of a save behind what was seen of it."""
        loader, original = epoch.loader, epoch.loader is self._loader
        stateful = _is_stateful(self._loader)
        if self._reentry is not None:
            epoch.rng = self._reentry.take()
        if not original:
            # Stock does not tell it to a sampler within a copy on several ranks.
            self._loader.set_epoch(loader.iteration)
        has_state = original and stateful and saved.has_state
        epoch.start = saved.start
        if not (has_state and saved.start.get("prepared")):
            epoch.start = rewind(self._loader, saved.start)
        if stateful and not has_state:
            _forget_state(self._loader.base_dataloader)
        if has_state:
            epoch.skipped = saved.batches * self._layout.fetches
        elif saved.is_rest(copy=not original, stateful=stateful):
            if not self.copies.get(loader):
                again = [rewinding(self._loader, epoch.start, saved.position)] if original else []
                undo = place_rest(loader, saved.cuts, sampler=saved.sampler, rewinds=again)
                self._undo += [undo] if original else []
            epoch.skipped, epoch.before = 0, saved.taken
            saved.set_remainder(loader, self._loader)
        else:
            self._draws.first = saved.drawn_from(epoch.skipped)
            self._tell_of_another_position(epoch, saved)

    def _load_own_state(self, saved: Saved) -> None:
        """Load a stateful loader's own state, if it is of this rank and layout."""
        loader, base = self._loader, self._loader.base_dataloader
        _forget_state(base)
        if not saved.has_state or (
            saved.position.get("ended") and isinstance(loader.dataset, IterableDataset)
        ):
            return  # a stream that has ended would begin the next epoch at its end
        state, start = saved.position["state"], saved.start
        if not start.get("prepared"):
            loader.load_state_dict(state)
            if not saved.position["within"]:
                # A finished iterator is made first, then the one that will be used: the first one's draw from
                # the global generator belongs to an epoch that is over.
                base.state_dict()
            return
        now = rng_state()
        rewind(loader, start)
        if saved.sampler is not None:
            self._undo.append(swap_sampler(loader, saved.sampler))
        loader.load_state_dict(state)
        base.state_dict()
        self._undo_all()
        load_rng_state(now)

    def _tell_of_another_position(self, epoch: LoaderEpoch, saved: Saved) -> None:
        skipped = epoch.skipped // self._layout.fetches or epoch.loader.skip_batches
        if "batches" not in saved.position or (saved.as_saved and (saved.left or skipped == saved.batches)):
            return
        seen = f"{saved.batches} batches" if saved.as_saved else f"{sum(saved.taken)} {self._layout.unit}"
        does = f"skips {skipped} batches" if skipped else "begins this epoch again"
        _logger.warning(
            "data loader %d was saved after %s of epoch %d, and %s: give the loop "
            "accelerator.skip_first_batches(loader, %d), unless the script itself passes over them",
            saved.index,
            seen,
            saved.position["iteration"],
            does,
            saved.batches,
        )

    def _watch(self, loader: Any) -> None:
        """Wrap what `loader` calls for every epoch and every batch."""
        # A copy, and its workers, must go when the script drops it: there is no reference to it here.
        base, seam, watched = loader.base_dataloader, _seam_of(loader), weakref.ref(loader)
        per_batch = vars(loader).get(seam) or partial(_call, watched, seam)
        iterate = partial(_call, weakref.ref(base), _ITERATOR)

        def watched_batch(*args: Any, **kwargs: Any) -> Any:
            self._batch(watched())
            return per_batch(*args, **kwargs)

        def watched_iterator() -> Any:
            base = cast("Any", watched()).base_dataloader
            with self._draws.seen_of(base):
                iterator = iterate()
            if self._epoch.loader is watched():
                self._epoch.iterator = weakref.ref(iterator)
            return self._draws.watch(iterator)

        shadow(loader, {seam: watched_batch})
        shadow(base, {_ITERATOR: watched_iterator})

    def _batch(self, loader: Any) -> None:
        """Note a batch that was fetched, to be handed out or skipped."""
        if self._interrupted is not None and self._interrupted.loader is loader:
            # The loop goes on with the iterator that it had before the load.
            self._epoch, self._interrupted, self._saved = self._interrupted, None, None
            if self._reentry is not None:
                self._reentry.rng = None
        epoch = self._epoch
        if epoch.loader is not loader:
            return
        if self._undo:
            self._undo_all()
        if loader.end_of_dataloader:
            return  # once more, behind the last batch
        epoch.count += 1
        epoch.thread = threading.get_ident()
        if epoch.rng is not None and epoch.count > loader.skip_batches:
            if not epoch.at_edge:
                load_rng_state(epoch.rng)
            epoch.rng = None

    def _undo_all(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _forget_state(base: Any) -> None:
    """Let a stateful loader make its next iterator as if it had none."""
    base.load_state_dict({})
    base.next_iter_state = None


def _call(owner: Callable[[], Any], method: str) -> Any:
    """Call the method of an object's class."""
    return getattr(type(owner()), method)(owner())


def _seam_of(loader: Any) -> str:
    return _DISPATCHER_SEAM if isinstance(loader, DataLoaderDispatcher) else _SEAM


def _unwatch(loader: Any) -> None:
    seam = _seam_of(loader)
    before = vars(loader).pop(seam).stock
    if before is not None:
        vars(loader)[seam] = before
    vars(loader.base_dataloader).pop(_ITERATOR)


def _tell_of_skip_after_edge(epoch: LoaderEpoch, original: Any, fetches: int) -> None:
    """Warn of a script that passes over a part of the epoch after the saved one."""
    skipped, whole = epoch.skipped // fetches or epoch.loader.skip_batches, batches_in(original)
    if whole is not None and 0 < skipped < whole:
        _logger.warning(
            "the checkpoint was saved at the end of an epoch, and the script skips %d of the %d batches of "
            "the next one: unless that is meant, compute the number from the length of an epoch as it is now",
            skipped,
            whole,
        )
