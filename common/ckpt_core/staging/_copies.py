"""Copies of host tensors in pieces, and torch's counters of in-place changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch

from ckpt_core._torch_internals import copy_all, version_of
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of

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


def changes_of(copies: Sequence[Copy]) -> Callable[[], Sequence[str]]:
    """Return a function that lists the names of sources changed since.

    A change through `tensor.data`, NumPy or another view without a counter is not detected.
    """
    seen = [version_of(copy.source) for copy in copies]
    return lambda: [
        copy.name for copy, one in zip(copies, seen, strict=True) if version_of(copy.source) != one
    ]


_logger = logger_of(__name__)


@final
class HostCopies:
    """Copies that begin on construction and end when `help` returns, at the latest.

    Concurrency: all methods on any thread. An error or an interruption of a copying thread ends the copies:
    no thread waits any longer, and `finish` raises it.
    """

    def __init__(
        self, copies: Sequence[Copy], pieces: Generator[CopyPiece] | None = None, *, priority: int = 0
    ) -> None:
        self.changed: Sequence[str] = ()
        self._changes = changes_of(copies)
        self._pieces = pieces or pieces_of(copies)
        self._lock = threading.Condition()
        self._busy: dict[int, int] = {}
        self._floor: float = copies[0].slot if copies else 0
        self._exhausted = False
        self._error: BaseException | None = None
        self._ended: Future[None] = Future()
        # Pieces that wait for what a thread writes must not be made on that one.
        self._alone = pieces is None and (
            not copies or not start_thread(partial(self._work_quietly, priority))
        )
        if not copies and pieces is None:
            self._work_quietly()

    @property
    def done(self) -> bool:
        return self._ended.done()

    def help(self) -> None:
        """Take part in the copies on this thread until they have ended or failed."""
        self._work_quietly()
        self._ended.exception()

    def finish(self) -> None:
        """Block until every copy is made; raise the error of one that failed."""
        if self._alone:
            self._work_quietly()
        self._ended.result()

    def wait_for(self, slot: int) -> None:
        """Block until slots 0 to `slot` are filled, or the copies have ended."""
        if self._alone:
            self._work_quietly()
        with self._lock:
            self._lock.wait_for(lambda: slot < min([self._floor, *self._busy.values()]))

    def when_done(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, on the thread that ends the copies, or now if ended."""
        self._ended.add_done_callback(lambda _: listener())

    def _work_quietly(self, priority: int = 0) -> None:
        """Copy until no piece remains; `finish` raises errors, interruptions propagate."""
        give_way(priority)
        try:
            while (piece := self._take()) is not None:
                piece.work()
                self._leave()
        except Exception as error:  # noqa: BLE001 - it fails the save, not training
            self._leave(error)
        except BaseException as error:
            self._leave(error)
            raise

    def _take(self) -> CopyPiece | None:
        with self._lock:
            if self._exhausted:
                return None
            # Before the piece is taken, so that an exception in between is accounted for.
            self._busy[threading.get_ident()] = int(self._floor)
            piece = next(self._pieces, None)
            if piece is not None:
                self._busy[threading.get_ident()] = piece.slot
                self._floor = piece.floor
                return piece
            self._exhausted = True
        self._leave()
        return None

    def _leave(self, error: BaseException | None = None) -> None:
        """Note that the calling thread copies no more; the last one ends the copies."""
        with self._lock:
            if error is not None:
                self._error, self._exhausted = self._error or error, True
            self._busy.pop(threading.get_ident(), None)
            last = self._exhausted and not self._busy
            if last and self._floor < math.inf:
                # Before the end is reported: from then on changes are allowed.
                self.changed = self._changes()
                # Clones and slots are not needed any longer, and this object may live until the next save.
                self._pieces.close()
                self._changes, self._pieces, self._floor = changes_of(()), pieces_of(()), math.inf
            self._lock.notify_all()
        if last and not self._ended.done():
            if self._error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(self._error)


def start_thread(work: Callable[[], None]) -> bool:
    """Run `work` on a new thread; return False if none starts, as at interpreter exit."""
    try:
        # Not a daemon: the interpreter must not end, and free the tensors, in the middle of a copy.
        threading.Thread(target=work, name="ckpt-copy", daemon=False).start()
    except RuntimeError as error:
        _logger.info("no thread for the copies (%s): the threads that wait for them make them", error)
        return False
    return True
