"""The position in one loader: saved as plain values, put back on any ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from ckpt_core._torch_internals import kept_iterator, let_go_of_kept
from ckpt_core.coordination import place_in_job
from ckpt_core.data._hidden import batches_in, is_stateful
from ckpt_core.data._samplers import (
    Samplers,
    batches_of,
    deals_batches,
    length_of,
    load_samplers_state,
    load_starting_state,
    other_seeds,
    recipe,
    same_recipe,
    samplers_state,
    samples_of,
    starting_state,
    style_of,
)
from ckpt_core.data._tracking import (
    UNKNOWN,
    Replay,
    Tracker,
    TrainingStart,
    epoch_from,
    hidden_position,
    is_iterated_already,
    track,
    tracker_of,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.types import DataPosition


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """An epoch's samples in the order in which all ranks together see them.

    Ranks take samples in turn: rank r of W takes r, r + W, r + 2 W, …, as `DistributedSampler` deals them.
    After n batches of B on each of W ranks, the first n * B * W have been seen: exactly this number is the
    position, whatever W and B become.

        order = EpochOrder(samples=permutation, seen=n * B * W)
        order.share(rank, world_size)   # what this rank sees in the rest of the epoch

    Attributes:
        samples: indices of the whole epoch, each once, without padding.
        seen: how many of them are done.
        drop_last: whether the last samples are dropped, instead of the first repeated, if ranks would get
            unequal numbers of them.
    """

    samples: Sequence[Any]
    seen: int
    drop_last: bool = False

    @property
    def rest(self) -> Sequence[Any]:
        """The samples of the epoch that no rank has seen."""
        return self.samples[self.seen :]

    def padding(self, shards: int) -> int:
        """Return how many samples are repeated, or if negative dropped, at the end."""
        over = len(self.rest) % shards
        if not over:
            return 0
        return -over if self.drop_last else shards - over

    def share(self, shard: int, shards: int) -> list[Any]:
        """Return what one of `shards` equal shards sees in the rest of the epoch."""
        rest, padding = list(self.rest), self.padding(shards)
        if padding < 0:
            del rest[padding:]
        while padding > 0:
            rest += self.samples[:padding]
            padding -= len(self.samples)
        return rest[shard::shards]


_log = logger_of(__name__)
_MARK = "ckpt_position"
_VERSION = 1


@final
class LoaderPosition:
    """The position in one loader. Main thread only; every rank has its own.

    Make it before the loader is iterated. Saving draws nothing and changes nothing. After `restore` the next
    `iter` gives the rest of the epoch, and puts the global generators back to what they were before it: so
    load those in any order. If the saved epoch had ended, the next `iter` begins a new one, as usual.

    Args:
        loader: a torch DataLoader, or an object with `state_dict` and `load_state_dict`.
        ahead: for a host that draws ahead of the loop, how many batches it draws at once; it says itself when
            an epoch is over.
        shared: whether ranks that such a host does not deal samples to see the same ones, or have them from
            one that draws for all.

    Attributes:
        ahead: as given.
        dealt: batches done, as if of this size, and to come, after a `restore` on other ranks.
        left: samples, or batches of the user's, that all ranks share, after that.

    Raises:
        ConfigError: it has no position that could be saved, or is iterated already, without such a host.
    """

    def __init__(self, loader: Any, *, ahead: int = 0, shared: bool = False) -> None:
        self._loader = loader
        self._stateful = is_stateful(loader)
        self._tracked = isinstance(loader, DataLoader)
        self.dealt: tuple[int, int] | None = None
        self.left: int | None = None
        self.ahead, self._shared = ahead, shared
        if not ahead:
            self._require_visible(begins=tracker_of(loader) is not None)
        if self._tracked:
            tracker = track(loader)
            tracker.ahead = ahead
            if tracker.epoch is not None:
                tracker.epoch.ahead = ahead

    def _require_visible(self, *, begins: bool) -> None:
        """Refuse a loader that hides its position.

        `begins` tells whether an epoch that is to count may still begin.
        """
        why = hidden_position(self._loader)
        if why is None and self._tracked and not begins and is_iterated_already(self._loader):
            why = "it is being iterated already, and what its order was made from is unknown"
        if why is not None:
            raise ConfigError(
                f"a {type(self._loader).__name__} cannot tell its position, so a resumed run would see other "
                f"data: {why}. So use a torch DataLoader, handed over before the loop and read by it alone; "
                "give it state_dict and load_state_dict; or leave it out"
            )

    @property
    def replayable(self) -> bool:
        """Whether a batch that was drawn may be counted as not seen."""
        return self._tracked and self._kind() in {"indices", "draw"}

    @property
    def handed_out(self) -> int:
        """Batches of this epoch that are not ahead of the loop, for such a host."""
        epoch = track(self._loader).epoch
        if epoch is None:
            return 0
        fetched = epoch.batches - epoch.skipped
        return epoch.skipped + max(0, -(-fetched // self.ahead) - 1) * self.ahead

    def state(
        self,
        *,
        ended: bool | None = None,
        ahead: int = 0,
        kept: bool = False,
        own: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the position as plain values, for `encode`.

        Args:
            ended: whether the epoch is over, so that the next `iter` is to begin another; if None, it is
                after a `StopIteration`.
            ahead: batches that were drawn, but not trained on yet.
            kept: whether the caller saves those itself, to train on after a resume on the same ranks.
            own: the loader's own state, if a host has it of before it drew ahead.

        Raises:
            ConfigError: the loop does not see batches as they are drawn, so that the position is unknown.
        """
        if not self.ahead:
            self._require_visible(begins=ended is not None)
        tracker = tracker_of(self._loader)
        if tracker is not None and tracker.restored is not None:
            return dict(tracker.restored)
        kind = self._kind()
        state: dict[str, Any] = {_MARK: _VERSION, "kind": kind}
        if self._tracked:
            state |= self._tracked_state(ended=ended, ahead=ahead, kept=kept)
        if (
            kind == "own"
            and not ended
            and not state.get("exhausted")
            # Of workers that have ended an epoch and live on, torchdata's state loses the next one.
            and not (state.get("ended") and _has_live_workers(self._loader))
        ):
            state["own"] = dict(self._loader.state_dict() if own is None else own)
        elif self._has_stream and (ended or not self.ahead):
            # Also after a part of it that was an epoch by a limit: the data set itself knows how it goes on.
            state["dataset"] = self._loader.dataset.state_dict()
            epoch = track(self._loader).epoch
            state["exhausted"] |= not state["ended"] and epoch is not None and epoch.data_ended
        return state

    def in_samples(self, state: Mapping[str, Any], *, epoch: int | None = None) -> DataPosition | None:
        """Return what `state` says, counted in samples of all ranks; None if unknown."""
        return in_samples(state, of=self.samples if state.get("ended") else None, epoch=epoch)

    @property
    def samples(self) -> int | None:
        """Samples in an epoch that begins now, if they are known."""
        try:
            order = recipe(self._loader) if self._tracked else None
        except Exception:  # noqa: BLE001 - the user's `__len__` raises; a save must not fail for a fact about it
            order = None
        return None if order is None else order["samples"]

    @property
    def named_size(self) -> int | None:
        """What the loader, or its batch sampler, calls its `batch_size`."""
        return Samplers.of(self._loader).named_size

    @property
    def keeps_own_state(self) -> bool:
        """Whether the position is a state of the loader's own."""
        return self._kind() == "own"

    @property
    def is_new(self) -> bool:
        return track(self._loader).epoch is None

    @property
    def per_batch(self) -> int:
        """Samples, or batches of the user's, that all ranks take with one batch each."""
        samplers = Samplers.of(self._loader)
        return (samplers.batch_size or 1) * samplers.shards[1]

    @property
    def seen(self) -> int:
        """Samples that all ranks had seen of the epoch that a `restore` goes on with."""
        tracker = track(self._loader)
        return 0 if tracker.replay is None or tracker.restored is None else _seen_in(tracker.restored)

    @property
    def to_come(self) -> int | None:
        """Batches of the next pass, after a `restore`; None if unknown."""
        if self.dealt is not None:
            return self.dealt[1]
        replay, whole = track(self._loader).replay, batches_in(self._loader)
        return None if whole is None else max(0, whole - (0 if replay is None else replay.batches))

    def _kind(self) -> str:
        if not self._tracked:
            return "own"
        loader, tracker = self._loader, tracker_of(self._loader)
        mapped = not isinstance(loader.dataset, IterableDataset)
        if self._stateful and not (mapped and not is_stateful(loader.dataset)):
            return "own"
        if self._stateful and tracker is not None and tracker.epoch is not None:
            return "own" if tracker.epoch.begin is UNKNOWN else "indices"
        if mapped:
            return "indices"
        return "dataset" if self._has_stream and not self.ahead else "draw"

    @property
    def _has_stream(self) -> bool:
        """Whether the data set is a stream in this process, with a state of its own."""
        loader = self._loader
        stream = self._tracked and isinstance(loader.dataset, IterableDataset)
        return stream and loader.num_workers == 0 and is_stateful(loader.dataset)

    def _tracked_state(self, *, ended: bool | None, ahead: int, kept: bool) -> dict[str, Any]:
        loader, tracker = self._loader, track(self._loader)
        epoch = tracker.epoch
        if self.ahead and epoch is not None and not ended:
            ahead = epoch.batches - self.handed_out
            if epoch.before is not None and self._kind() != "indices":
                self._tell(
                    "samples of a %s draw random numbers where it fetches ahead of the loop: after a resume "
                    "in the middle of an epoch they draw others. Seed them by sample, or save between epochs"
                )
        elif epoch is not None and epoch.ended:
            ahead = 0  # what was drawn ahead has nothing of this loader
        stream = isinstance(loader.dataset, IterableDataset) and is_stateful(loader.dataset)
        if ended and stream and _has_live_workers(loader) and epoch is not None and not epoch.ended:
            self._tell(
                "the persistent workers of a %s have read ahead of an epoch that a limit ended, only they "
                "know how far: a resume from here begins its stream again. Give it persistent_workers=False"
            )
        over = self._is_over(tracker) if ended is None else ended
        samplers = Samplers.of(loader)
        shard, shards = samplers.shards
        return {
            "batches": 0 if epoch is None else max(0, epoch.batches - (0 if kept else ahead)),
            "ahead": ahead if kept else 0,
            "begun": epoch is not None and epoch.batches > 0,
            "ended": over,
            "exhausted": epoch is not None and not over and epoch.ended and not self.ahead,
            "begin": None if epoch is None or over else dict(epoch.begin),
            "leaves": tracker.leaves,
            "created": tracker.created if _has_live_workers(loader) else None,
            "drawn": self._drawn(tracker, over=over, ahead=0 if kept else ahead),
            "before": None if epoch is None or over else epoch.before,
            "samplers": samplers_state(loader, of_next=over),
            "known": self._order_is_shared,
            "shard": shard,
            "shards": shards,
            "batch_size": samplers.batch_size,
            "named_size": samplers.named_size,
            "workers": loader.num_workers,
            "world_size": place_in_job()[1],
        }

    @property
    def _order_is_shared(self) -> bool:
        """Whether all ranks, if there are others, take their samples from one stream."""
        return self._shared or place_in_job()[1] == 1 or deals_batches(self._loader.dataset)

    def _drawn(self, tracker: Tracker, *, over: bool, ahead: int) -> list[Mapping[str, Any]]:
        """Return the random numbers of workers that live on after a resume."""
        epoch, loader = tracker.epoch, self._loader
        if epoch is None or (over and not _has_live_workers(loader)):
            return []
        drawn, batches = epoch.drawn, epoch.batches - ahead
        if over:
            drawn = drawn.next_epoch(batches, whole=epoch.has_all, workers=loader.num_workers)
        if not drawn.knows(0 if over else batches):
            self._tell(
                "the persistent workers of a %s draw random numbers, and have read ahead of an epoch that a "
                "limit ended, only they know how far: a resume from here draws others in them. Give it "
                "persistent_workers=False"
            )
        return drawn.at(batches)

    def _is_over(self, tracker: Tracker) -> bool:
        """Return whether the next `iter` of a script that goes on begins another epoch."""
        epoch = tracker.epoch
        if epoch is None:
            return True
        if epoch.outlived:
            self._tell(
                "a %s has ended while a longer loader beside it goes on: a resume begins it again, and "
                "neither as itertools.cycle nor as zip_longest does. Call iter() whenever it has ended"
            )
        if epoch.ended or not epoch.left:
            return epoch.ended and not epoch.is_before
        if not (epoch.is_whole or epoch.peeked or tracker.leaves):
            tracker.left = epoch
        return tracker.left is not epoch

    def _tell(self, of: str) -> None:
        """Warn of what a resume cannot give back, once of each loader."""
        tracker = track(self._loader)
        if not tracker.told:
            tracker.told = True
            _log.warning(of, type(self._loader).__name__)

    def restore(self, state: Mapping[str, Any], *, same_ranks: bool = True) -> list[str]:
        """Let the next `iter` go on from a saved position; return notes for the user.

        The position of a rank that did not save is that of rank 0. `state` may be the loader's own
        `state_dict`, too; `same_ranks` tells whether as many ranks saved it.
        """
        if _MARK not in state:
            state = {"kind": "own", "own": state}
        if "begin" not in state or not self._tracked:
            return self._load_own(state)
        tracker = track(self._loader)
        tracker.replay = tracker.reentry = self.dealt = self.left = None
        tracker.restored, tracker.leaves = state, state.get("leaves", False)
        notes = [] if self.ahead else other_seeds(self._loader, state["samplers"])  # some are a host's
        self._let_go()
        other = state.get("workers") != self._loader.num_workers
        if state.get("drawn") and other and same_ranks:
            notes.append("as many workers as at the save would go on with their random numbers, these do not")
        state = {**state, "drawn": [] if other or not same_ranks else state.get("drawn", [])}
        load_samplers_state(self._loader, state["samplers"])
        return [*notes, *self._put_back(state, same_ranks=same_ranks)]

    def _let_go(self) -> None:
        if self.ahead and self._stateful:
            self._loader.load_state_dict({})  # it has made one to tell its state
            self._loader.next_iter_state = None
        if self._loader.persistent_workers:
            let_go_of_kept(self._loader)  # their generators are elsewhere now

    def _put_back(self, state: Mapping[str, Any], *, same_ranks: bool) -> list[str]:
        tracker = track(self._loader)
        if state["ended"] or ("own" not in state and not state["begin"]):
            self._load_stream(state)
            if state["created"] is not None:
                tracker.replay = Replay(
                    begin={"created": state["created"]},
                    samplers=state["samplers"],
                    fresh=True,
                    drawn=state["drawn"],
                )
            return self._load_own(state) if "own" in state else []
        if state["exhausted"]:  # it had nothing left, and the next `iter` gives nothing
            self._load_stream(state)
            begin = state["begin"] or epoch_from(self._loader, starting_state(self._loader))
            tracker.replay = Replay(begin=begin, samplers=state["samplers"], rest=[])
            return []
        return self._go_on(state, same_ranks=same_ranks)

    def _load_stream(self, state: Mapping[str, Any]) -> None:
        if "dataset" in state and self._has_stream:
            self._loader.dataset.load_state_dict(state["dataset"])

    def skip(self, batches: int) -> None:
        """Let the next `iter`, if it begins an epoch, begin behind so many batches of it."""
        self._let_go()
        tracker = track(self._loader)
        begin = Replay(begin={"created": None}, samplers={}, fresh=True)
        tracker.replay = replace(tracker.replay or begin, batches=batches)

    def forget(self) -> None:
        """Let the next `iter` begin as usual, after a `restore` that shall not count."""
        if self._tracked:
            tracker = track(self._loader)
            tracker.replay = tracker.restored = None

    def _load_own(self, state: Mapping[str, Any]) -> list[str]:
        if not self._stateful or "own" not in state:
            return [
                f"the saved position does not fit a {type(self._loader).__name__}: its epoch begins again"
            ]
        load = partial(self._loader.load_state_dict, dict(state["own"]))
        load()
        if self._tracked:
            track(self._loader).replay = Replay(
                begin=state.get("begin") or UNKNOWN,
                samplers={},
                batches=state.get("batches", 0),
                own=True,
                load=load,
                drawn=state.get("drawn", ()),
            )
        else:
            # Let it make its iterator now, and draw what it draws then: generators are put back afterwards.
            self._loader.state_dict()
        return []

    def _go_on(self, state: Mapping[str, Any], *, same_ranks: bool) -> list[str]:
        kind, live = state["kind"], self._kind()
        if kind == live == "indices":
            return self._skip_or_deal(state, same_ranks=same_ranks)
        if self._shares_stream_anew(state, same_ranks=same_ranks):
            return self._take_rest(state)
        if not same_ranks:
            return [self._begin_over(state, "other ranks saved it, and its samples have no numbers")]
        notes = notes_of_length(self._loader, state["begin"])
        if kind == live == "draw":
            return self._draw_again(state, notes)
        if kind == live == "dataset":
            load = partial(self._loader.dataset.load_state_dict, state["dataset"])
            load()
            return self._replay(state, batches=state["batches"], notes=notes, load=load)
        return [*notes, *self._load_own(state)]

    def _skip_or_deal(self, state: Mapping[str, Any], *, same_ranks: bool) -> list[str]:
        begin, samplers = state["begin"], Samplers.of(self._loader)
        place = (*samplers.shards, samplers.batch_size, samplers.named_size)
        saved = tuple(state[name] for name in ("shard", "shards", "batch_size", "named_size"))
        same = same_recipe(begin["order"], recipe(self._loader), same_ranks=same_ranks)
        if begin["seen"] or place != saved or not same:
            return self._deal(state)
        alike = same_ranks or samplers.shard is not None or self._shared
        notes = [] if alike else [note_of_ranks(self._loader, state)]
        return self._replay(state, batches=state["batches"], notes=notes)

    def _replay(self, state: Mapping[str, Any], *, batches: int, notes: list[str], **more: Any) -> list[str]:
        track(self._loader).replay = Replay(
            begin=state["begin"],
            samplers=state["samplers"],
            batches=batches,
            begun=bool(state.get("begun")),
            draws=state["kind"] == "draw",
            drawn=state["drawn"],
            before=self._before(state, batches),
            **more,
        )
        return notes

    def _before(self, state: Mapping[str, Any], batches: int) -> Mapping[str, Any] | None:
        """Return what the next batches are drawn from, if not what there is now."""
        begin, kind, before = state["begin"], state["kind"], state.get("before")
        if kind == "draw" and state.get("begun") and not (batches or self._loader.num_workers):
            found: Mapping[str, Any] = begin["first"] or begin["start"]
            return found  # a stream draws its order with its first batch
        return None if before is None or kind != "indices" else {"global": before, "samplers": {}}

    def _shares_stream_anew(self, state: Mapping[str, Any], *, same_ranks: bool) -> bool:
        """Return whether others share a stream that a host deals out."""
        loader, begin = self._loader, state["begin"]
        if not (self.ahead and begin and isinstance(loader.dataset, IterableDataset)):
            return False
        samplers = Samplers.of(loader)
        place = (*samplers.shards, samplers.batch_size, loader.num_workers)
        saved = tuple(state[name] for name in ("shard", "shards", "batch_size", "workers"))
        return bool(begin["seen"]) or place != saved or not same_ranks

    def _take_rest(self, state: Mapping[str, Any]) -> list[str]:
        """Leave out what all ranks have taken of the streams of their workers."""
        begin, loader = state["begin"], self._loader
        if not (state["known"] and self._order_is_shared) or (
            max(1, state["workers"]) != max(1, loader.num_workers)
        ):
            return [self._begin_over(state, "its ranks or workers share the stream in another way now")]
        taken = taken_of_streams(state)
        state = {**state, "begin": {**begin, "seen": taken}, "samplers": state["samplers"]}
        whole, (_, shards) = length_of(loader), Samplers.of(loader).shards
        if whole is not None:
            size = shards * (Samplers.of(loader).batch_size or 1)
            self.left = left = max(0, whole - sum(taken))
            self.dealt = sum(taken) // size, left // size if loader.drop_last else -(-left // size)
        track(loader).replay = Replay(
            begin=state["begin"],
            samplers=state["samplers"],
            taken=taken,
            before=self._before({**state, "kind": "draw"}, 0),
        )
        of = "" if whole is None else f" of {whole}"
        return [f"the epoch goes on behind the first {sum(taken)}{of} samples of its stream, in its order"]

    def _draw_again(self, state: Mapping[str, Any], notes: list[str]) -> list[str]:
        """Draw and drop what had been handed out of a stream, which has no indices."""
        batches, size = state["batches"], Samplers.of(self._loader).batch_size
        workers = self._loader.num_workers
        before = state["batch_size"], state.get("workers", workers)
        if before != (size, workers):
            if workers or before[1] or not size or not before[0]:
                return [self._begin_over(state, "its workers share the stream in another way now")]
            batches, twice = divmod(batches * before[0], size)
            if (length := batches_in(self._loader)) is not None:
                self.dealt = batches, max(0, length - batches)
            notes = [
                *notes,
                f"{twice} samples are seen twice: batches are of {size} now, and were of {before[0]}",
            ]
        if batches:
            notes = [
                *notes,
                f"{batches} batches of an iterable data set are drawn again, and dropped, to find "
                "the position: to save this time, give the data set state_dict() and load_state_dict(), and "
                "use torchdata's StatefulDataLoader if it has workers",
            ]
        return self._replay(state, batches=batches, notes=notes)

    def _deal(self, state: Mapping[str, Any]) -> list[str]:
        """Deal out the rest of the saved epoch, in the present batch size."""
        begin, samplers = state["begin"], Samplers.of(self._loader)
        (shard, shards), size, saved = samplers.shards, samplers.batch_size, state["batch_size"]
        own = samplers.batch is None and state["named_size"] != samplers.named_size
        by_batch = deals_batches(samplers.shard) or state["shards"] > 1 or self.ahead > 0
        if by_batch and samplers.makes_batches and state["named_size"] == samplers.named_size:
            size = saved = 1  # the order is one of batches
        if own or size is None or saved is None or not begin["order"] or not samplers.orderly:
            return [
                self._begin_over(state, "its sampler makes batches, or deals to ranks, in a way of its own")
            ]
        samples = order_again(self._loader, begin)
        if samples is None:
            return [self._begin_over(state, f"the order of {begin['order']['type']} cannot be made again")]
        seen = begin["seen"] + state["batches"] * saved * state["shards"]
        drop_last = bool(getattr(samplers.shard, "drop_last", False))
        begin, kept, seen = without_lost(self._loader, begin, samples, min(seen, len(samples)))
        order = EpochOrder(samples=kept, seen=seen, drop_last=drop_last)
        dealt, rest = deals_batches(samplers.shard), list(order.rest)
        share = rest if dealt else order.share(shard, shards)
        if dealt and len(kept) >= size * shards:  # it fills the last batches up from the first ones
            rest = batches_of([*kept[: size * shards], *rest], self._loader)[1:]
        else:
            rest = batches_of(share, self._loader)
        track(self._loader).replay = Replay(
            begin={**begin, "seen": order.seen},
            samplers=state["samplers"],
            rest=rest,
            before=self._before(state, 0),
        )
        self.dealt, self.left = (order.seen // (size * shards), len(rest)), len(order.rest)
        left, padding = 0, order.padding(shards)
        if dealt:
            left, padding = _left_by_batches(samplers, len(share), size)
        elif samplers.batch is not None and not samplers.makes_batches:
            left = (len(share) - sum(map(len, rest))) * shards
        return [
            f"the epoch goes on in its first order, after {order.seen} of {len(kept)} samples: "
            f"{shards} rank(s) share the other {len(order.rest)}"
            + _of_padding(padding)
            + (f"; drop_last leaves {left} out" if left else ""),
            *notes_of_order(self._loader, begin["order"], len(samples)),
        ]

    def _begin_over(self, state: Mapping[str, Any], why: str) -> str:
        self.dealt = None if (length := batches_in(self._loader)) is None else (0, length)
        seen = f"{state['batches'] - state.get('ahead', 0)} batches"
        if state["batch_size"] is not None:
            seen += f" of {state['batch_size']}"
        return (
            f"the position in the data is not resumed: {why}. The epoch begins again, so that what each rank "
            f"had seen of it, {seen}, is seen twice"
        )


def _has_live_workers(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and kept_iterator(loader) is not None


def _left_by_batches(samplers: Samplers, rest: int, size: int) -> tuple[int, int]:
    """Return how many are left out, and repeated, where batches are dealt to ranks."""
    over = rest % (size * samplers.shards[1])
    if samplers.shard.drop_last:
        return over, 0
    return 0, -rest % (size * samplers.shards[1]) if samplers.shard.even_batches else 0


def taken_of_streams(state: Mapping[str, Any]) -> list[int]:
    """Return how much ranks have taken of each worker's stream, or of the only one."""
    streams = max(1, state["workers"])
    batches = state["batches"] - state.get("ahead", 0)
    turns = [-(-max(0, batches - stream) // streams) for stream in range(streams)]
    size = state["shards"] * (state["batch_size"] or 1)
    before = (state["begin"] or {}).get("seen") or [0] * streams
    return [had + each * size for had, each in zip(before, turns, strict=True)]


def _seen_in(state: Mapping[str, Any]) -> int:
    """Return how many samples, or batches of the user's, ranks had seen of an epoch."""
    before = (state["begin"] or {}).get("seen", 0)
    if isinstance(before, list):
        return sum(taken_of_streams(state))
    trained = max(0, state["batches"] - state.get("ahead", 0))
    return int(before + trained * (state["batch_size"] or 1) * state["shards"])


def _of_padding(padding: int) -> str:
    if not padding:
        return ", each once"
    if padding < 0:
        return f", and leave {-padding} out, as their sampler drops what ranks cannot share equally"
    return f", each once, and {padding} more a second time, so that all have as many"


def await_training(positions: Iterable[LoaderPosition], put_back: Callable[[], object]) -> None:
    """Put random numbers back right before the first batch drawn with gradients."""
    known = [(each, tracker) for each in positions if (tracker := tracker_of(each._loader)) is not None]
    found = [(each, tracker, state) for each, tracker in known if (state := tracker.restored) is not None]

    def begin() -> None:
        put_back()
        for position, _, state in found:
            if state["exhausted"]:
                position.forget()  # it comes before the loader within whose epoch the save was made

    reentry = TrainingStart(begin)
    for _, tracker, state in found:
        tracker.reentry = None if state["exhausted"] else reentry


def order_again(loader: Any, begin: Mapping[str, Any]) -> Sequence[Any] | None:
    """Make the order of a saved epoch again; None if that is not possible."""
    here = starting_state(loader)
    # None of torch's own samplers, it may be one that makes another order each time.
    times = 2 if begin["order"]["kind"] == "other" else 1
    try:
        made = [samples_of(loader, begin) for _ in range(times)]
    finally:
        load_starting_state(loader, here)
    return made[0] if made[0] == made[-1] else None


def without_lost(
    loader: Any, begin: Mapping[str, Any], samples: Sequence[Any], seen: int
) -> tuple[Mapping[str, Any], Sequence[Any], int]:
    """Leave out what the data set has lost; return begin, samples and seen."""
    order, length = begin["order"], length_of(loader) or 0
    before = order.get("kept", order["length"])
    kept = min(before, length)
    if kept == order["length"]:
        return begin, samples, seen
    had = [each for each in samples if each < before]
    here = [each for each in had if each < kept]
    seen = sum(each < kept for each in had[:seen])
    return {**begin, "order": {**order, "kept": kept}}, here, seen


def notes_of_order(loader: Any, order: Mapping[str, Any], samples: int) -> list[str]:
    """Tell of a data set or a sampler that was changed within the epoch."""
    now, notes = recipe(loader), list[str]()
    length = len(loader.dataset)
    if length != order["length"]:
        new, lost = max(0, length - order["length"]), samples - order.get("kept", samples)
        notes = [
            f"the data set has {length} samples, and had {order['length']} when the epoch began: "
            f"{new} new ones are seen from the next epoch on, {lost} are gone"
        ]
    if now is None or style_of(now) != style_of(order):
        present = "as the present sampler deals them" if now is None else style_of(now)
        notes.append(f"samples came {style_of(order)}, and do so until the epoch ends; then {present}")
    return notes


def notes_of_length(loader: Any, begin: Mapping[str, Any]) -> list[str]:
    """Tell of a data set of another length, where no order can be made again."""
    order, length = begin.get("order"), length_of(loader)
    if order is None or order["length"] == length:
        return []
    return [
        f"the data set has {length} samples, and had {order['length']} when this was "
        "saved: the rest of the epoch is not the one that it would have been"
    ]


def note_of_ranks(loader: Any, state: Mapping[str, Any]) -> str:
    """Tell what comes of ranks that deal samples by no means of ours."""
    note = (
        f"no sampler deals samples to ranks, so each rank goes on after its own {state['batches']} "
        "batches, and an added one after those of rank 0"
    )
    order, size, before = state["begin"]["order"], state["batch_size"], state.get("world_size")
    if order is None or size is None or before is None:
        return note
    whole, parts = order["length"], order if before > 1 else recipe(loader)
    if parts is not None and parts.get("samples") == whole:
        return f"{note}: each takes every sample, none twice"
    here = state["batches"] * size
    change = here * (before - place_in_job()[1])
    return (
        f"{note}. If ranks share the {whole} samples of the epoch, {before} had seen {here * before}: at "
        f"least {abs(change)} are seen {'twice' if change > 0 else 'never'}. Use a DistributedSampler"
    )


def in_samples(
    state: Mapping[str, Any] | None, *, of: int | None = None, epoch: int | None = None
) -> DataPosition | None:
    """Return what `LoaderPosition.state` says in samples; None if it cannot tell."""
    if not state or "begin" not in state:
        return None  # a state of the loader's own
    begin, trained = state["begin"] or {}, max(0, state["batches"] - state["ahead"])
    if epoch is None:
        samplers = begin["start"]["samplers"] if begin else state["samplers"]
        numbers = (each.get("epoch") for each in samplers.values())  # to which a sampler was set
        epoch = next((each for each in numbers if isinstance(each, int)), None)
    of = (begin.get("order") or {}).get("samples", of)
    if state["ended"]:
        return DataPosition(epoch=epoch, samples=of if trained else 0, of=of)
    if state["batch_size"] is None or not begin:
        return DataPosition(epoch=epoch, of=of)
    seen = _seen_in(state)
    return DataPosition(epoch=epoch, samples=seen if of is None else min(seen, of), of=of)
