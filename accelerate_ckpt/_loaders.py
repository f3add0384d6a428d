"""Positions of the data loaders of one accelerator.

A prepared loader has a loader of torch inside, of which `ckpt_core.data` keeps the position: what the order
of an epoch is drawn from, and how much of it all ranks have taken. What is Accelerate's own is here: it
fetches ahead of the loop; the script says where a resumed epoch goes on, by `skip_first_batches`; and a
resumed loop makes an iterator, which draws from the global generators after `load_state` has put them back:

    save        epoch, the position, the loaders that have trained
    load        the same; the next iterator of the loader goes on from there
    its start   puts the generators back, and takes the script at its word

On another number of ranks, or with another batch size, that epoch is the rest of the order.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final
from weakref import WeakKeyDictionary, WeakSet

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderStateMixin, SkipBatchSampler
from accelerate.state import GradientState
from torch.utils.data import IterableDataset, RandomSampler

from ckpt_core.data import LoaderPosition, batches_in, in_samples, tell_of_missing, track, untrack
from ckpt_core.disclosure import logger_of
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.types import DataPosition

_logger = logger_of(__name__)


def base_of(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def fetches_of(loader: Any) -> int:
    """Return how many batches a loader fetches for one of the loop's."""
    if not isinstance(loader, DataLoaderDispatcher) or loader.split_batches or loader.submesh_tp is not None:
        return 1
    state: Any = loader.state
    return int(state.num_processes)


