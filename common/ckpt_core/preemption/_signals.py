"""Signals that announce preemption: a handler that only counts."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Collection
from types import FrameType
from typing import Any, final

from torch.utils.data import get_worker_info

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)
_INTERRUPTS_TO_FORCE = 3


@final
class SignalCounter:
    """Counts of signals received; `close` restores the previous handlers.

    Saving inside a handler could interrupt an optimizer step or a collective; so the handler only counts, and
    calls the previous Python handler. Exceptions of that, SystemExit included, are logged later: they would
    end the step half-way. No number of signals ends training, except that the third SIGINT, if SIGINT is
    counted, interrupts as usual. Must be constructed on the main thread; elsewhere nothing is counted, with a
    warning.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._counts: Counter[int] = Counter()
        self._previous: dict[int, Any] = {}
        self._trouble: list[BaseException] = []
        self._owner = os.getpid()
        self._closed = False
        if names and threading.current_thread() is not threading.main_thread():
            _logger.warning("not on the main thread: %s will not be noticed", ", ".join(sorted(names)))
            return
        for name in sorted(names):
            number = signal.Signals[name]
            previous = signal.signal(number, self._note)
            # None is a handler that C code installed, which Python cannot restore.
            self._previous[number] = signal.SIG_DFL if previous is None else previous

    def count(self, names: Collection[str]) -> int:
        """Return the number of named signals received."""
        while self._trouble:
            error = self._trouble.pop()
            _logger.error("a previous signal handler raised %r; training continues to its last save", error)
        return sum(self._counts[signal.Signals[name]] for name in names)

    def close(self) -> None:
        """Restore the previous handlers, except where ours was replaced."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, _still_open(number, previous))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            self._note_in_child(number)
            return
        self._counts[number] += 1
        if number == signal.SIGINT and self._counts[number] >= _INTERRUPTS_TO_FORCE:
            signal.default_int_handler(number, frame)
        previous = self._previous[number]
        if callable(previous) and previous is not signal.default_int_handler:
            try:
                previous(number, frame)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - `count` logs it, at a step boundary
                self._trouble.append(error)

    def _note_in_child(self, number: int) -> None:
        """Handle a signal in a forked child, which inherits the handler but does not save.

        Schedulers signal whole groups of processes: a data loader's worker ignores the first signal, for
        training would break without it, and ends at the second. Any other child behaves as without us.
        """
        signal.signal(number, _still_open(number, self._previous[number]))
        if get_worker_info() is None:
            os.kill(os.getpid(), number)


def _still_open(number: int, handler: Any) -> Any:
    """Return the handler, or the one before it if its counter is closed."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, SignalCounter) and owner._closed:
        handler = owner._previous[number]
        owner = getattr(handler, "__self__", None)
    return handler
