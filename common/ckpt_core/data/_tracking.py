"""Tracking of a DataLoader: what each epoch began from, and how far it is.

`track` gives the loader a generated subclass of its own class, and each of its iterators one of its own:
`iter` and `next` cannot be caught at an object. Neither changes what is drawn or handed out.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, Final, NamedTuple, final
from weakref import WeakSet, ref

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpt_core._torch_internals import (
    BEGINS_AGAIN,
    MAKES_ITERATOR,
    count_as_given,
    data_ended,
    fetch_ahead,
    kept_iterator,
    let_draw_from,
)
from ckpt_core.data._hidden import (
    EPOCH,
    CountedBatches,
    Outer,
    batches_in,
    begun_untracked,
    is_stateful,
    keeps_iterator,
)
from ckpt_core.data._samplers import (
    deals_batches,
    global_state,
    load_global_state,
    load_samplers_state,
    load_starting_state,
    recipe,
    same_values,
    skip,
    starting_state,
    stream_of,
)
from ckpt_core.disclosure import logger_of

_READ_AHEAD = 16
"""Batches of one worker that hosts may have drawn and not trained on, at most."""


@final
@dataclass(frozen=True, slots=True)
class _Numbers:
    """The state of a worker's generators; opaque to the thread that pins memory."""

    worker: int
    state: Mapping[str, Any]


class _Sent(NamedTuple):
    batch: Any
    numbers: _Numbers


@final
class Seat:
    """What a loader's workers do in place of its `worker_init_fn` and `collate_fn`."""

    def __init__(self, loader: DataLoader[Any], states: Sequence[Mapping[str, Any]]) -> None:
        self._init: Any = loader.worker_init_fn
        self._collate: Any = loader.collate_fn
        self._states = states
        self._seeded: Mapping[str, Any] = {}

    def begin(self, worker: int) -> None:
        """Seed as the user does, then go on from a state."""
        if self._init is not None:
            self._init(worker)
        self._seeded = _numbers()
        if worker < len(self._states) and (state := self._states[worker]):
            load_global_state({**state, "torch": torch.tensor(bytearray(state["torch"]), dtype=torch.uint8)})

    def collate(self, samples: Any) -> Any:
        """Make a batch; send with it what comes next, if a sample has drawn from it."""
        batch, info, now = self._collate(samples), get_worker_info(), _numbers()
        if info is None or same_values(now, self._seeded):
            return batch
        return _Sent(batch, _Numbers(info.id, now))


def _numbers() -> dict[str, Any]:
    state = global_state()
    return {**state, "torch": state["torch"].numpy().tobytes()}


@final
class Drawn:
    """The generators of a loader's workers as of each of the last batches."""

    def __init__(self, states: Sequence[Mapping[str, Any]] = (), *, unknown: int = 0) -> None:
        self._past = {worker: [(0, state)] for worker, state in enumerate(states)}
        self._unknown = unknown

    def next_epoch(self, batches: int, *, whole: bool, workers: int) -> Drawn:
        """Return those of the same workers' next epoch, after so many batches.

        In one that was not whole they have read ahead, and what that came to was dropped.
        """
        states = self.at(batches)
        return Drawn(states) if whole or not (states or self._unknown) else Drawn(unknown=workers)

    def knows(self, batches: int) -> bool:
        """Return whether the states after so many batches are known."""
        return batches >= self._unknown

    def receive(self, batch: Any, number: int) -> Any:
        """Return what the loop is to see of the batch with this number, counted from 1."""
        if type(batch) is not _Sent:
            return batch
        past = self._past.setdefault(batch.numbers.worker, [(0, {})])
        past[:] = [*past[-_READ_AHEAD:], (number, batch.numbers.state)]
        return batch.batch

    def at(self, batches: int) -> list[Mapping[str, Any]]:
        found = {w: [s for number, s in past if number <= batches] for w, past in self._past.items()}
        states = [(found.get(w) or [{}])[-1] for w in range(max(found, default=-1) + 1)]
        return states if any(states) else []


