"""Who hears a preemption signal: the core's flag, not Lightning's handler, which broadcasts from inside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, final

T = TypeVar("T")


@final
class SignalTakeover:
    """Keeps the core's handlers aside while Lightning sets up, puts them first, and takes them away again.

    Lightning remembers the handlers that it finds and puts those back at its end, so ours must not be there
    when it looks. Its own SIGTERM handler waits for a collective: ranks that are signalled one after another,
    or in the middle of a step, hang in it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._numbers = [signal.Signals[name] for name in sorted(names)] if on_main else []
        self._ours: dict[signal.Signals, Any] = {}
        self._theirs: dict[signal.Signals, Any] = {}

    def made_by(self, make: Callable[[], T]) -> T:
        """The result of `make`; the handlers that it installs are noted and set aside."""
        before = {number: _handler(number) for number in self._numbers}
        made = make()
        self._ours = {number: _install(number, handler) for number, handler in before.items()}
        return made

    def take(self) -> None:
        """Put the noted handlers first; harmless when repeated."""
        if not self._theirs:
            self._theirs = {number: _install(number, ours) for number, ours in self._ours.items()}

    def give_back(self) -> None:
        """Put back what `take` found."""
        for number, theirs in self._theirs.items():
            _install(number, theirs)
        self._theirs = {}


def _handler(number: signal.Signals) -> Any:
    handler = signal.getsignal(number)
    # None is a handler that C code installed, which Python cannot put back.
    return signal.SIG_DFL if handler is None else handler


def _install(number: signal.Signals, handler: Any) -> Any:
    previous = _handler(number)
    signal.signal(number, handler)
    return previous
