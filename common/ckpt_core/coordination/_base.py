"""The contract by which ranks agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ckpt_core.errors import CoordinationError

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(ABC):
    """Lets the ranks of a job agree.

    Main thread only, the same call in the same order on every rank: `agree`, `gather`, `exchange`, `combine`.
    Main thread only, some of the ranks: `relay`.
    Any one thread: `announce` and `meet`, which never use a collective, so that they cannot deadlock against
    training.
    Every wait has a deadline; when it passes, `DeadlineError` names the ranks awaited, and `what` they were
    to do: a few words, the same on every rank, that follow "while". Ranks that are at different things do not
    take each other's messages for their own.

    Attributes:
        rank: this process's, from 0.
        world_size: how many ranks there are.
        relays: whether `relay` can be used; where it cannot, every rank reads for itself.
    """

    rank: int
    world_size: int

    @property
    def relays(self) -> bool:
        """See the class."""
        return False

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and commits for all."""
        return self.rank == 0

    def check(self) -> None:  # noqa: B027 - most coordinators have one set of ranks for good
        """Refuse to go on if the ranks are not those that there were; collective, as `agree`.

        Raises:
            ConfigError: they are others, or this is another process; the message says what to do.
        """

    def bind(self) -> None:  # noqa: B027 - see `check`
        """Stay with these ranks: from now on something depends on how many there are; collective.

        Raises:
            ConfigError: see `check`; or these are not all ranks of the job.
        """

    def as_of_now(self) -> Coordinator:
        """The coordinator of the ranks as they are now, for a save in flight; it stays the same."""
        return self

    @abstractmethod
    def agree(self, value: T, *, what: str = "") -> T:
        """The coordinator's value, on every rank. The value must be plain, see `exchange`."""

    @abstractmethod
    def exchange(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        """Bring every rank's value to the coordinator, decide there, give every rank its own answer.

        A rank that could not make its value passes the exception instead. Values must be plain: numbers,
        text, bytes, None, lists, tuples and dictionaries of those, errors, and what is declared as a
        `message`.

        Args:
            value: this rank's.
            decide: called on the coordinator, with the values in rank order.
            what: see the class.
            deadline_seconds: how long to wait, if not as long as always: ranks that were waited for in vain a
                moment ago need not be waited for as long again.

        Raises:
            CoordinationError: a rank passed an exception, or `decide` raised; the same error on every rank.
            CheckpointError: `decide` raised it; of the same type on every rank.
            DeadlineError: ranks are missing; `awaited` names them.
        """

    def gather(
        self, value: T | BaseException, *, what: str = "", deadline_seconds: float | None = None
    ) -> list[T]:
        """The value of every rank, in rank order, on every rank; see `exchange`."""
        return self.exchange(
            value, lambda values: [values] * len(values), what=what, deadline_seconds=deadline_seconds
        )

    def once(self, decide: Callable[[], T], *, what: str = "") -> T:
        """The result of `decide`, called on the coordinator alone, on every rank; errors as in `exchange`."""
        return self.exchange(None, lambda nothing: [decide()] * len(nothing), what=what)

    @abstractmethod
    def combine(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        """Element-wise maximum over the ranks of a few small integers; cheap enough for every step.

        Raises:
            DeadlineError: ranks are missing; `awaited` names them.
            CoordinationError: the ranks cannot reach one another.
        """

    def relay(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        """Bring the content of the first rank's buffer into the buffers of the others; a tree of messages.

        Only `ranks` make the call, all with the same `ranks` and a buffer of the same size; a rank alone is
        done at once. No deadlock can arise if all relays of a job stand in one order and every rank makes
        those it belongs to in that order: the first that is not done can always go on.

        Args:
            buffer: uint8, one-dimensional, contiguous, on the CPU.
            ranks: the source first, each one once.

        Raises:
            CoordinationError: a peer was lost, or this coordinator cannot relay (see `relays`).
            DeadlineError: a peer has not made the call; `awaited` names it.
            ValueError: this rank is not among `ranks`, or one of them is there twice.
        """
        if len(ranks) > 1:
            raise CoordinationError(
                f"rank {self.rank}: {type(self).__name__} cannot relay {buffer.numel()} bytes to ranks "
                f"{list(ranks[1:])}: `relays` is False"
            )

    @abstractmethod
    def announce(self, name: str, make: Callable[[], T], *, deadline_seconds: float) -> T:
        """What `make`, called on the coordinator alone, returned, on every rank; it must be plain.

        One message, however many ranks there are. `name` must be unique per announcement and equal on all
        ranks; a rank that has failed need not listen.

        Raises:
            CheckpointError: `make` raised it; of the same type on every rank.
            CoordinationError: `make` raised something else; the same on every rank.
            DeadlineError: the coordinator has said nothing.
        """

    @abstractmethod
    def meet(
        self,
        name: str,
        payload: bytes | BaseException,
        commit: Callable[[list[bytes]], bytes],
        *,
        deadline_seconds: float,
    ) -> bytes:
        """Two-phase rendezvous: arrive, commit once, depart.

        Every rank arrives with a payload or with the error that kept it from having one. When all have
        arrived without error the coordinator alone calls `commit(payloads in rank order)`; its result is
        returned on every rank. `name` must be unique per rendezvous and equal on all ranks.

        Raises:
            CoordinationError: a rank arrived with an error or `commit` raised; `failures` says which rank and
                what, the same on every rank. The original exception is the cause on the rank that had it.
            CheckpointError: `commit` raised it; of the same type on every rank.
            DeadlineError: ranks are missing; `awaited` names them.
        """

    @abstractmethod
    def close(self) -> None:
        """Release groups and connections; the coordinator must not be used afterwards."""
