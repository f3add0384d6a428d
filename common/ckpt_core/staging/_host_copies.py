"""Copies of host tensors on a thread of their own, which the training may help to an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import final

from ckpt_core.disclosure import logger_of
from ckpt_core.staging._copies import Copy, Piece, Versions, pieces_of

_logger = logger_of(__name__)


@final
class HostCopies:
    """Begun at construction, behind nothing else; done at the latest when `help` returns.

    Concurrency: everything on any thread. An error or an interruption of whoever copies ends the
    copies; nobody is left waiting, and `finish` tells.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.changed: Sequence[str] = ()
        self._versions = Versions(copies)
        self._pieces: Generator[Piece] = pieces_of(copies)
        self._lock = threading.Condition()
        self._busy: dict[int, int] = {}
        self._floor = copies[0].slot if copies else 0
        self._listeners: list[Callable[[], None]] = []
        self._exhausted = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._alone = not copies or not start_thread(self._work_quietly)
        if not copies:
            self._work_quietly()

    @property
    def done(self) -> bool:
        """Whether nothing is copied any more."""
        return self._ended.is_set()

    def help(self) -> None:
        """Copy what is left on this thread, too, and return when all of it is done or has failed."""
        self._work_quietly()
        self._ended.wait()

    def finish(self) -> None:
        """Return when every copy is made; whatever kept one from being made is raised."""
        if self._alone:
            self._work_quietly()
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def wait_for(self, slot: int) -> None:
        """Return when all slots up to this one are filled, or nothing is copied any more."""
        if self._alone:
            self._work_quietly()
        with self._lock:
            self._lock.wait_for(lambda: self.done or slot < self._first_open())

    def when_done(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, on whichever thread ends the copies; at once if they have ended."""
        with self._lock:
            if not self.done:
                self._listeners.append(listener)
                return
        listener()

    def _work_quietly(self) -> None:
        """Copy until nothing is left; an error is for `finish` to raise, an interruption goes on."""
        try:
            while (piece := self._take()) is not None:
                piece.work()
                self._put_back(None)
        except Exception as error:  # noqa: BLE001 - the save fails of it, not the training
            self._put_back(error)
        except BaseException as error:
            self._put_back(error)
            raise

    def _take(self) -> Piece | None:
        with self._lock:
            if self._exhausted:
                return None
            # Before the piece is there, so that whatever comes in between is accounted for.
            self._busy[threading.get_ident()] = self._floor
            piece = next(self._pieces, None)
            if piece is not None:
                self._busy[threading.get_ident()] = piece.slot
                self._floor = piece.floor
                return piece
            self._exhausted = True
            listeners = self._leave()
        _call(listeners)
        return None

    def _put_back(self, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._error = self._error or error
                self._exhausted = True
            listeners = self._leave()
        _call(listeners)

    def _first_open(self) -> int:
        """The first slot that is not filled, or may not be."""
        return min(self._floor, *self._busy.values()) if self._busy else self._floor

    def _leave(self) -> list[Callable[[], None]]:
        """The calling thread copies no more; returns whom to tell that nothing is copied any more."""
        self._busy.pop(threading.get_ident(), None)
        listeners: list[Callable[[], None]] = []
        if self._exhausted and not self._busy and not self._ended.is_set():
            # At once, and before the end is told: from then on changes are allowed.
            self.changed = self._versions.changed()
            # Clones and slots are not needed any more, and this object may live until the next save.
            self._pieces.close()
            self._versions = Versions(())
            self._pieces = pieces_of(())
            self._ended.set()
            listeners, self._listeners = self._listeners, []
        self._lock.notify_all()
        return listeners


def _call(listeners: Sequence[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()


def start_thread(work: Callable[[], None]) -> bool:
    """Run `work` on a new thread; False if there can be none, as when the interpreter is ending."""
    try:
        # Not a daemon: the interpreter must not end, and free the tensors, in the middle of a copy.
        threading.Thread(target=work, name="ckpt-copy", daemon=False).start()
    except RuntimeError as error:
        _logger.info("no thread for the copies (%s): they are made where they are waited for", error)
        return False
    return True