def position_of(loader: Any) -> LoaderPosition:
    if base_of(loader) is loader:
        return LoaderPosition(loader)
    datasets = sys.modules.get("datasets")  # of which every rank may read files of its own
    by_files = datasets is not None and isinstance(loader.dataset, datasets.IterableDataset)
    shared = isinstance(loader, DataLoaderDispatcher) or not by_files
    return LoaderPosition(base_of(loader), ahead=fetches_of(loader), shared=shared)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A saved position of one loader, that its next epoch begins from.

    Attributes:
        goes_on: whether that is the rest of the one within which it was saved.
        rng: the random state of the load, until one of the loaders that may has gone on from it.
    """

    index: int
    position: Mapping[str, Any]
    same_ranks: bool
    goes_on: bool
    rng: list[Mapping[str, Any]]


@final
class TrackedLoader:
    """One prepared loader, and the copies of it that skip batches. Main thread only.

    Copies get the original's inner loader when they begin, so that there is one position.
    """

    def __init__(self, loader: Any) -> None:
        self.trains = self._told = False
        self.copies: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._loader = loader
        self._position = position_of(loader)
        self._tracker = track(loader.base_dataloader)
        self._made_early = self._tracker.epoch
        self._active: Any = None
        self._saved: Saved | None = None
        self._passed_over: tuple[Saved, Mapping[str, Any]] | None = None

    def is_origin_of(self, loader: Any) -> bool:
        """Return whether `skip_first_batches` has made a loader from this one."""
        base = self._loader.base_dataloader
        if isinstance(base.dataset, IterableDataset):
            return loader.dataset is base.dataset and loader.skip_batches > 0
        return any(each.batch_sampler is _batches_of(base) for each in _skips_of(loader))

    def begun(self, loader: Any) -> None:
        """Note that the loader, or a copy of it, begins an epoch; lead it to its place."""
        saved, self._saved, self._active = self._saved, None, loader
        skipped = self._skipped_by(loader)
        if isinstance(loader, DataLoaderDispatcher):
            loader.submesh_tp = self._loader.submesh_tp  # stock forgets it in a copy
        if saved is None or self._tracker.restored is None:
            # None was loaded; or the loop went on behind that, with the iterator that it had.
            loader.base_dataloader = self._loader.base_dataloader
            if skipped and not self._is_stream:
                self._position.skip(skipped)
            return
        found = saved.position["batches"]
        if not self._is_stream and skipped == found * fetches_of(loader):
            skipped = found  # a script that counts the fetches of a dispatcher, as stock does
        rng = saved.rng.pop() if saved.rng else rng_state()
        load_rng_state(rng)
        if not saved.goes_on and skipped:
            self._begin_behind_edge(loader, skipped, saved, rng)
            return
        loader.base_dataloader, loader.skip_batches = self._loader.base_dataloader, 0
        if saved.goes_on:
            self._go_on(loader, skipped, saved)

    @property
    def _is_stream(self) -> bool:
        return isinstance(self._loader.dataset, IterableDataset)

    def _skipped_by(self, loader: Any) -> int:
        if loader is self._loader:
            return 0
        if loader not in self.copies:
            self.copies[loader] = sum(each.skip_batches for each in _skips_of(loader)) or loader.skip_batches
        return self.copies[loader]

    def _begin_behind_edge(self, loader: Any, skipped: int, saved: Saved, rng: Mapping[str, Any]) -> None:
        """Skip a part of the epoch after the saved one, or pass over that."""
        whole, fetches = batches_in(self._loader), fetches_of(self._loader)
        self._passed_over = saved, rng
        if whole is not None and skipped >= whole:
            if isinstance(loader, DataLoaderDispatcher) and (skips := _skips_of(loader)):
                # A dispatcher without any batch raises: it fetches its last ones, and hands out none.
                skips[0].skip_batches, loader.skip_batches = (whole - 1) * fetches, 1
            return
        if whole is not None:
            _logger.warning(
                "the checkpoint was saved at the end of an epoch, and the script skips %d of the %d batches "
                "of the next one: unless that is meant, compute the number from the length of an epoch as it "
                "is now",
                skipped,
                whole,
            )
        loader.base_dataloader = self._loader.base_dataloader
        if not self._is_stream:
            self._position.skip(skipped * fetches)

    def _go_on(self, loader: Any, skipped: int, saved: Saved) -> None:
        """Go on within an epoch: behind what was seen, or where the script says."""
        original, position, tracker = loader is self._loader, saved.position, self._tracker
        state, batches = position["loader"], position["batches"]
        stateful, replay = _is_stateful(self._loader), tracker.replay
        if replay is None:
            return  # it begins again, as the load has said
        is_rest = replay.rest is not None or replay.taken is not None
        elsewhere = is_rest or not saved.same_ranks  # where the script's number has another meaning
        if (original and stateful) or (not original and (elsewhere or skipped == batches)):
            if is_rest and loader.remainder >= 0 and self._position.left is not None:
                loader.remainder = self._position.left % loader.total_batch_size
            return
        if position["left"] and original:
            self._position.restore({**state, "ended": True}, same_ranks=saved.same_ranks)
            return
        _logger.warning(
            "data loader %d was saved after %d batches of epoch %d, and %s: give the loop "
            "accelerator.skip_first_batches(loader, %d), unless the script itself passes over them",
            saved.index,
            batches,
            position["iteration"],
            f"skips {skipped} batches" if skipped else "begins this epoch again",
            batches,
        )
        behind: dict[str, Any] = {"batches": skipped * fetches_of(self._loader), "before": None, "drawn": []}
        begin = {**state["begin"], "seen": 0}
        self._position.restore({**state, **behind, "begin": begin}, same_ranks=saved.same_ranks)

    def ended(self, loader: Any) -> None:
        if self._active is not loader:
            return
        passed_over, epoch = self._passed_over, self._tracker.epoch
        self._active = self._passed_over = None
        skipped = self.copies.get(loader, 0) * fetches_of(self._loader)
        given = self._tracker.restored is None and epoch is not None and epoch.batches > skipped
        if passed_over is None or given:
            self._loader.iteration = loader.iteration  # a copy finishes the original's epoch
            return
        # There was nothing of the saved epoch: what comes next goes on from the load.
        self._saved, rng = passed_over
        self._put_back(self._saved)
        load_rng_state(rng)

    def position(self) -> dict[str, Any]:
        if self._saved is not None and self._tracker.restored is not None:
            return {**self._saved.position, "trains": self.trains}
        self._tell_of_thread()
        active, epoch = self._active, self._tracker.epoch
        ended = active is not None and bool(active.end_of_dataloader)
        within = active is not None and not ended and epoch is not None
        own = active.state_dict() if active is not None and within and _is_stateful(self._loader) else None
        state = self._position.state(ended=not within, own=own)
        order = (state["begin"] or {}).get("order") or {}
        alone = epoch is self._made_early and self._loader.num_workers > 0 and state["shards"] > 1
        return {
            "iteration": (self._loader if active is None else active).iteration + int(ended),
            "within": within,
            "ended": ended,
            "left": within and epoch is not None and epoch.left,
            "trains": self.trains,
            "batches": self._position.handed_out // fetches_of(self._loader) if within else 0,
            "each_ranks_own": within and alone and order.get("type") == RandomSampler.__qualname__,
            "batch_size": self._position.named_size,
            "of": self._position.samples,
            "loader": state,
        }

    def restore(
        self,
        index: int,
        position: Mapping[str, Any],
        rng: list[Mapping[str, Any]],
        *,
        goes_on: bool,
        same_ranks: bool,
    ) -> list[str]:
        """Go back to a position; return notes."""
        self._loader.iteration = position["iteration"]
        self.trains = position["trains"]
        goes_on = goes_on and position["within"]
        self._saved = Saved(index=index, position=position, same_ranks=same_ranks, goes_on=goes_on, rng=rng)
        found = self._put_back(self._saved)
        notes = found if goes_on else []
        size, now = position["batch_size"], self._position.named_size
        if position["ended"] and self.trains and _is_stateful(self._loader):
            number = position["iteration"]
            notes.append(
                f"it was saved at the last batch of epoch {number - 1}: it goes on with epoch {number}, "
                f"which a loop that begins epoch {number - 1} again takes for that"
            )
        if goes_on and position["each_ranks_own"] and self._position.dealt is not None:
            notes.append(
                "but each of the ranks has drawn the order of this epoch by itself, in prepare(), as "
                "stateful loaders with workers do in Accelerate: unless all ranks were seeded alike before "
                "it, up to as many samples as were seen come twice in it and as many never, as without a "
                "resume"
            )
        if goes_on and size != now:
            notes.append(
                f"it makes batches of {now} now, and made batches of {size}: learning rate schedules count "
                "batches, and go on from their own count"
            )
        return [f"data loader {index}, epoch {position['iteration']}: {note}" for note in notes]

    def _put_back(self, saved: Saved) -> list[str]:
        state = saved.position["loader"]
        if saved.position["within"] and not saved.goes_on:
            state = {**state, "ended": True}
        return self._position.restore(state, same_ranks=saved.same_ranks)

    def release(self) -> None:
        untrack(self._loader.base_dataloader)
        self.copies.clear()

    def _tell_of_thread(self) -> None:
        epoch = self._tracker.epoch
        if epoch is not None and epoch.thread not in {None, threading.get_ident()} and not self._told:
            self._told = True
            _logger.warning(
                "another thread draws the batches of a %s, and may be ahead of the loop: the position that "
                "is saved is that of the thread, so that a resume in the middle of an epoch passes over what "
                "was drawn ahead. Save between epochs, or let the loop draw its batches itself",
                type(self._loader).__name__,
            )


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _batches_of(base: Any) -> Any:
    return base.sampler if base.batch_sampler is None else base.batch_sampler


def _skips_of(loader: Any) -> list[SkipBatchSampler]:
    found, each = list[SkipBatchSampler](), _batches_of(loader)
    while isinstance(each, SkipBatchSampler):
        found.append(each)
        each = each.batch_sampler
    return found


def positions_in_samples(positions: Sequence[Mapping[str, Any]]) -> dict[str, DataPosition]:
    """Return saved positions counted in samples of all ranks, of loaders that train."""
    trains = any(position and position["trains"] for position in positions)
    return {
        "dataloader" if len(positions) == 1 else f"dataloader.{index}": found
        for index, position in enumerate(positions)
        if position and (position["trains"] or not trains) and (found := _in_samples(position)) is not None
    }


def _in_samples(position: Mapping[str, Any]) -> DataPosition | None:
    epoch, of = position["iteration"] - int(position["ended"]), position["of"]
    if not (position["within"] or position["ended"]):
        return DataPosition(epoch=epoch, samples=0, of=of)
    return in_samples(position["loader"], of=of, epoch=epoch)


_states = cast("Any", GradientState)
_BEGIN, _END = _states._add_dataloader, _states._remove_dataloader

_followers: WeakSet[Loaders] = WeakSet()


@final
class Loaders:
    """The data loaders of one accelerator. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._tracked: dict[int, TrackedLoader] = {}
        self._asks = 2
        for loader in accelerator._dataloaders:
            self.track(loader)

    def prepare(self, prepare: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        with _tracked_as_made():
            loader = prepare(data_loader, *args, **kwargs)
        self.track(loader)
        return loader

    def track(self, loader: Any) -> None:
        if isinstance(loader, DataLoaderStateMixin) and id(loader) not in self._tracked:
            self._tracked[id(loader)] = TrackedLoader(loader)
            _followers.add(self)
            _states._add_dataloader, _states._remove_dataloader = _begun, _ended

    def note_step(self) -> None:
        for loader in self._accelerator.gradient_state.dataloader_references:
            tracked = self._find(loader)
            if tracked is not None:
                tracked.trains = True

    def positions(self) -> list[dict[str, Any]]:
        if self._asks:
            missing = not self._accelerator._dataloaders and tell_of_missing("it to accelerator.prepare(...)")
            self._asks = self._asks - 1 if missing else 0
        return [
            {} if tracked is None else tracked.position()
            for tracked in (self._tracked.get(id(loader)) for loader in self._accelerator._dataloaders)
        ]

    def restore(
        self,
        positions: Sequence[Mapping[str, Any]],
        own: Sequence[Mapping[str, Any]] | None,
        rng: Mapping[str, Any],
    ) -> list[str]:
        """Put every loader back to its saved position; return notes for the user.

        Args:
            positions: those of the first rank, which alone fetches for a dispatcher.
            own: those of this rank, if as many have saved.
            rng: the random state to go on from.
        """
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
        may, once = again or training or [each for _, each, _ in pairs], [rng]
        notes: list[str] = []
        for index, tracked, first in pairs:
            position = first if own is None else {**first, "loader": own[index]["loader"]}
            notes += tracked.restore(
                index,
                position,
                once if tracked in may else [],
                goes_on=tracked in again,
                same_ranks=own is not None,
            )
        load_rng_state(rng)  # of which the iterators that were made here have drawn
        return notes

    def begun(self, loader: Any) -> None:
        tracked = self._find(loader)
        if tracked is None:
            tracked = next((each for each in self._tracked.values() if each.is_origin_of(loader)), None)
        if tracked is not None:
            tracked.begun(loader)

    def ended(self, loader: Any) -> None:
        tracked = self._find(loader)
        if tracked is not None:
            tracked.ended(loader)

    def release(self) -> None:
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


@contextmanager
def _tracked_as_made() -> Generator[None]:
    """Track stateful loaders that are made meanwhile before they make an iterator.

    Accelerate asks them for their state, and an order may be drawn for that.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        yield
        return
    stock = StatefulDataLoader.state_dict

    def state_dict(self: Any) -> dict[str, Any]:
        track(self)
        return stock(self)

    StatefulDataLoader.state_dict = state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        StatefulDataLoader.state_dict = stock  # type: ignore[method-assign]


# Every loader calls these methods, also a copy by the function `accelerate.skip_first_batches`, of which
# nothing else tells. On an instance they would be pickled with every loader.
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
