"""Memory for a state that does not fit, used again once a part is written."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch

from ckpt_core.errors import CheckpointError
from ckpt_core.staging._copies import CopyPiece
from ckpt_core.staging._overlap import DeferredCopies


@final
class Waves:
    """Windows on files, of which memory holds a few at a time.

    The place of a window is used again when nothing refers to it any more: a storage, a checksum or a twin
    that still needs the bytes has a view of them.

    `copies.wait()` fills the windows in their order, on the calling thread. Another takes each once, by
    `window`, after `copies.wait_for`. After `stop`, on any thread, nothing is filled.

    Args:
        memory: on a page boundary.
        window_bytes: whole pages.
        fills: for every window, what copies its content to its memory.

    Attributes:
        LEAST: of windows in memory. Two are being written, two wait, two are being filled, and an error keeps
            some until it is raised.
    """

    LEAST: ClassVar[int] = 8

    def __init__(
        self, memory: torch.Tensor, window_bytes: int, fills: Sequence[Callable[[torch.Tensor], None]]
    ) -> None:
        last = memory.numel() - window_bytes
        self._free = [memory[at : at + window_bytes] for at in range(0, last + 1, window_bytes)]
        self._filled: dict[int, torch.Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._changed = threading.Condition()
        self._stopped = False
        pieces = (CopyPiece(partial(self._fill, at, fill), at, at + 1) for at, fill in enumerate(fills))
        self.copies = DeferredCopies((), pieces=pieces)

    def window(self, before: int, number: int) -> memoryview:
        """Return a window, `number` after the first `before`; it ends with its views."""
        place = self._filled.pop(before + number)
        # A view of its own for each use: its end is the end of all that was made of it.
        array: Any = place.numpy()
        self._lent[place.data_ptr()] = weakref.ref(array, lambda _: self._given_back(place))
        return memoryview(array)

    def stop(self) -> None:
        """Fill no more windows; the copies then end, with an error unless all are made."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _fill(self, number: int, fill: Callable[[torch.Tensor], None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._free)
            if self._stopped:
                raise CheckpointError("the save ended before all of the state was copied")
            place = self._free.pop()
        fill(place)
        self._filled[number] = place

    def _given_back(self, place: torch.Tensor) -> None:
        with self._changed:
            self._free.append(place)
            self._changed.notify_all()


def flat_parts(tensor: torch.Tensor, start: int, stop: int) -> Generator[torch.Tensor]:
    """Yield views whose elements, one after another, are those of a range of a tensor."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:
        yield from flat_parts(tensor[last], start - last * row, stop - last * row)
        return
    if start % row:
        yield from flat_parts(tensor[first - 1], start % row, row)
    if first < last:
        yield tensor[first:last]
    if stop % row:
        yield from flat_parts(tensor[last], 0, stop % row)
