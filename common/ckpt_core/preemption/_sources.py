"""Sources of preemptions of this rank: signals, files, functions, deadlines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

from torch.utils.data import get_worker_info

from ckpt_core.cadence import OnPreemption
from ckpt_core.disclosure import logger_of
from ckpt_core.validation import imported

_logger = logger_of(__name__)
_PERIOD_SECONDS = 1.0
_INTERRUPTS_TO_FORCE = 3
_SLURM_END: Final = "SLURM_JOB_END_TIME"


@final
class PreemptionSources:
    """Counts of preemptions of this rank, over all sources of some policies.

    Concurrency: used on the main thread; files and functions are polled on a separate thread, so that
    training never waits for a filesystem or a service. A source that raises counts as false; each new error
    is logged.

    Raises:
        ConfigError: a function that a policy names cannot be imported.
    """

    def __init__(self, policies: Sequence[OnPreemption], *, period_seconds: float = _PERIOD_SECONDS) -> None:
        self.began = time.time()
        self._ends: dict[str, float | None] = {}
        self._sources: dict[str, Callable[[], Any]] = {}
        self._stopping, others, stopping_signals = set[str](), set[str](), set[str]()
        for each in policies:
            polled = _polled(each)
            self._sources |= polled
            (stopping_signals if each.stop else others).update(each.signals)
            self._stopping.update(polled if each.stop else ())
            self._note_deadline(each.deadline)
        self._stopping_signals, self._other_signals = stopping_signals, others - stopping_signals
        self._signals = SignalCounter(stopping_signals | others)
        self._counts = Counter(dict.fromkeys(self._sources, 0))
        self._true = dict.fromkeys(self._sources, False)
        self._period_seconds = period_seconds
        self._closed = threading.Event()
        self._logged = False
        if self._sources:
            threading.Thread(target=self._poll, name="ckpt-preemption", daemon=True).start()

    @property
    def ends_at(self) -> float | None:
        """When the job ends, in seconds since the epoch; None if that is not known."""
        return min((end for end in self._ends.copy().values() if end is not None), default=None)

    @property
    def stop(self) -> bool:
        heard = [name for name in sorted(self._stopping_signals) if self._signals.count([name])]
        heard += [text for text in sorted(self._stopping) if self._counts[text]]
        if heard and not self._logged:
            self._logged = True
            _logger.warning("preemption announced to this rank by %s", ", ".join(heard))
        return bool(heard)

    @property
    def count(self) -> int:
        """The number of requests to save and continue."""
        polled = sum(self._counts[text] for text in self._sources if text not in self._stopping)
        return self._signals.count(self._other_signals) + polled

    def close(self) -> None:
        """Restore signal handlers and stop polling, without waiting for a source."""
        self._signals.close()
        self._closed.set()

    def _note_deadline(self, given: Any) -> None:
        if given == "slurm":
            end = os.environ.get(_SLURM_END, "")
            self._ends[given] = float(end) if end.isdecimal() else None
            if not end.isdecimal():
                _logger.warning(
                    'deadline="slurm": %s is not set, so the last save is not planned', _SLURM_END
                )
        elif isinstance(given, datetime):
            self._ends["moment"] = given.timestamp()
        elif isinstance(given, int | float):
            self._ends["seconds"] = self.began + given
        elif given is not None:
            text = f"deadline {given}"
            self._sources[text] = partial(self._ask_deadline, text, imported("OnPreemption", given))

    def _ask_deadline(self, text: str, ask: Callable[[], float | None]) -> bool:
        end = ask()
        self._ends[text] = None if end is None else float(end)
        return False  # what is planned by it is decided with what saves cost

    def _poll(self) -> None:
        """Count how often each source has become true."""
        errors: dict[str, str] = {}
        while not self._closed.is_set():
            for text, ask in self._sources.items():
                true = False
                try:
                    true = bool(ask())
                except Exception as error:  # noqa: BLE001 - logged; a failed poll must not end training
                    if errors.get(text) != repr(error):
                        errors[text] = repr(error)
                        _logger.error("%s could not be asked about a preemption: %r", text, error)  # noqa: TRY400
                if true and not self._true[text]:
                    self._counts[text] += 1
                self._true[text] = true
            self._closed.wait(self._period_seconds)


def _polled(policy: OnPreemption) -> dict[str, Callable[[], Any]]:
    """Return the functions to poll, by their description."""
    found: dict[str, Callable[[], Any]] = {}
    if policy.file is not None:
        found[f"file {policy.file}"] = Path(policy.file).expanduser().exists
    if policy.when is not None:
        found[f"function {policy.when}"] = imported("OnPreemption", policy.when)
    return found


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
