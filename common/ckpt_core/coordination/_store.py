"""Coordination of many ranks: a Store for messages, a gloo group for the one collective of every step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from typing_extensions import override

from ckpt_core.coordination._base import Coordinator, R, T
from ckpt_core.coordination._channel import Channel
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._tree import neighbours
from ckpt_core.errors import CoordinationError, DeadlineError

_instances = itertools.count()
_FAREWELL_SECONDS = 10.0


@final
class StoreCoordinator(Coordinator):
    """Coordinates all ranks of the default process group.

    Construction is collective: every rank must make its instances in the same order. The gloo group and the
    two store connections (one for the main thread, one for the background thread) belong to this instance
    alone, so that nothing here can be interleaved with the training's own communication.
    """

    relays = True

    def __init__(self, *, deadline_seconds: float = 1800.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._deadline_seconds = deadline_seconds
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))
        self._prefix = f"ckpt_core/{next(_instances)}"
        # A client blocks while it waits: the background thread needs a connection of its own.
        self._main = self._open_channel("main")
        self._background = self._open_channel("background")
        self._sequence = itertools.count()

    @override
    def agree(self, value: T) -> T:
        return cast("T", self._main.broadcast(self._topic("agree"), value, self._deadline_seconds))

    @override
    def exchange(self, value: T | BaseException, decide: Callable[[list[T]], list[R]]) -> R:
        topic = self._topic("exchange")
        return cast("R", self._main.exchange(topic, value, decide, self._deadline_seconds))

    @override
    def combine(self, flags: Sequence[int]) -> tuple[int, ...]:
        tensor = torch.tensor(list(flags), dtype=torch.int64)
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise CoordinationError(
                f"rank {self.rank}: a peer was lost while the ranks agreed on whether to save: {error}"
            ) from error
        return tuple(int(flag) for flag in tensor.tolist())

    @override
    def relay(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        parent, children = neighbours(ranks, self.rank)
        if parent is not None:
            self._pass(dist.recv, buffer, parent)
        for child in children:
            self._pass(dist.send, buffer, child)

    @override
    def announce(self, name: str, make: Callable[[], T], *, deadline_seconds: float) -> T:
        return cast("T", self._background.announce(name, make, deadline_seconds))

    @override
    def meet(
        self,
        name: str,
        payload: bytes | BaseException,
        commit: Callable[[list[bytes]], bytes],
        *,
        deadline_seconds: float,
    ) -> bytes:
        return cast("bytes", self._background.meet(name, payload, commit, deadline_seconds))

    @override
    def close(self) -> None:
        # The store often lives in rank 0's process: it must outlast the last reader.
        try:
            deadline = min(_FAREWELL_SECONDS, self._deadline_seconds)
            self._main.exchange(self._topic("close"), None, lambda values: values, deadline)
        except (CoordinationError, RuntimeError):
            return  # a rank is gone already: it will not read anything any more
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _pass(self, verb: Callable[..., Any], buffer: torch.Tensor, peer: int) -> None:
        began = time.monotonic()
        try:
            verb(buffer, peer, group=self._group)
        except RuntimeError as error:
            way = "from" if verb is dist.recv else "to"
            what = f"rank {self.rank}: relay of {buffer.numel()} bytes {way} rank {peer}"
            # Gloo tells the two apart by their wording only.
            if time.monotonic() - began >= self._deadline_seconds:
                raise DeadlineError(
                    f"{what} was not done within {self._deadline_seconds:g} s; "
                    "it has died, hangs, or did not make the same call",
                    awaited=(peer,),
                ) from error
            raise CoordinationError(f"{what} failed, for that rank was lost: {error}") from error

    def _open_channel(self, name: str) -> Channel:
        default: Any = _get_default_store()  # its stubs know no `clone`
        store: Any = PrefixStore(f"{self._prefix}/{name}", default.clone())
        return Channel(store, self.rank, self.world_size)

    def _topic(self, verb: str) -> str:
        return f"{verb}/{next(self._sequence)}"


def coordinator_for_job(*, deadline_seconds: float = 1800.0) -> Coordinator:
    """`StoreCoordinator` when torch.distributed runs with more than one rank, else `Solo`. Collective."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return StoreCoordinator(deadline_seconds=deadline_seconds)
    return Solo()
