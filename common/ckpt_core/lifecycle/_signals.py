"""Signals that announce preemption: a handler that sets a flag, and nothing more."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, final

_logger = logging.getLogger(__name__)


@final
class SignalFlag:
    """True once one of the signals has arrived; the handlers before are put back by `close`.

    Saving inside a handler could interrupt an optimizer step or a collective; so the flag is only looked at
    at step boundaries. Must be made on the main thread; elsewhere it stays false, with a warning.
    """

    def __init__(self, signal_names: Iterable[str]) -> None:
        self._arrived = False
        self._previous: dict[signal.Signals, Any] = {}
        names = sorted(signal_names)
        if not names:
            return
        if threading.current_thread() is not threading.main_thread():
            _logger.warning("not on the main thread: %s will not be noticed", ", ".join(names))
            return
        for name in names:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._note)

    def __bool__(self) -> bool:
        return self._arrived

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._arrived = True

    def close(self) -> None:
        """Put the handlers back that were there before, unless somebody else replaced ours."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous)
        self._previous.clear()