_log = logger_of(__name__)
_TRACKER = "_ckpt_tracker"
_STOCK = "_ckpt_stock_class"
UNKNOWN: Mapping[str, Any] = {}
"""What an epoch began from that began untracked."""
_events = count()
_REFERENCES = 3
"""To an iterator that only its loader keeps: from the loader, a variable, and the question."""


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class Epoch:
    """One pass over a loader.

    Attributes:
        made: the state of generators when its iterator had been made; None once that has begun to draw.
        skipped: batches that were handed out before a resume.
        began: number of this event, among those of all passes; `last` is that of the last batch asked for.
        beside: a pass that has ended since, during which batches were drawn from this one.
        outlived: whether batches were drawn from such another one after the end of this one.
        first: what to do before the first batch is drawn.
        then: what to do once so many batches are drawn.
        ahead: batches that a host draws at once, ahead of the loop; 0 if it draws as the loop does.
        before: the generators before the last such draw, if that drew from them in this process.
    """

    begin: Mapping[str, Any]
    made: Mapping[str, Any] | None = None
    batches: int = 0
    skipped: int = 0
    ended: bool = False
    thread: int | None = None
    iterator: Callable[[], Any] = lambda: None
    loader: Callable[[], Any] = lambda: None
    began: int = field(default_factory=_events.__next__)
    last: int = field(default_factory=_events.__next__)
    beside: Epoch | None = None
    outlived: bool = False
    trains: bool = False
    replay: Replay | None = None
    first: Callable[[], object] | None = None
    then: tuple[int, Callable[[], object]] | None = None
    ahead: int = 0
    before: Mapping[str, Any] | None = None
    drawn: Drawn = field(default_factory=Drawn)

    @property
    def left(self) -> bool:
        """Whether no loop holds its iterator any more."""
        iterator, loader = self.iterator(), self.loader()
        kept = loader is not None and iterator is not None and kept_iterator(loader) is iterator
        return sys.getrefcount(iterator) <= _REFERENCES if kept else iterator is None

    @property
    def is_whole(self) -> bool:
        """Whether it has handed out every batch, or a pass beside it has ended since."""
        return self.beside is not None or self.has_all

    @property
    def has_all(self) -> bool:
        loader = self.loader()
        return self.ended or (loader is not None and self.batches == batches_in(loader))

    @property
    def peeked(self) -> bool:
        """Whether it was left after one batch, or none: a look, which no training is."""
        return self.batches - self.skipped <= 1 and self.left and not self.ended and not self.is_whole

    @property
    def is_before(self) -> bool:
        """Whether it trained, and so does a pass that began after its end and goes on."""
        return self.trains and any(each.trains and each.began > self.last and not each.left for each in _open)

    def draw(self) -> None:
        self.do_first()
        if self.made is not None:
            self.note_first()
        if self.beside is not None:
            self.beside.outlived, self.beside = True, None
        self.last, self.trains = next(_events), torch.is_grad_enabled()

    def do_first(self) -> None:
        first, self.first = self.first, None
        if first is not None:
            first()

    def receive(self, batch: Any, here: Mapping[str, Any] | None) -> Any:
        """Note a batch; return what the loop is to see of it."""
        loader = self.loader()
        tracker = None if loader is None else tracker_of(loader)
        if tracker is not None and tracker.restored is not None and tracker.epoch is self:
            tracker.restored = tracker.replay = None  # the loop goes on with the iterator that it had
        if here is not None:
            if (self.batches - self.skipped) % self.ahead == 0:
                self.before = None
            if self.before is None and not same_values(here, global_state()):
                self.before = here
        self.batches += 1
        self.thread = threading.get_ident()
        if self.then is not None and self.batches >= self.then[0]:
            self.do_then()
        return self.drawn.receive(batch, self.batches)

    def do_then(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then[1]()

    def end(self) -> None:
        """Note that there was none, which may end passes beside this one, too."""
        self.ended = True
        self.do_then()
        _open.discard(self)
        nothing_came = self.replay is not None and self.batches == self.skipped
        for each in _open:
            if each.last > self.began or (nothing_came and each.replay is not None):
                each.beside = self  # those that a load put back were drawn from beside this one, before it

    @property
    def data_ended(self) -> bool:
        iterator = self.iterator()
        return iterator is not None and data_ended(iterator)

    def note_first(self) -> None:
        """Note what the first index is made from, if it is not what the iterator was."""
        made, self.made, loader = self.made, None, self.loader()
        if loader is not None and not same_values(made, first := starting_state(loader)):
            self.begin = {**self.begin, "first": first, "order": recipe(loader)}


_open = WeakSet[Epoch]()
"""The passes that have not ended."""


@final
@dataclass(slots=True)
class TrainingStart:
    """What a load puts back, by `put_back`, before the first pass that trains, `by`."""

    put_back: Callable[[], object]
    by: Epoch | None = None

    @property
    def is_due(self) -> bool:
        """Whether a pass that begins now is the first with gradients, but for mere looks."""
        return torch.is_grad_enabled() and (self.by is None or self.by.peeked)

    def pass_by(self, *, draws: bool) -> None:
        """Note that another pass begins, which may draw numbers before the first one does."""
        if draws and self.by is not None and torch.is_grad_enabled():
            self.by.do_first()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How the next pass over a loader is to begin.

    Attributes:
        rest: instead of skipping, the indices of the batches to come.
        begun: whether it had drawn its first index, though perhaps none is to be skipped.
        draws: whether batches are skipped by drawing them, as they have no indices.
        own: whether the loader has loaded a state of its own, and skips by itself.
        fresh: whether the epoch is one that begins now, with workers that are there already if `begin` has
            them as created.
        taken: what every worker leaves out of its stream, instead of skipping.
        before: what the first batches are drawn from, if not the present generators.
        load: loads the state of the loader or its data set, as at the save.
    """

    begin: Mapping[str, Any]
    samplers: Mapping[str, Any]
    batches: int = 0
    begun: bool = False
    rest: Sequence[Any] | None = None
    draws: bool = False
    own: bool = False
    fresh: bool = False
    drawn: Sequence[Mapping[str, Any]] = ()
    taken: Sequence[int] | None = None
    before: Mapping[str, Any] | None = None
    load: Callable[[], object] = lambda: None


@final
class Tracker:
    """What is known of one loader. Main thread only.

    Attributes:
        created: what the iterator began from that persistent workers belong to.
        restored: the position that was put back, until the next pass begins.
        late: whether an untracked iterator was in use when tracking began.
        left: the pass that the loop had left in its middle at a save.
        leaves: whether the script begins another one after that.
        ahead: batches that a host draws at once, ahead of the loop; 0 if it draws as the loop does.
    """

    def __init__(self, *, late: bool = False) -> None:
        self.epoch: Epoch | None = None
        self.replay: Replay | None = None
        self.created: Mapping[str, Any] | None = None
        self.restored: Mapping[str, Any] | None = None
        self.reentry: TrainingStart | None = None
        self.late = late
        self.outer: Outer | None = None
        self.left: Epoch | None = None
        self.leaves = self.told = False
        self.ahead = 0

    @property
    def next(self) -> Replay | None:
        """How the next pass is to begin: as the last one, if that was no more than a look."""
        epoch = self.epoch
        looked = self.reentry is not None and epoch is not None and epoch.replay is not None and epoch.peeked
        return epoch.replay if self.replay is None and epoch is not None and looked else self.replay

    def begin(self, loader: DataLoader[Any], make: Callable[[], Any]) -> Any:
        """Make an iterator; note or replay what its order is made from."""
        with self._beginning(loader) as replay, _seated(loader, () if replay is None else replay.drawn):
            if replay is None:
                here = starting_state(loader)
                loaded = getattr(loader, "next_iter_state", None) is not None
                iterator = make()
                self._note(loader, here, again=False)
                if loaded:
                    self.epoch = Epoch(UNKNOWN)  # the loader goes on by itself, from where is not ours to see
            elif replay.own:
                here = starting_state(loader)
                iterator = make()
                load_global_state(here["global"])
                self.epoch = Epoch(replay.begin)
                self.epoch.batches = self.epoch.skipped = replay.batches
                # Torchdata's makes another one in its place: that is the epoch, and this was no look.
                self.epoch.ended = getattr(iterator, "_finished", False)
            elif replay.fresh:
                iterator = self._fresh(loader, replay, make)
            else:
                iterator = self._replayed(loader, replay, make)
            _watch(iterator, self.epoch, loader)
        return iterator

    def begin_again(self, loader: DataLoader[Any], iterator: Any, reset: Callable[[], None]) -> None:
        """Let an iterator with persistent workers begin another epoch."""
        with self._beginning(loader):
            here, last = starting_state(loader), self.epoch
            reset()
            self._note(loader, here, again=True)
            if last is not None and self.epoch is not None:
                self.epoch.drawn = last.drawn.next_epoch(
                    last.batches, whole=last.has_all, workers=loader.num_workers
                )
            _watch(iterator, self.epoch, loader)

    @contextmanager
    def _beginning(self, loader: DataLoader[Any]) -> Generator[Replay | None]:
        replay, reentry = self.next, self.reentry
        self.replay = self.restored = None
        if self.left is not None and self.left is self.epoch:
            self.leaves = True
            _log.warning(
                "a checkpoint was saved after the loop had left a %s at batch %d: its resume goes on there, "
                "but this training begins another epoch, as later checkpoints know. For short epochs give it "
                "RandomSampler(data, num_samples=...)",
                type(loader).__name__, self.left.batches,
            )  # fmt: skip
        if reentry is not None and not reentry.is_due:
            reentry.pass_by(draws=replay is None or replay.fresh)
            reentry = None
        if reentry is not None:
            reentry.put_back()
        if replay is not None:
            replay.load()
        yield replay
        if (epoch := self.epoch) is not None:
            epoch.ahead = self.ahead
            if replay is not None:
                epoch.drawn = Drawn(replay.drawn)
            epoch.replay = None if replay is None or replay.fresh else replay
            if reentry is not None:
                # Another epoch draws as it begins; the rest of one draws nothing before its first batch.
                reentry.by, epoch.first = epoch, reentry.put_back if epoch.replay else None

    def _note(self, loader: DataLoader[Any], here: Mapping[str, Any], *, again: bool) -> None:
        if not again:
            self.created = here if loader.persistent_workers else None
        begin = epoch_from(loader, here, self.created if again else None)
        # Workers have let their sampler begin already; another may have to wait until the first batch.
        self.epoch = Epoch(begin, made=None if loader.num_workers else starting_state(loader))

    def _fresh(self, loader: DataLoader[Any], replay: Replay, make: Callable[[], Any]) -> Any:
        """Begin an epoch with workers that are there, or behind some batches."""
        here, created = starting_state(loader), replay.begin["created"]
        load_starting_state(loader, created or here)
        indices = Indices(loader, before=here if created else None, replay=replay)
        with _put(loader, indices):
            iterator = make()
        indices.hand_over(iterator)
        if indices.holds:
            fetch_ahead(iterator, replay.batches)
        self.created = created
        self._note(loader, here, again=bool(created))
        if replay.batches and self.epoch is not None:
            count_as_given(iterator, replay.batches)
            self.epoch.made = None
            self.epoch.batches = self.epoch.skipped = replay.batches
        return iterator

    def _replayed(self, loader: DataLoader[Any], replay: Replay, make: Callable[[], Any]) -> Any:
        """Begin as the saved epoch did; skip what it had handed out.

        The global generators are as before afterwards: the saved training had drawn from them already.
        """
        here = global_state()
        start, created = replay.begin["start"], replay.begin["created"]
        load_starting_state(loader, created or start)
        indices = Indices(loader, before=start if created else None, replay=replay)
        data: Any = loader.dataset if replay.taken is None else rest_of_stream(loader, replay.taken)
        with _put(loader, indices), _lent(loader, {"dataset": data}):
            iterator = make()
        self.created = (created or start) if loader.persistent_workers else None
        if (replay.batches or replay.begun) and replay.begin["first"] is not None:
            load_starting_state(loader, replay.begin["first"])
        indices.hand_over(iterator)
        if indices.holds:
            fetch_ahead(iterator, replay.batches)
        if indices.holds or replay.samplers:  # others draw from the global generators with the samples
            indices.draw_ahead(iterator, self.ahead)
        if replay.draws:
            draw_and_drop(iterator, replay.batches)
        elif replay.rest is None:
            count_as_given(iterator, replay.batches)

        def go_on() -> None:
            load_global_state(here)
            load_samplers_state(loader, replay.samplers)

        go_on()
        begun = replay.batches or replay.begun or loader.num_workers or replay.rest is not None
        self.epoch = epoch = Epoch(replay.begin, made=None if begun else UNKNOWN)
        epoch.batches = epoch.skipped = replay.batches if replay.rest is None else 0
        if (before := replay.before) is not None:
            epoch.first = lambda: load_starting_state(loader, before)
            epoch.then = epoch.batches + max(1, self.ahead), go_on
        return iterator


def epoch_from(
    loader: DataLoader[Any], start: Mapping[str, Any], created: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what an epoch begins from, as plain values."""
    return {"created": created, "start": start, "first": None, "order": recipe(loader), "seen": 0}


@final
class RestOfStream(IterableDataset[Any]):
    """A stream of which every worker leaves its first elements out, in its first pass."""

    def __init__(self, whole: Any, taken: Sequence[int]) -> None:
        self.whole = whole
        self._taken = taken
        self._passes = 0  # workers that persist keep their copy of this object

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        skipped = self._taken[0 if worker is None else worker.id] if self._passes == 0 else 0
        self._passes += 1
        return islice(iter(self.whole), skipped, None)

    def __getattr__(self, name: str) -> Any:
        # Accelerate would seed its generator by the epoch; a position of its own would be another one.
        if name in {"whole", "generator", "state_dict", "load_state_dict"}:
            raise AttributeError(name)
        return getattr(self.whole, name)


def rest_of_stream(loader: DataLoader[Any], taken: Sequence[int]) -> Any:
    """Return a loader's data set, but for what was taken of its stream."""
    data: Any = loader.dataset
    rest = RestOfStream(stream_of(loader), taken)
    if not deals_batches(data):
        return rest
    shard = copy.copy(data)
    shard.dataset = rest
    return shard


@final
class Indices:
    """Stands in for a loader's index sampler while an iterator is made."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        before: Mapping[str, Any] | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._loader = loader
        self._before = before
        self._begun = 0
        self._inner: Iterator[Any] | None = None
        self._rest = None if replay is None else replay.rest
        plain = replay is None or replay.draws or replay.taken is not None or self._rest is not None
        self._to_skip = 0 if plain or replay is None else replay.batches
        self.holds = self._held = bool(loader.num_workers and self._to_skip)
        self._to_begin = not plain and replay is not None and replay.begun and not replay.batches

    def __iter__(self) -> Iterator[Any]:
        self._begun += 1
        if self._before is not None and self._begun > 1:
            # The first is made by the constructor and not used; then the seed of the workers is drawn.
            with _put(self._loader, self.sampler):
                load_starting_state(self._loader, self._before)
        self._inner = iter(self.sampler if self._rest is None else self._rest)
        return self

    def __next__(self) -> Any:
        if self._held:
            raise StopIteration  # until it is known which worker is the next one
        self.skip()
        return next(self._inner)  # type: ignore[arg-type]

    def skip(self) -> None:
        if self._to_begin and self._inner is not None:
            self._to_begin = False
            # The order is drawn with the first index, which is handed out all the same.
            self._inner = (index for part in ([next(self._inner)], self._inner) for index in part)
        count, self._to_skip = self._to_skip, 0
        if not count or self._inner is None:
            return
        skip(self._inner, 1)
        first = global_state()
        skip(self._inner, count - 1)
        if not same_values(first, global_state()):
            _log.warning(
                "%s draws random numbers while an epoch goes on, and so did the saved training in between: "
                "the rest of this epoch is another than it would have been. Let it draw from a generator "
                "of its own, or all at its beginning",
                type(self.sampler).__name__,
            )

    def hand_over(self, iterator: Any) -> None:
        """Let the iterator go on with the loader's own sampler."""
        self._held = False
        self.skip()
        let_draw_from(iterator, self.sampler, self._inner)

    def draw_ahead(self, iterator: Any, batches: int) -> None:
        """Draw indices of so many more batches, as a host had, ahead of the loop."""
        if batches and self._inner is not None:
            self._inner = chain(list(islice(self._inner, batches)), self._inner)
            let_draw_from(iterator, self.sampler, self._inner)


def _put(loader: DataLoader[Any], sampler: Any) -> AbstractContextManager[None]:
    """Give a loader another index sampler, which it would refuse."""
    return _lent(loader, {"sampler" if loader.batch_sampler is None else "batch_sampler": sampler})


def _seated(loader: DataLoader[Any], drawn: Sequence[Mapping[str, Any]] = ()) -> AbstractContextManager[None]:
    """Let workers of map-style data have a `Seat` while they are made."""
    if not loader.num_workers or isinstance(loader.dataset, IterableDataset):
        return nullcontext()
    seat = Seat(loader, drawn)
    return _lent(loader, {"worker_init_fn": seat.begin, "collate_fn": seat.collate})


@contextmanager
def _lent(loader: DataLoader[Any], values: Mapping[str, Any]) -> Generator[None]:
    before = {name: loader.__dict__[name] for name in values}
    loader.__dict__.update(values)
    try:
        yield
    finally:
        loader.__dict__.update(before)


def track(loader: DataLoader[Any]) -> Tracker:
    """Track a loader from now on; idempotent.

    Epochs that began before are unknown: see `begun_untracked`.
    """
    tracker = tracker_of(loader)
    if tracker is None:
        tracker = Tracker(late=begun_untracked(loader))
        setattr(loader, _TRACKER, tracker)
        if not hasattr(type(loader), _STOCK):
            loader.__class__ = _subclass(type(loader), _loader_overrides)
        if (kept := kept_iterator(loader)) is not None:
            epoch = Epoch(UNKNOWN)
            _watch(kept, epoch, loader)
            # Of torchdata's, which may be in the middle of an epoch; others are refused there.
            tracker.epoch = epoch if hasattr(loader, "state_dict") else None
    return tracker


def untrack(loader: DataLoader[Any]) -> None:
    vars(loader).pop(_TRACKER, None)


def tracker_of(loader: Any) -> Tracker | None:
    return getattr(loader, "__dict__", {}).get(_TRACKER)


def hidden_position(loader: Any) -> str | None:
    """Return why the present position in a loader is unknown; None if it is known."""
    if not isinstance(loader, DataLoader):
        stateful = is_stateful(loader)
        return None if stateful else "it is no torch DataLoader, and has no state_dict and load_state_dict"
    if keeps_iterator(loader):
        return "it keeps an iterator of its own for all epochs"
    tracker = tracker_of(loader)
    return None if tracker is None else _read_otherwise(tracker)


def is_iterated_already(loader: DataLoader[Any]) -> bool:
    """Return whether a loop draws from an iterator whose beginning nobody has tracked.

    It may be another's that is not used any more: what begins an epoch afterwards is tracked.
    """
    tracker = tracker_of(loader)
    known = tracker is not None and (tracker.epoch is not None or not tracker.late)
    return not known and not is_stateful(loader) and begun_untracked(loader)


def _read_otherwise(tracker: Tracker) -> str | None:
    """Return how batches are drawn other than one by one, as the loop sees them."""
    epoch, outer = tracker.epoch, tracker.outer
    if epoch is not None and epoch.thread not in {None, threading.get_ident()}:
        return "another thread draws its batches, and may be ahead of the loop"
    drawn = 0 if epoch is None else epoch.batches - epoch.skipped
    over = outer is not None and outer.ended
    if outer is None or not outer.batches or (over and epoch is not None and epoch.ended):
        return None
    if not over and outer.batches == drawn:
        return None
    return f"it has drawn {drawn} batches of this epoch for {outer.batches} that it has handed out"


def _watch(iterator: Any, epoch: Epoch | None, loader: DataLoader[Any]) -> None:
    if epoch is None:
        return
    epoch.iterator, epoch.loader = ref(iterator), ref(loader)
    _open.add(epoch)
    setattr(iterator, EPOCH, epoch)
    if not hasattr(type(iterator), _STOCK):
        iterator.__class__ = _subclass(type(iterator), _iterator_overrides)


_subclasses: dict[type[Any], type[Any]] = {}


def _subclass(stock: type[Any], overrides: Callable[[type[Any]], Mapping[str, Any]]) -> type[Any]:
    """Return a subclass with the same name, made once."""
    if stock not in _subclasses:
        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, _STOCK: stock}
        _subclasses[stock] = type(stock.__name__, (stock,), {**names, **overrides(stock)})
    return _subclasses[stock]


