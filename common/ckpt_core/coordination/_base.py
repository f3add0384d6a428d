"""The contract by which ranks agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(ABC):
    """Lets the ranks of a job agree.

    Main thread only, the same call in the same order on every rank: `agree`, `gather`, `exchange`, `combine`.
    Any one thread: `announce` and `meet`, which never use a collective, so that they cannot deadlock against
    training.
    Every wait has a deadline; when it passes, `DeadlineError` names the ranks awaited.
    """

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and commits for all."""
        return self.rank == 0

    @abstractmethod
    def agree(self, value: T) -> T:
        """The coordinator's value, on every rank. The value must be picklable."""

    @abstractmethod
    def exchange(self, value: T | BaseException, decide: Callable[[list[T]], list[R]]) -> R:
        """Bring every rank's value to the coordinator, decide there, give every rank its own answer.

        A rank that could not make its value passes the exception instead. Values must be picklable.

        Raises:
            CoordinationError: a rank passed an exception, or `decide` raised; the same error on every rank.
            CheckpointError: `decide` raised it; of the same type on every rank.
            DeadlineError: ranks are missing; `awaited` names them.
        """

    def gather(self, value: T | BaseException) -> list[T]:
        """The value of every rank, in rank order, on every rank; same errors as `exchange`."""
        return self.exchange(value, lambda values: [values] * len(values))

    def once(self, decide: Callable[[], T]) -> T:
        """The result of `decide`, called on the coordinator alone, on every rank; errors as in `exchange`."""
        return self.exchange(None, lambda nothing: [decide()] * len(nothing))

    @abstractmethod
    def combine(self, flags: Sequence[int]) -> tuple[int, ...]:
        """Element-wise maximum over the ranks of a few small integers; cheap enough for every step."""

    @abstractmethod
    def announce(self, name: str, make: Callable[[], T], *, deadline_seconds: float) -> T:
        """What `make`, called on the coordinator alone, returned, on every rank; it must be picklable.

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


def failure_text(error: BaseException) -> str:
    """One line for the person on call: the exception's type and message."""
    return f"{type(error).__name__}: {error}"
