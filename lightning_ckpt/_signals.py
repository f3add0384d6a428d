"""Who hears a preemption signal: the core's handler, not Lightning's, which broadcasts from inside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, final

T = TypeVar("T")
_REGISTER = "register_signal_handlers"


@final
class SignalTakeover:
    """Keeps the core's handlers first, from when they are installed until `give_back`.

    Lightning remembers the handlers that it finds and puts those back at its end, so ours are set aside
    while it looks. Its own SIGTERM handler waits for a collective: ranks that are signalled one after
    another, or in the middle of a step, hang in it. Under SLURM its SIGUSR1 handler saves wherever the signal
    arrives.

    Args:
        connector: what registers Lightning's handlers for a Trainer.
        names: of the signals.
    """

    def __init__(self, connector: Any, names: Iterable[str]) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._numbers = [signal.Signals[name] for name in sorted(names)] if on_main else []
        self._connector = connector
        self._before: dict[signal.Signals, Any] = {}
        self._ours: dict[signal.Signals, Any] = {}
        self._theirs: dict[signal.Signals, Any] = {}

    def made_by(self, make: Callable[[], T]) -> T:
        """The result of `make`; the handlers that it installs stay first, whatever Lightning registers."""
        self._before = {number: _handler(number) for number in self._numbers}
        made = make()
        self._ours = {number: _handler(number) for number in self._numbers}
        if self._numbers:
            setattr(self._connector, _REGISTER, self._register)
        return made

    def give_back(self) -> None:
        """Let Lightning's handlers do their own clearing up; harmless when repeated."""
        self._connector.__dict__.pop(_REGISTER, None)
        for number, theirs in self._theirs.items():
            _install(number, theirs)
        self._theirs = {}

    def _register(self) -> None:
        for number, before in self._before.items():
            _install(number, before)
        getattr(type(self._connector), _REGISTER)(self._connector)
        self._theirs = {number: _install(number, ours) for number, ours in self._ours.items()}


def _handler(number: signal.Signals) -> Any:
    handler = signal.getsignal(number)
    # None is a handler that C code installed, which Python cannot put back.
    return signal.SIG_DFL if handler is None else handler


def _install(number: signal.Signals, handler: Any) -> Any:
    previous = _handler(number)
    signal.signal(number, handler)
    return previous
