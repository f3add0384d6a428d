"""Positions of the data loaders of one accelerator.

Stock Accelerate forgets the epoch a loader is in and what its shuffling started from; and a resumed loop
makes an iterator, which draws from the global generator after `load_state` has put it back. So that a resumed
run sees the same data and the same random numbers:

    at the start of every epoch     remember what the order is drawn from
    save                            epoch, that start, what was seen of the order, a stateful loader's state
    load                            epoch, stateful loader's own state
    the first epoch after a load    begins from the remembered start, and the generators are put back
                                    right before the first batch is handed out

On another number of ranks, or with another batch size, that first epoch is the rest of the order.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast, final
from weakref import WeakKeyDictionary, WeakSet

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from accelerate_ckpt.data._layout import (
    SAMPLES,
    Cut,
    LoaderLayout,
    Prepared,
    drops_last,
    generator_state,
    is_copy,
    is_persistent,
    lend_generator,
    length,
    order_of,
    padding,
    place_rest,
    put_seeds_back,
    rewind,
    rewinding,
    sampler_of,
    set_generator,
    skip_batches_of_the_users,
    skip_samplers,
    start_here,
    swap_sampler,
)
from ckpt_core.data import Draws, batches_in
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import shadow
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.types import DataPosition

_logger = logger_of(__name__)


@final
@dataclass(kw_only=True, slots=True)
class Reentry:
    """Re-entry after a load: the saved random state, until a loader goes on from it.

    Attributes:
        at_edge: the loaders that go on from it if none was saved within an epoch.
    """

    rng: Mapping[str, Any] | None
    at_edge: Collection[Any]

    def take(self) -> Mapping[str, Any]:
        """Return the saved random state the first time, and then the present one."""
        rng, self.rng = self.rng, None
        return rng_state() if rng is None else rng


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A saved position of one loader.

    Attributes:
        same_ranks: whether the position is of this rank, among as many ranks.
        sampler: what the order was drawn from, if not from the loader's present sampler.
    """

    index: int
    position: Mapping[str, Any]
    layout: LoaderLayout
    same_ranks: bool
    sampler: Any = None

    @property
    def before(self) -> LoaderLayout:
        """How batches were dealt out at the save."""
        return LoaderLayout(**self.position["layout"])

    @property
    def cuts(self) -> list[Cut]:
        """What `place_rest` leaves out."""
        return [(0, each) for each in self.position["taken"]]

    @property
    def as_saved(self) -> bool:
        """Whether batches are dealt out as in the whole epoch until the save."""
        return self.same_ranks and not self.position["rest"] and self.before == self.layout

    @property
    def has_state(self) -> bool:
        """Whether a stateful loader can go on from its own state."""
        return self.as_saved and self.position["state"] is not None

    @property
    def can_be_rest(self) -> bool:
        """Whether the rest of the epoch is known as a part of its order."""
        return self.layout.goes_on_from(self.before, len(self.position["taken"]))

    def is_rest(self, *, copy: bool, stateful: bool) -> bool:
        """Return whether what iterates begins behind what was taken.

        A copy that skips batches does if its own number has another meaning now, a stateful loader always.
        """
        wanted = (not self.as_saved or self.sampler is not None) if copy else stateful
        return wanted and self.can_be_rest

    def set_remainder(self, loader: Any, original: Any) -> None:
        """Set the number of samples in the last step, as stock does for a whole epoch."""
        whole = length(original)
        if loader.remainder >= 0 and whole is not None and self.layout.unit == SAMPLES:
            loader.remainder = (whole - sum(self.position["taken"])) % self.layout.per_step

    def notes(self, loader: Any) -> list[str]:
        """Return what becomes of the epoch, if its order or its batches are others now."""
        position, before, notes = self.position, self.before, list[str]()
        name, epoch, taken = f"data loader {self.index}", position["iteration"], position["taken"]
        if (order := order_of(loader)) != position["order"]:
            change = change_of_order(position["order"], order, before.samples(taken))
            notes.append(f"{name}, within epoch {epoch}: {change}")
        if self.as_saved:
            return notes
        if not self.can_be_rest:
            return [
                *notes,
                f"{name} was saved within epoch {epoch}, and its rest is unknown for this number of ranks "
                "and workers, or for these batches: of it, samples may be seen twice or never",
            ]
        seen, whole = sum(taken), length(loader)
        notes.append(f"{name} {goes_on(loader, epoch, seen, whole)}")
        ranks = before.per_fetch // before.batch_size if before.unit == SAMPLES else before.per_fetch
        shuffles = position["order"]["type"] == RandomSampler.__qualname__
        if ranks > 1 and shuffles and _is_each_ranks_own(position["start"]):
            notes.append(
                f"but each of the {ranks} ranks has drawn the order of this epoch by itself, in prepare(), "
                "as stateful loaders with workers do in Accelerate: unless all ranks were seeded alike "
                f"before it, up to {seen if whole is None else min(seen, whole - seen)} {before.unit} come "
                "twice in it and as many never, as without a resume"
            )
        if before.batch_size != self.layout.batch_size:
            notes.append(
                f"{name} makes batches of {self.layout.batch_size} now, and made batches of "
                f"{before.batch_size}: learning rate schedules count batches, and go on from their own count"
            )
        return notes


