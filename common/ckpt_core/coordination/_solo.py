"""Coordination of one process with itself: no torch.distributed, the same errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from typing_extensions import override

from ckpt_core.coordination._base import Coordinator, R, T
from ckpt_core.errors import CheckpointError, CoordinationError, Failure


@final
class Solo(Coordinator):
    """The coordinator of a job with one rank."""

    rank = 0
    world_size = 1

    @override
    def agree(self, value: T, *, what: str = "") -> T:
        return value

    @override
    def exchange(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        return _alone(value, decide)[0]

    @override
    def combine(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        return tuple(flags)

    @override
    def relay(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        pass  # whoever it would reach is here

    @override
    def announce(self, name: str, make: Callable[[], T], *, deadline_seconds: float) -> T:
        return _alone(None, lambda _: make())

    @override
    def meet(
        self,
        name: str,
        payload: bytes | BaseException,
        commit: Callable[[list[bytes]], bytes],
        *,
        deadline_seconds: float,
    ) -> bytes:
        return _alone(payload, commit)

    @override
    def close(self) -> None:
        pass


def _alone(value: T | BaseException, decide: Callable[[list[T]], R]) -> R:
    if isinstance(value, BaseException):
        raise _failed(value) from value
    try:
        return decide([value])
    except CheckpointError:
        raise
    except Exception as error:  # the caller is told, as every rank of a larger job would be
        raise _failed(error) from error


def _failed(error: BaseException) -> CoordinationError:
    found = Failure.of(error)
    return CoordinationError(f"rank 0: {found.text}", failures={0: found.text}, causes={0: found})
