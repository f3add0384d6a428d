"""Declare how ranks agree: on the main thread, and in the background.

`Coordinator` is for the main thread and has collectives, `CommitChannel` is for a save in the background and
has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ckpt_core.coordination._talks import Talks
from ckpt_core.errors import CoordinationError

T = TypeVar("T")
R = TypeVar("R")


class CommitChannel(ABC):
    """Connects the ranks for saves, on the background thread.

    Uses no collectives, so it cannot deadlock against training. Every wait has a deadline; when it passes,
    `DeadlineError` names the missing ranks.
    """

    rank: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and commits for all."""
        return self.rank == 0

    @abstractmethod
    def broadcast(self, name: str, make: Callable[[], T], deadline_seconds: float) -> T:
        """Call `make` on the coordinator, return its result on every rank.

        One message, for any number of ranks. `name` is unique per broadcast and equal on all ranks. A rank
        that has failed need not take part. The result must be plain, see `Coordinator.gather_scatter`.

        Raises:
            CheckpointError: `make` raised it; of the same type on every rank.
            CoordinationError: `make` raised another exception; the same error on every rank.
            DeadlineError: no result arrived from the coordinator.
        """

    @abstractmethod
    def commit_barrier(
        self, name: str, payload: T | BaseException, commit: Callable[[list[T]], R], deadline_seconds: float
    ) -> R:
        """Wait for all ranks, then commit once, on the coordinator.

        Every rank arrives with a payload, or with the error that prevented one. When all have arrived
        without an error, the coordinator alone calls `commit(payloads in rank order)`; every rank returns its
        result. `name` is unique per barrier and equal on all ranks. Payloads and result must be plain, see
        `Coordinator.gather_scatter`.

        Raises:
            CoordinationError: a rank arrived with an error or `commit` raised; `failures` says which rank and
                what, the same on every rank. The original exception is the cause on the rank that had it.
            CheckpointError: `commit` raised it; of the same type on every rank.
            DeadlineError: ranks are missing; `awaited` names them.
        """

    def close(self) -> None:  # noqa: B027 - for channels that hold a connection
        """Drop the connection and end its thread; harmless when repeated."""


class Coordinator(ABC):
    """Connects the ranks of a job, on the main thread.

    Every method is collective unless it says otherwise: all ranks make the same calls in the same order.
    Every wait has a deadline; when it passes, `DeadlineError` names the missing ranks and `what` they were
    doing: a few words, the same on every rank, that follow "while". Calls with another `what` or of another
    method are never mixed up.
    """

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and commits for all."""
        return self.rank == 0

    @property
    def can_broadcast_tensors(self) -> bool:
        """Whether `broadcast_tensor` works now."""
        return False

    def check(self) -> None:  # noqa: B027 - most coordinators never change their ranks
        """Raise if the ranks have changed.

        Raises:
            ConfigError: the ranks or this process changed; the message says what to do.
        """

    def bind(self) -> None:  # noqa: B027 - see `check`
        """Fix the set of ranks: from now on plans depend on it.

        Raises:
            ConfigError: see `check`; or these are not all ranks of the job.
        """

    @abstractmethod
    def commit_channel(self) -> CommitChannel:
        """Return the channel of saves, which is closed with this; not collective."""

    def background_channel(self, name: str) -> CommitChannel:
        """Open a channel for another thread, which closes it; not collective.

        Its name is equal on all ranks, and of no other channel.
        """
        del name
        return self.commit_channel()

    @abstractmethod
    def broadcast(self, value: T, *, what: str = "") -> T:
        """Return the coordinator's value on every rank.

        It must be plain, see `gather_scatter`.
        """

    @abstractmethod
    def gather_scatter(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        """Gather values, decide on the coordinator, send each rank its answer.

        A rank without a value passes the exception that prevented it. `decide` gets the values in rank order.
        Values must be plain: numbers, text, bytes, None, lists, tuples and dictionaries of those, errors, and
        what is declared as a `message`.

        Raises:
            CoordinationError: a rank passed an exception, or `decide` raised; the same error on every rank.
            CheckpointError: `decide` raised it; of the same type on every rank.
            DeadlineError: ranks are missing; `awaited` names them.
        """

    def gather(
        self, value: T | BaseException, *, what: str = "", deadline_seconds: float | None = None
    ) -> list[T]:
        """Return the values of all ranks on every rank, in rank order."""
        return self.gather_scatter(
            value, lambda values: [values] * len(values), what=what, deadline_seconds=deadline_seconds
        )

    def run_on_coordinator(self, decide: Callable[[], T], *, what: str = "") -> T:
        """Call `decide` on the coordinator, return its result everywhere."""
        return self.gather_scatter(None, lambda nothing: [decide()] * len(nothing), what=what)

    @abstractmethod
    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        """Return the element-wise maximum of a few integers.

        Cheap enough for every step.

        Raises:
            DeadlineError: ranks are missing; `awaited` names them.
            CoordinationError: the ranks cannot reach one another.
        """

    def broadcast_tensor(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        """Copy the first rank's buffer into the buffers of the other `ranks`.

        Only `ranks` make the call, all with the same `ranks` and a buffer of the same size. If every rank
        makes its calls in one order that is common to the job, they cannot deadlock.

        Args:
            buffer: uint8, one-dimensional, contiguous, on the CPU.
            ranks: the source first, each one once.

        Raises:
            CoordinationError: a peer was lost, or `can_broadcast_tensors` is False.
            DeadlineError: a peer did not make the call; `awaited` names it.
            ValueError: this rank is not among `ranks`, or one of them is there twice.
        """
        if len(ranks) > 1:
            raise CoordinationError(
                f"rank {self.rank}: {type(self).__name__} cannot broadcast {buffer.numel()} bytes to ranks "
                f"{list(ranks[1:])}: `can_broadcast_tensors` is False"
            )

    def talks(self) -> Talks:
        """Return this rank's talks with others; the first call is collective.

        Raises:
            CoordinationError: the ranks did not connect to one another, or there are none to talk to.
        """
        raise CoordinationError(f"rank {self.rank}: {type(self).__name__} connects no two ranks")

    @abstractmethod
    def close(self) -> None:
        """Release threads, groups and connections, for good."""
