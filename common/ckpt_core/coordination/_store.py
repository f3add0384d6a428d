"""Coordinate many ranks by a Store for messages and a gloo group."""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from typing_extensions import override

from ckpt_core._torch_internals import PrefixStore, default_store
from ckpt_core.coordination._base import CommitChannel, Coordinator, R, T
from ckpt_core.coordination._channel import Channel
from ckpt_core.coordination._talks import Talks
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError, DeadlineError

_logger = logger_of(__name__)
_WORD_BITS = 62
_FAREWELL_SECONDS = 10.0
_ROLL_CALL_SECONDS = 5.0


@final
class StoreCoordinator(Coordinator):
    """Coordinates all ranks of the default process group.

    Construction is collective. The gloo group and the two store connections (one for the main thread, one for
    saves in the background) belong to this instance alone, so that they cannot interfere with the training's
    own communication.

    Raises:
        CoordinationError: the ranks did not connect to one another in time.

    Gloo does not say which rank is missing, and a group that lost one connection cannot be used any more. So
    after a failure of gloo the ranks exchange their flags over the store, which names the missing ranks. From
    then on all communication uses the store: slower, and without `broadcast_tensor`, but saves can continue.
    """

    def __init__(self, *, deadline_seconds: float = 1800.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._deadline_seconds = deadline_seconds
        self._default_group = weakref.ref(dist.group.WORLD)
        self._group = self._new_group()
        # Keys of this instance alone; another one of these ranks may use the same store.
        self._prefix = f"ckpt_core/{self._drawn():x}"
        # A client blocks while it waits: saves in the background need a connection of their own.
        self._main, self._background = self._open_channel("main"), self._open_channel("background")
        self._sequence = itertools.count()
        self._talks: Talks | None = None
        self._broken = self._closed = False

    @property
    def is_current(self) -> bool:
        """Whether the process group with which it was made is still there."""
        return dist.is_initialized() and self._default_group() is dist.group.WORLD

    @property
    @override
    def can_broadcast_tensors(self) -> bool:
        return not self._broken

    @override
    def commit_channel(self) -> CommitChannel:
        return self._background

    @override
    def background_channel(self, name: str) -> CommitChannel:
        return self._open_channel(name)

    @override
    def broadcast(self, value: T, *, what: str = "") -> T:
        return self._main.broadcast(self._topic("broadcast", what), lambda: value, self._deadline_seconds)

    @override
    def gather_scatter(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        deadline = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        topic = self._topic("gather_scatter", what)
        prefix = f"{topic}: " if what else ""
        return cast("R", self._main.gather_scatter(topic, value, decide, deadline, prefix=prefix))

    @override
    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        topic, deadline, waited = self._topic("all_reduce_max", what), self._deadline_seconds, 0.0
        began = time.monotonic()
        if not self._broken:
            tensor = torch.tensor(list(flags), dtype=torch.int64, device="cpu")
            try:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
            except RuntimeError as error:
                self._lost_group(topic, error)
                # Gloo failed on every rank that is alive, so each of them answers now.
                deadline, waited = min(_ROLL_CALL_SECONDS, deadline), time.monotonic() - began
            else:
                return tuple(int(flag) for flag in tensor.tolist())
        prefix = f"{topic}: " if what else ""

        def maxima(values: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            return [tuple(map(max, zip(*values, strict=True)))] * len(values)

        found = self._main.gather_scatter(
            topic, tuple(flags), maxima, deadline, prefix=prefix, waited_seconds=round(waited, 1)
        )
        return cast("tuple[int, ...]", found)

    @override
    def broadcast_tensor(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        parent, children = neighbours(ranks, self.rank)
        if parent is not None:
            self._pass(dist.recv, buffer, parent)
        for child in children:
            self._pass(dist.send, buffer, child)

    @override
    def talks(self) -> Talks:
        if self._talks is None:
            # Half, so that the error of a rank reaches the others before their deadline.
            patience = self._deadline_seconds / 2
            self._talks = Talks(self._connection("talks"), self._new_group(), self.rank, patience)
        return self._talks

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # The store often lives in rank 0's process: it must outlast the last reader.
        try:
            # Without the group a rank is probably gone, and its restart waits for this one to end.
            deadline = min(_ROLL_CALL_SECONDS if self._broken else _FAREWELL_SECONDS, self._deadline_seconds)
            self._main.gather_scatter(self._topic("close"), None, lambda values: values, deadline)
        except (CoordinationError, RuntimeError):
            pass  # a rank is gone already: it will not read anything any more
        else:
            if self.is_current:  # all others went with the default group
                dist.destroy_process_group(self._group)
        finally:
            for each in (self._talks, self._main, self._background):
                if each is not None:
                    each.close()
            self._group = self._talks = None

    def _pass(self, verb: Callable[..., Any], buffer: torch.Tensor, peer: int) -> None:
        began = time.monotonic()
        try:
            verb(buffer, peer, group=self._group)
        except RuntimeError as error:
            way = "from" if verb is dist.recv else "to"
            what = f"rank {self.rank}: broadcast of {buffer.numel()} bytes {way} rank {peer}"
            self._lost_group(what, error)
            # Gloo's errors differ in their wording only; the time does not depend on it.
            if time.monotonic() - began >= self._deadline_seconds:
                raise DeadlineError(
                    f"{what} did not end within {self._deadline_seconds:g} s; "
                    "that rank has died, hangs, or did not make the same call",
                    awaited=(peer,),
                ) from error
            raise CoordinationError(f"{what} failed, the connection was lost: {error}") from error

    def _new_group(self) -> Any:
        """Make a gloo group of all ranks. Collective."""
        try:
            return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._deadline_seconds))
        except RuntimeError as error:
            raise self._unconnected(error) from error

    def _drawn(self) -> int:
        """Return a number that no other instance has, the same on every rank. Collective."""
        tensor = torch.tensor([0 if self.rank else secrets.randbits(_WORD_BITS)], device="cpu")
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._unconnected(error) from error
        return int(tensor)

    def _unconnected(self, error: RuntimeError) -> CoordinationError:
        reason = str(error).partition("\n")[0]
        return CoordinationError(
            f"rank {self.rank}: the {self.world_size} ranks could not connect to one another, to save "
            f"checkpoints together, within {self._deadline_seconds:g} s: {reason}"
        )

    def _lost_group(self, what: str, error: RuntimeError) -> None:
        self._broken = True
        _logger.warning(
            "rank %d: %s: the gloo group failed, from now on its ranks use the job's store: %s",
            self.rank, what, str(error).partition("\n")[0],
        )  # fmt: skip

    def _connection(self, name: str) -> Callable[[timedelta], Any]:
        """Return what makes a connection to the job's store, with keys of its own."""

        def connect(timeout: timedelta) -> Any:
            clone = default_store().clone()
            clone.set_timeout(timeout)
            return PrefixStore(f"{self._prefix}/{name}", clone)

        return connect

    def _open_channel(self, name: str) -> Channel:
        # The time for which a FileStore looks for its file after that was removed.
        store = self._connection(name)(timedelta(seconds=self._deadline_seconds))
        return Channel(store, self.rank, self.world_size, patience_seconds=self._deadline_seconds)

    def _topic(self, verb: str, what: str = "") -> str:
        topic = f"{verb}/{next(self._sequence)}"
        return f"while {what} ({topic})" if what else topic


def neighbours(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Return parent and children of `rank` in a binomial broadcast tree.

    The root is `ranks[0]`. The root's parent is None. The depth is log2 of the number of ranks.

    Raises:
        ValueError: `rank` is not among `ranks`, or one of them is there twice.
    """
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks {list(ranks)} are not all different")
    place, count = list(ranks).index(rank), len(ranks)
    reach = 1
    while reach < count and not place & reach:
        reach *= 2
    parent = ranks[place - reach] if place else None
    children: list[int] = []
    while reach > 1:
        reach //= 2
        if place + reach < count:
            children.append(ranks[place + reach])
    return parent, children