def _is_each_ranks_own(start: Mapping[str, Any]) -> bool:
    """Return whether stock has had each rank draw an order by itself, in `prepare`."""
    return bool(start["prepared"]) and "initial_seed" not in start["seeds"]


def positions_in_samples(positions: Sequence[Mapping[str, Any]]) -> dict[str, DataPosition]:
    """Return saved positions counted in samples of all ranks, of loaders that train."""
    trains = any(position and position["trains"] for position in positions)
    return {
        "dataloader" if len(positions) == 1 else f"dataloader.{index}": _in_samples(position)
        for index, position in enumerate(positions)
        if position and (position["trains"] or not trains)
    }


def _in_samples(position: Mapping[str, Any]) -> DataPosition:
    layout, epoch = LoaderLayout(**position["layout"]), position["iteration"]
    of = position["order"]["samples"]
    if position["ended"]:
        return DataPosition(epoch=epoch - 1, samples=of, of=of)
    if not layout.unit:
        return DataPosition(epoch=epoch, of=of)
    seen = layout.samples(position["taken"]) if position["within"] else 0
    return DataPosition(epoch=epoch, samples=seen if of is None else min(seen, of), of=of)


def goes_on(loader: Any, epoch: int, seen: int, whole: int | None) -> str:
    """Describe the rest of an epoch that goes on behind what was seen."""
    layout = LoaderLayout.of(loader)
    if whole is None:
        return f"goes on in epoch {epoch} behind the {seen} {layout.unit} seen"
    rest = max(0, whole - seen)
    text = f"goes on in epoch {epoch} behind the {seen} of {whole} {layout.unit} seen"
    text += f": the {rest} others once each"
    if drops_last(loader) and (dropped := rest % layout.per_step):
        text += f", but for the last {dropped}, which drop_last leaves out"
    if added := padding(loader, rest):
        text += f", and {added} of them twice, which fills up the last batches"
    return text


def change_of_order(before: Mapping[str, Any], now: Mapping[str, Any], seen: int) -> str:
    """Describe what a changed data set or sampler comes to in the middle of an epoch."""
    text = f"there were {_described(before)} when it was saved, and are {_described(now)} now"
    if before["type"] == now["type"] == SequentialSampler.__qualname__:
        return f"{text}: those behind the {seen} seen follow in their order, new ones included"
    whole = 2 * seen if now["samples"] is None else now["samples"]
    return (
        f"{text}: of the {seen} samples seen, up to {min(seen, max(0, whole - seen))} are seen twice, and of "
        f"the others up to {min(seen, whole)} never in this epoch. To avoid it, change them between epochs"
    )


def _described(order: Mapping[str, Any]) -> str:
    samples = "an unknown number of" if order["samples"] is None else order["samples"]
    return f"{samples} samples in the order of {order['type']}"


