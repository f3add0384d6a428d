"""What announces a preemption to this rank: signals, files, functions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from ckpt_core.cadence import OnPreemption
from ckpt_core.disclosure import logger_of
from ckpt_core.preemption._signals import SignalCounter
from ckpt_core.validation import imported

_logger = logger_of(__name__)
_PERIOD_SECONDS = 1.0


@final
class PreemptionSources:
    """Counts what has been announced to this rank, by any of the sources of some policies.

    Concurrency: made, asked and closed on the main thread; files and functions are looked at by a thread of
    their own, so that training never waits for a filesystem or a service.

    Raises:
        ConfigError: a function that a policy names cannot be imported.
    """

    def __init__(self, policies: Sequence[OnPreemption], *, period_seconds: float = _PERIOD_SECONDS) -> None:
        self._stopping = frozenset(name for each in policies if each.stop for name in each.signals)
        self._others = frozenset(name for each in policies for name in each.signals) - self._stopping
        sources = {text: ask for each in policies for text, ask in _sources(each).items()}
        self._stopping_sources = frozenset(t for each in policies if each.stop for t in _sources(each))
        self._watcher = Poller(sources, period_seconds=period_seconds)
        self._signals = SignalCounter(self._stopping | self._others)
        self._told = False

    @property
    def stop(self) -> bool:
        """Whether the job is to end."""
        counts = self._watcher.counts
        heard = [name for name in sorted(self._stopping) if self._signals.count([name])]
        heard += [text for text in sorted(self._stopping_sources) if counts[text]]
        if heard and not self._told:
            self._told = True
            _logger.warning("preemption announced to this rank by %s", ", ".join(heard))
        return bool(heard)

    @property
    def count(self) -> int:
        """How often a save was announced after which training is to go on."""
        counts = self._watcher.counts
        watched = sum(counts[text] for text in counts if text not in self._stopping_sources)
        return self._signals.count(self._others) + watched

    def close(self) -> None:
        """Put signal handlers back and stop looking."""
        self._signals.close()
        self._watcher.close()


@final
class Poller:
    """Asks every source again and again, on one thread, and counts how often each has become true.

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
            threading.Thread(target=self._watch, name="ckpt-preemption", daemon=True).start()

    def close(self) -> None:
        """Let the thread end; it may still be inside a source, and is not waited for."""
        self._closed.set()

    def _watch(self) -> None:
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
        except Exception as error:  # noqa: BLE001 - the log is told; training must not end by a look
            if self._errors.get(text) != repr(error):
                self._errors[text] = repr(error)
                _logger.error("%s cannot tell of a preemption: %r", text, error)  # noqa: TRY400
            return False


def _sources(policy: OnPreemption) -> dict[str, Callable[[], bool]]:
    """What is to be asked, by how it is told."""
    found: dict[str, Callable[[], bool]] = {}
    if policy.file is not None:
        found[f"file {policy.file}"] = Path(policy.file).expanduser().exists
    if policy.when is not None:
        found[f"function {policy.when}"] = imported("OnPreemption", policy.when)
    return found
