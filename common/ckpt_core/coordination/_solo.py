"""Coordinate one process with itself, with the errors of a larger job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from typing_extensions import override

from ckpt_core.coordination._base import CommitChannel, Coordinator, R, T
from ckpt_core.errors import CheckpointError, CoordinationError, Failure


@final
class Solo(Coordinator):
    """Coordinates a job with one rank."""

    rank = 0
    world_size = 1

    @override
    def commit_channel(self) -> CommitChannel:
        return _SoloChannel()

    @override
    def broadcast(self, value: T, *, what: str = "") -> T:
        return value

    @override
    def gather_scatter(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        return _alone(value, decide)[0]

    @override
    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        return tuple(flags)

    @override
    def broadcast_tensor(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        pass  # there is no other rank

    @override
    def close(self) -> None:
        pass


@final
class _SoloChannel(CommitChannel):
    """Commits for one rank."""

    rank = 0

    @override
    def broadcast(self, name: str, make: Callable[[], T], deadline_seconds: float) -> T:
        return _alone(None, lambda _: make())

    @override
    def commit_barrier(
        self, name: str, payload: T | BaseException, commit: Callable[[list[T]], R], deadline_seconds: float
    ) -> R:
        return _alone(payload, commit)


def _alone(value: T | BaseException, decide: Callable[[list[T]], R]) -> R:
    if isinstance(value, BaseException):
        raise _failed(value) from value
    try:
        return decide([value])
    except CheckpointError:
        raise
    except Exception as error:  # the caller gets it, as every rank of a larger job
        raise _failed(error) from error


def _failed(error: BaseException) -> CoordinationError:
    found = Failure.of(error)
    return CoordinationError(f"rank 0: {found.text}", failures={0: found.text}, causes={0: found})