# Called once per batch, after it was fetched and before it is handed out.
_SEAM = "_update_state_dict"
_DISPATCHER_SEAM = "slice_fn"
_ITERATOR = "__iter__"


@final
@dataclass(kw_only=True, slots=True)
class LoaderEpoch:
    """An epoch that a loader, or a copy of it, is in.

    Attributes:
        skipped: fetches that its batch sampler skips.
        count: batches that came to the user until now, and those that the loader itself skips.
        before: how much of each order was seen before it began; empty for nothing.
        rng: random state to be put back right before the first batch, or at the end if there is none.
        at_edge: whether that state was put back at the beginning already.
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
            fetched = None if saved is None else saved.position["batches"] * self._layout.fetches
            skip_batches_of_the_users(copy, self._loader, fetched=fetched)

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
        left = saved is not None and saved.position["left"] and original and not _is_stateful(loader)
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
        if epoch.start["anew"] and self._reentry is not None:
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
        self.trains = position["trains"]
        start, within = position["start"], position["within"]
        self._made, prepared = position["made"], start["prepared"]
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
        if position["ended"] and self.trains and _is_stateful(self._loader):
            number = position["iteration"]
            return [
                f"data loader {index} was saved at the last batch of epoch {number - 1}: it goes on with "
                f"epoch {number}, which a loop that begins epoch {number - 1} again takes for that"
            ]
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
        epoch.start = saved.position["start"]
        if not (has_state and epoch.start["prepared"]):
            epoch.start = rewind(self._loader, epoch.start)
        if stateful and not has_state:
            _forget_state(self._loader.base_dataloader)
        if has_state:
            epoch.skipped = saved.position["batches"] * self._layout.fetches
        elif saved.is_rest(copy=not original, stateful=stateful):
            if not self.copies.get(loader):
                again = [rewinding(self._loader, epoch.start, saved.position)] if original else []
                undo = place_rest(loader, saved.cuts, sampler=saved.sampler, rewinds=again)
                self._undo += [undo] if original else []
            epoch.skipped, epoch.before = 0, saved.position["taken"]
            saved.set_remainder(loader, self._loader)
        else:
            as_seen = saved.as_saved and epoch.skipped == saved.position["batches"]
            self._draws.first = saved.position["before"] if as_seen else None
            self._tell_of_another_position(epoch, saved)

    def _load_own_state(self, saved: Saved) -> None:
        """Load a stateful loader's own state, if it is of this rank and layout."""
        loader, base = self._loader, self._loader.base_dataloader
        _forget_state(base)
        if not saved.has_state or (saved.position["ended"] and isinstance(loader.dataset, IterableDataset)):
            return  # a stream that has ended would begin the next epoch at its end
        state, start = saved.position["state"], saved.position["start"]
        if not start["prepared"]:
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
        batches = saved.position["batches"]
        if saved.as_saved and (saved.position["left"] or skipped == batches):
            return
        taken = f"{sum(saved.position['taken'])} {self._layout.unit}"
        seen = f"{batches} batches" if saved.as_saved else taken
        does = f"skips {skipped} batches" if skipped else "begins this epoch again"
        _logger.warning(
            "data loader %d was saved after %s of epoch %d, and %s: give the loop "
            "accelerator.skip_first_batches(loader, %d), unless the script itself passes over them",
            saved.index,
            seen,
            saved.position["iteration"],
            does,
            batches,
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


_states = cast("Any", GradientState)
_BEGIN, _END = _states._add_dataloader, _states._remove_dataloader

_followers: WeakSet[Loaders] = WeakSet()


@final
class Loaders:
    """The data loaders of one accelerator. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._tracked: dict[int, TrackedLoader] = {}
        for loader in accelerator._dataloaders:
            self.track(loader)

    def prepare(self, prepare: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the host prepare a loader, and track what it makes."""
        before = Prepared.before(data_loader)
        loader = prepare(data_loader, *args, **kwargs)
        if id(loader) not in self._tracked:
            self.track(loader)
            tracked = self._tracked.get(id(loader))
            if tracked is not None:
                tracked.made_after(before)
        return loader

    def track(self, loader: Any) -> None:
        """Track a prepared loader from now on; idempotent."""
        if isinstance(loader, DataLoaderStateMixin) and id(loader) not in self._tracked:
            self._tracked[id(loader)] = TrackedLoader(loader)
            _followers.add(self)
            _follow()

    def track_copy(self, original: Any, copy: Any) -> None:
        """Track a copy by `skip_first_batches`, which finishes the same epoch."""
        tracked = self._find(original)
        if tracked is not None and isinstance(copy, DataLoaderStateMixin):
            tracked.adopt(copy)

    def note_step(self) -> None:
        """Note that the loaders that iterate had batches for an optimizer step."""
        for loader in self._accelerator.gradient_state.dataloader_references:
            tracked = self._find(loader)
            if tracked is not None:
                tracked.trains = True

    def positions(self) -> list[dict[str, Any]]:
        """Return a plain value for every loader, in the order of their preparation."""
        return [
            {} if tracked is None else tracked.position()
            for tracked in (self._tracked.get(id(loader)) for loader in self._accelerator._dataloaders)
        ]

    def restore(
        self, positions: Sequence[Mapping[str, Any]], rng: Mapping[str, Any], *, same_ranks: bool
    ) -> list[str]:
        """Put every loader back to its saved position; return notes for the user."""
        pairs = [
            (index, tracked, position)
            for index, (loader, position) in enumerate(
                zip(self._accelerator._dataloaders, positions, strict=False)
            )
            if (tracked := self._tracked.get(id(loader))) is not None and position
        ]
        training = [tracked for _, tracked, position in pairs if position["trains"]]
        within = [tracked for _, tracked, position in pairs if position["within"]]
        # An evaluation that a save interrupts begins again; the training goes on.
        again = [tracked for tracked in within if tracked in training] or within[-1:]
        reentry = Reentry(rng=rng, at_edge=() if again else training or [each for _, each, _ in pairs])
        notes: list[str] = []
        for index, tracked, position in pairs:
            notes += tracked.restore(
                index, position, reentry, goes_on=tracked in again, same_ranks=same_ranks
            )
        load_rng_state(rng)  # of which the iterators that were made here have drawn
        return notes

    def begun(self, loader: Any) -> None:
        """Note that a loader, perhaps a copy or another's, begins an epoch."""
        tracked = self._find(loader)
        if tracked is None:
            tracked = next((each for each in self._tracked.values() if each.is_origin_of(loader)), None)
            if tracked is None:
                return
            tracked.adopt(loader)
        tracked.begun(loader)

    def ended(self, loader: Any) -> None:
        """Note that a loader has ended an epoch."""
        tracked = self._find(loader)
        if tracked is not None:
            tracked.ended(loader)

    def release(self) -> None:
        """Stop tracking every loader."""
        for tracked in self._tracked.values():
            tracked.release()
        self._tracked.clear()
        _followers.discard(self)
        if not _followers:
            _states._add_dataloader, _states._remove_dataloader = _BEGIN, _END

    def _find(self, loader: Any) -> TrackedLoader | None:
        """Return what tracks a loader, or the one that it is a copy of."""
        of_copies = (each for each in self._tracked.values() if loader is not None and loader in each.copies)
        return self._tracked.get(id(loader)) or next(of_copies, None)


def _follow() -> None:
    """Hear of every loader that begins or ends an epoch; idempotent.

    Every loader calls these methods, also a copy by the function `accelerate.skip_first_batches`, of which
    nothing else tells. On an instance they would be pickled with every loader.
    """
    _states._add_dataloader, _states._remove_dataloader = _begun, _ended


@functools.wraps(_BEGIN)
def _begun(state: Any, loader: Any) -> None:
    _BEGIN(state, loader)
    for each in tuple(_followers):
        each.begun(loader)


@functools.wraps(_END)
def _ended(state: Any, loader: Any) -> None:
    _END(state, loader)
    for each in tuple(_followers):
        each.ended(loader)