def _loader_overrides(stock: type[Any]) -> Mapping[str, Any]:
    make = getattr(stock, MAKES_ITERATOR)

    def make_iterator(self: Any) -> Any:
        tracker = tracker_of(self)
        return make(self) if tracker is None else tracker.begin(self, lambda: make(self))

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy and pickle as the stock class, untracked."""
        reduced: Any = super(type(self), self).__reduce_ex__(protocol)
        match reduced:
            case (_, (kind,), dict() as state, *rest) if kind is type(self):
                state = {name: value for name, value in state.items() if name != _TRACKER}
                return object.__new__, (stock,), state, *rest
            case other:
                return other

    overrides: dict[str, Any] = {MAKES_ITERATOR: make_iterator, "__reduce_ex__": reduce}
    overrides["__class__"] = property(lambda _: stock)  # which Accelerate pickles
    iterate: Any = stock.__iter__
    if str(getattr(iterate, "__module__", "")).partition(".")[0] not in {"torch", "torchdata"}:
        overrides["__iter__"] = lambda self: _counted(self, iterate(self))
    return overrides


def _counted(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    tracker = tracker_of(loader)
    if tracker is None:
        return batches
    tracker.outer = Outer()
    return CountedBatches(batches, tracker.outer)


def _iterator_overrides(stock: type[Any]) -> Mapping[str, Any]:
    reset = getattr(stock, BEGINS_AGAIN)
    draw = stock.__next__

    def draw_next(self: Any) -> Any:
        epoch = self.__dict__[EPOCH]
        epoch.draw()
        here = global_state() if epoch.ahead else None
        try:
            batch = draw(self)
        except StopIteration:
            epoch.end()
            raise
        return epoch.receive(batch, here)

    def begin_again(self: Any, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's signature
        tracker = tracker_of(loader)
        if tracker is None:
            reset(self, loader, first_iter)
        else:
            tracker.begin_again(loader, self, lambda: reset(self, loader, first_iter))

    return {"__next__": draw_next, BEGINS_AGAIN: begin_again}


_SECONDS_BETWEEN_LINES: Final = 5.0
_END: Final = object()


def draw_and_drop(iterator: Iterator[Any], batches: int) -> None:
    """Draw and drop batches; log every few seconds how far that is."""
    begun = said = time.monotonic()
    for number in range(batches):
        if next(iterator, _END) is _END:
            _log.warning("the data set ended after %d batches, but %d were to be skipped", number, batches)
            return
        if (now := time.monotonic()) - said > _SECONDS_BETWEEN_LINES:
            said, rate = now, (number + 1) / (now - begun)
            left = (batches - number - 1) / rate
            _log.warning(
                "skipped %d of %d batches, %.1f in a second; about %.0f s to go",
                number + 1, batches, rate, left,
            )  # fmt: skip
