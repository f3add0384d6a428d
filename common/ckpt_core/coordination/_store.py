"""Coordination of many ranks: a Store for messages, a gloo group for the one collective of every step."""

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
from ckpt_core.coordination._base import Coordinator, R, T
from ckpt_core.coordination._channel import Channel
from ckpt_core.coordination._signer import KEY_VARIABLE, Signer, fingerprint, job_key, session_secret
from ckpt_core.coordination._tree import neighbours
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, CoordinationError, DeadlineError

_logger = logger_of(__name__)
_WORD_BITS = 62
_SECRET_WORDS = 4
_SHOWN_RANKS = 8
_FAREWELL_SECONDS = 10.0
_ROLL_CALL_SECONDS = 5.0


@final
class StoreCoordinator(Coordinator):
    """Coordinates all ranks of the default process group.

    Construction is collective. The gloo group and the two store connections (one for the main thread, one for
    the background thread) belong to this instance alone, so that nothing here can be interleaved with the
    training's own communication.

    Args:
        deadline_seconds: how long ranks wait for one another.
        session: that of the instance which this one replaces; 0 if there was none.
        problem: why this rank cannot take part, in words; then no rank does.

    Attributes:
        session: a number, the same on every rank, that no other instance has.

    Raises:
        ConfigError: ranks cannot take part, or replace different instances; on every rank.
        CoordinationError: the ranks did not connect to one another in time.

    Gloo does not say which rank it waits for in vain, and a group that has lost one connection is of no use
    any more. So when it fails the ranks call the roll over the store, which names the missing, and from then
    on everything goes over the store: slower, and without `relay`, but saves can go on if the ranks can.
    """

    def __init__(
        self, *, deadline_seconds: float = 1800.0, session: int = 0, problem: str | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._deadline_seconds = deadline_seconds
        self._default_group = weakref.ref(dist.group.WORLD)
        self._group, self.session, signer = self._connect(session, problem)
        self._prefix = f"ckpt_core/{self.session:x}"
        self._signer = signer
        # A client blocks while it waits: the background thread needs a connection of its own.
        self._main = self._open_channel("main")
        self._background = self._open_channel("background")
        self._sequence = itertools.count()
        self._broken = False

    @property
    @override
    def relays(self) -> bool:
        """Whether the group is in order, as far as this rank knows."""
        return not self._broken

    @override
    def agree(self, value: T, *, what: str = "") -> T:
        return cast("T", self._main.broadcast(self._topic("agree", what), value, self._deadline_seconds))

    @override
    def exchange(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        deadline = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        return cast("R", self._main.exchange(self._topic("exchange", what), value, decide, deadline))

    @override
    def combine(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        topic, deadline, waited = self._topic("combine", what), self._deadline_seconds, 0.0
        began = time.monotonic()
        if not self._broken:
            tensor = torch.tensor(list(flags), dtype=torch.int64, device="cpu")
            try:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
            except RuntimeError as error:
                self._lost_group(topic, error)
                # Whoever is alive has been told by gloo, too, and answers at once.
                deadline, waited = min(_ROLL_CALL_SECONDS, deadline), time.monotonic() - began
            else:
                return tuple(int(flag) for flag in tensor.tolist())
        return cast(
            "tuple[int, ...]",
            self._main.exchange(topic, tuple(flags), _maxima, deadline, waited_seconds=round(waited, 1)),
        )

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
        # With the default group all others went, and another may have been made since.
        if dist.is_initialized() and self._default_group() is dist.group.WORLD:
            dist.destroy_process_group(self._group)

    def _pass(self, verb: Callable[..., Any], buffer: torch.Tensor, peer: int) -> None:
        began = time.monotonic()
        try:
            verb(buffer, peer, group=self._group)
        except RuntimeError as error:
            way = "from" if verb is dist.recv else "to"
            what = f"rank {self.rank}: relay of {buffer.numel()} bytes {way} rank {peer}"
            self._lost_group(what, error)
            # Gloo tells the two apart by their wording only.
            if time.monotonic() - began >= self._deadline_seconds:
                raise DeadlineError(
                    f"{what} was not done within {self._deadline_seconds:g} s; "
                    "it has died, hangs, or did not make the same call",
                    awaited=(peer,),
                ) from error
            raise CoordinationError(f"{what} failed, for that rank was lost: {error}") from error

    def _connect(self, session: int, problem: str | None) -> tuple[Any, int, Signer]:
        """The gloo group, and of this session, drawn by the coordinator, the number and the signer."""
        key = b""
        try:
            key = job_key()
        except ConfigError as error:
            problem = problem or str(error)
        own = fingerprint(key)
        drawn = [0 if self.rank else secrets.randbits(_WORD_BITS) for _ in range(1 + _SECRET_WORDS)]
        # Only maxima can be combined: the greatest and, negated, the smallest tell whether all are the same.
        said = [int(problem is not None), session, -session, own, -own, *drawn]
        try:
            group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._deadline_seconds))
            refused, greatest, smallest, most, least, *drawn = _reduced(said, group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise CoordinationError(
                f"rank {self.rank}: the {self.world_size} ranks could not connect to one another, to save "
                f"checkpoints together, within {self._deadline_seconds:g} s: {reason}"
            ) from error
        if refused or greatest != -smallest:
            found = problem or (
                "a manager on another rank is of a process group with other ranks, or newer, or has a "
                f"{KEY_VARIABLE} that is no key"
            )
            dist.destroy_process_group(group)
            raise ConfigError(
                f"rank {self.rank}: {found}: close the managers and make new ones, on every rank"
            )
        if most != -least:
            prints = _gathered(own, self.world_size, group)
            dist.destroy_process_group(group)
            raise ConfigError(_different_keys(prints))
        number, *words = drawn
        secret = b"".join(word.to_bytes(8, "big") for word in words)
        return group, number, Signer(session_secret(key, secret))

    def _lost_group(self, what: str, error: RuntimeError) -> None:
        self._broken = True
        _logger.warning(
            "rank %d: %s: the ranks' own connections broke; now they talk through the job's store: %s",
            self.rank, what, str(error).partition("\n")[0],
        )  # fmt: skip

    def _open_channel(self, name: str) -> Channel:
        clone = default_store().clone()
        # How long a FileStore looks for its file when that was removed.
        clone.set_timeout(timedelta(seconds=self._deadline_seconds))
        store: Any = PrefixStore(f"{self._prefix}/{name}", clone)
        return Channel(
            store,
            self.rank,
            self.world_size,
            patience_seconds=self._deadline_seconds,
            signer=self._signer.within(f"{self._prefix}/{name}"),
        )

    def _topic(self, verb: str, what: str = "") -> str:
        topic = f"{verb}/{next(self._sequence)}"
        return f"while {what} ({topic})" if what else topic


def _maxima(values: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [tuple(map(max, zip(*values, strict=True)))] * len(values)


def _reduced(numbers: Sequence[int], group: Any) -> list[int]:
    """The greatest of each number over all ranks."""
    tensor = torch.tensor(list(numbers), device="cpu")
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in tensor.tolist()]


def _gathered(number: int, world_size: int, group: Any) -> list[int]:
    """The number of every rank."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(found, torch.tensor([number]), group=group)
    return [int(each) for each in found]


def _different_keys(prints: Sequence[int]) -> str:
    without = [rank for rank, each in enumerate(prints) if not each]
    if without:
        found = f"{KEY_VARIABLE} is set on some ranks, and not on rank(s) {_few(without)}"
    else:
        other = [rank for rank, each in enumerate(prints) if each != prints[0]]
        found = f"{KEY_VARIABLE} is not the same on all ranks: on rank(s) {_few(other)} not that of rank 0"
    return f"{found}. Give every rank the same, or none, and start the job again; nothing was saved or loaded"


def _few(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return ", ".join(map(str, ranks[:_SHOWN_RANKS])) + more
