"""Sources of preemptions of this rank: signals, files, functions, deadlines."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.cadence import OnPreemption
from ckpt_core.disclosure import logger_of
from ckpt_core.preemption._signals import SignalCounter
from ckpt_core.validation import imported

_logger = logger_of(__name__)
_PERIOD_SECONDS = 1.0
_SLURM_END: Final = "SLURM_JOB_END_TIME"


@final
class PreemptionSources:
    """Counts of preemptions of this rank, over all sources of some policies.

    Concurrency: used on the main thread; files and functions are polled on a separate thread, so that
    training never waits for a filesystem or a service.

    Raises:
        ConfigError: a function that a policy names cannot be imported.
    """

    def __init__(self, policies: Sequence[OnPreemption], *, period_seconds: float = _PERIOD_SECONDS) -> None:
        self.began = time.time()
        self._ends: dict[str, float | None] = {}
        self._stopping = frozenset(name for each in policies if each.stop for name in each.signals)
        self._others = frozenset(name for each in policies for name in each.signals) - self._stopping
        sources = {text: ask for each in policies for text, ask in _sources(each).items()}
        sources |= {text: ask for each in policies for text, ask in self._deadline(each.deadline).items()}
        self._stopping_sources = frozenset(t for each in policies if each.stop for t in _sources(each))
        self._poller = Poller(sources, period_seconds=period_seconds)
        self._signals = SignalCounter(self._stopping | self._others)
        self._logged = False

    @property
    def ends_at(self) -> float | None:
        """When the job ends, in seconds since the epoch; None if that is not known."""
        return min((end for end in self._ends.copy().values() if end is not None), default=None)

    def _deadline(self, given: Any) -> dict[str, Callable[[], bool]]:
        """Note a deadline; return the function to poll for it, if it is one."""
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
            return {text: partial(self._ask_deadline, text, imported("OnPreemption", given))}
        return {}

    def _ask_deadline(self, text: str, ask: Callable[[], float | None]) -> bool:
        end = ask()
        self._ends[text] = None if end is None else float(end)
        return False  # what is planned by it is decided with what saves cost

    @property
    def stop(self) -> bool:
        """Whether the job must stop."""
        counts = self._poller.counts
        heard = [name for name in sorted(self._stopping) if self._signals.count([name])]
        heard += [text for text in sorted(self._stopping_sources) if counts[text]]
        if heard and not self._logged:
            self._logged = True
            _logger.warning("preemption announced to this rank by %s", ", ".join(heard))
        return bool(heard)

    @property
    def count(self) -> int:
        """The number of requests to save and continue."""
        counts = self._poller.counts
        polled = sum(counts[text] for text in counts if text not in self._stopping_sources)
        return self._signals.count(self._others) + polled

    def close(self) -> None:
        """Restore signal handlers and stop polling."""
        self._signals.close()
        self._poller.close()


@final
class Poller:
    """A thread that polls every source and counts how often each has become true.

    A source that raises counts as false; each new error is logged.
    """

    def __init__(self, sources: dict[str, Callable[[], bool]], *, period_seconds: float) -> None:
        self.counts = Counter(dict.fromkeys(sources, 0))
        self._sources = sources
        self._true: dict[str, bool] = dict.fromkeys(sources, False)
        self._errors: dict[str, str] = {}
        self._period_seconds = period_seconds
        self._closed = threading.Event()
        if sources:
            threading.Thread(target=self._poll, name="ckpt-preemption", daemon=True).start()

    def close(self) -> None:
        """Let the thread end, without waiting for a source that it may be inside."""
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.is_set():
            for text, ask in self._sources.items():
                true = self._ask(text, ask)
                if true and not self._true[text]:
                    self.counts[text] += 1
                self._true[text] = true
            self._closed.wait(self._period_seconds)

    def _ask(self, text: str, ask: Callable[[], bool]) -> bool:
        try:
            return bool(ask())
        except Exception as error:  # noqa: BLE001 - logged; a failed poll must not end training
            if self._errors.get(text) != repr(error):
                self._errors[text] = repr(error)
                _logger.error("%s could not be asked about a preemption: %r", text, error)  # noqa: TRY400
            return False


def _sources(policy: OnPreemption) -> dict[str, Callable[[], bool]]:
    """Return the functions to poll, by their description."""
    found: dict[str, Callable[[], bool]] = {}
    if policy.file is not None:
        found[f"file {policy.file}"] = Path(policy.file).expanduser().exists
    if policy.when is not None:
        found[f"function {policy.when}"] = imported("OnPreemption", policy.when)
    return found
