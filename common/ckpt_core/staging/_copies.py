"""Copies of host tensors in pieces, and torch's counters of in-place changes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch

from ckpt_core._torch_internals import copy_all, version_of

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


@final
@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A part of the work, which is done mostly without the GIL.

    Attributes:
        slot: the first slot that it fills, wholly or in part.
        floor: the lowest slot that later pieces fill.
    """

    work: Callable[[], object]
    slot: int
    floor: int


def pieces_of(copies: Sequence[Copy]) -> Generator[CopyPiece]:
    """Cut copies with ascending slots into pieces of about `PIECE_BYTES`.

    The pieces are about in the order of the slots; those of one tensor may be made in any order. Small
    tensors are copied many in one call.
    """
    small: list[Copy] = []
    size_bytes = passed_bytes = 0  # of the small ones, and of large ones of later slots, copied before them
    for copy in copies:
        if _plain(copy) and copy.source.numel() < _SERIAL_BELOW:
            small.append(copy)
            size_bytes += copy.source.nbytes
        else:
            floor = small[0].slot if small else copy.slot
            for work in _slices(copy) if _plain(copy) else [partial(_copy_whole, copy)]:
                yield CopyPiece(work, copy.slot, floor)
            passed_bytes += copy.source.nbytes if small else 0
        if small and (
            size_bytes >= PIECE_BYTES or passed_bytes >= _MOST_PASSED_BYTES or len(small) >= _MOST_IN_A_BATCH
        ):
            yield CopyPiece(partial(_copy_many, small), small[0].slot, copy.slot)
            small, size_bytes, passed_bytes = [], 0, 0
    if small:
        yield CopyPiece(partial(_copy_many, small), small[0].slot, copies[-1].slot)


def _copy_whole(copy: Copy) -> None:
    """Copy what only torch can: conjugated, cast, or on an exotic device."""
    with torch.no_grad():
        copy.target.copy_(copy.source)


def _copy_many(copies: Sequence[Copy]) -> None:
    with torch.no_grad():
        copy_all([copy.target for copy in copies], [copy.source for copy in copies])


def _plain(copy: Copy) -> bool:
    return (
        copy.source.dtype == copy.target.dtype
        and copy.source.device.type == copy.target.device.type == "cpu"
        and not (copy.source.is_conj() or copy.source.is_neg())
    )


def _slices(copy: Copy) -> Generator[Callable[[], None]]:
    """Yield copies of ranges of the first dimension; a contiguous tensor has only one.

    By NumPy: torch would start a team of threads.
    """
    words = _SAME_SIZE[copy.source.dtype.itemsize]
    source, target = (each.detach().view(words) for each in (copy.source, copy.target))
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    rows = len(source)
    step = max(1, PIECE_BYTES * rows // source.nbytes)
    from_array, to_array = source.numpy(), target.numpy()
    for start in range(0, rows, step):
        yield partial(np.copyto, to_array[start : start + step], from_array[start : start + step])


@final
class Versions:
    """The present versions of sources, for a later comparison.

    A change through `tensor.data`, NumPy or another view without a counter is not detected.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._sources = [(copy.name, copy.source, version_of(copy.source)) for copy in copies]

    def changed(self) -> Sequence[str]:
        """List the names of sources changed since."""
        return [name for name, source, version in self._sources if version_of(source) != version]
