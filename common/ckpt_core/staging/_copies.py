"""Copies of host tensors in pieces, and torch's counters of in-place changes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch

from ckpt_core._torch_internals import copy_all

PIECE_BYTES = 16 << 20
"""Large enough that handing out a piece is cheap, small enough that no thread waits long for one."""

_SERIAL_BELOW = 32768  # elements; at::internal::GRAIN_SIZE: torch copies fewer without a team of threads
_MOST_IN_A_BATCH = 1024
_MOST_PASSED_BYTES = 2 * PIECE_BYTES  # the writer goes slot by slot and waits for the lowest one
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from a live tensor into an arena."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    slot: int = 0


class Work(Protocol):
    """A function that makes copies, mostly without the GIL."""

    def __call__(self) -> object: ...


@final
@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A part of the work.

    Attributes:
        slot: the first slot that it fills, wholly or in part.
        floor: the lowest slot that later pieces fill.
    """

    work: Work
    slot: int
    floor: int


@final
@dataclass(frozen=True, slots=True)
class _Bytes:
    """Elements of one tensor, copied by NumPy: torch would start a team of threads."""

    source: Any
    target: Any

    def __call__(self) -> None:
        np.copyto(self.target, self.source)


@final
class _Batch:
    """Small tensors, all in one call."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.sources: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self._size_bytes = 0
        self._passed_bytes = 0

    def pass_by(self, copy: Copy) -> None:
        """Note that a large tensor of a later slot is copied before this batch."""
        self._passed_bytes += copy.source.nbytes

    def add(self, copy: Copy) -> None:
        self.sources.append(copy.source)
        self.targets.append(copy.target)
        self._size_bytes += copy.source.nbytes

    @property
    def full(self) -> bool:
        return (
            self._size_bytes >= PIECE_BYTES
            or self._passed_bytes >= _MOST_PASSED_BYTES
            or len(self.sources) >= _MOST_IN_A_BATCH
        )

    def __call__(self) -> None:
        with torch.no_grad():
            copy_all(self.targets, self.sources)


@final
@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that only torch can copy: conjugated, cast, or on an exotic device."""

    copy: Copy

    def __call__(self) -> None:
        with torch.no_grad():
            self.copy.target.copy_(self.copy.source)


def pieces_of(copies: Sequence[Copy]) -> Generator[CopyPiece]:
    """Cut copies with ascending slots into pieces of about `PIECE_BYTES`.

    The pieces are about in the order of the slots; those of one tensor may be made in any order.
    """
    batch: _Batch | None = None
    for copy in copies:
        if _plain(copy) and copy.source.numel() < _SERIAL_BELOW:
            batch = batch or _Batch(copy.slot)
            batch.add(copy)
        else:
            floor = batch.slot if batch else copy.slot
            for work in _slices(copy) if _plain(copy) else [_Whole(copy)]:
                yield CopyPiece(work, copy.slot, floor)
            if batch:
                batch.pass_by(copy)
        if batch and batch.full:
            yield CopyPiece(batch, batch.slot, copy.slot)
            batch = None
    if batch:
        yield CopyPiece(batch, batch.slot, copies[-1].slot)


def _plain(copy: Copy) -> bool:
    return (
        copy.source.dtype == copy.target.dtype
        and copy.source.device.type == copy.target.device.type == "cpu"
        and not (copy.source.is_conj() or copy.source.is_neg())
    )


def _slices(copy: Copy) -> Generator[Work]:
    """Yield ranges of the first dimension; a contiguous tensor has only one."""
    words = _SAME_SIZE[copy.source.dtype.itemsize]
    source, target = (each.detach().view(words) for each in (copy.source, copy.target))
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    rows = len(source)
    step = max(1, PIECE_BYTES * rows // source.nbytes)
    from_array, to_array = source.numpy(), target.numpy()
    for start in range(0, rows, step):
        yield _Bytes(from_array[start : start + step], to_array[start : start + step])


@final
class Versions:
    """The present versions of sources, for a later comparison.

    A change through `tensor.data`, NumPy or another view without a counter is not detected.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._sources = [(copy.name, copy.source, _version(copy.source)) for copy in copies]

    def changed(self) -> Sequence[str]:
        """List the names of sources changed since."""
        return [name for name, source, version in self._sources if _version(source) != version]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
