"""Copies of host tensors on a separate thread, which training can help to finish."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import final

from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.staging._copies import Copy, CopyPiece, Versions, pieces_of

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
        self._versions = Versions(copies)
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
        """Whether the copies have ended."""
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
                self.changed = self._versions.changed()
                # Clones and slots are not needed any longer, and this object may live until the next save.
                self._pieces.close()
                self._versions, self._pieces, self._floor = Versions(()), pieces_of(()), math.inf
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
