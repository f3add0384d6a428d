"""The thread that writes the journal of a root."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from ckpt_core.crew import run_with_timeout
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.journal._event_records import is_wanted
from ckpt_core.journal._files import EventFile, HistoryFile, last_events, read_history
from ckpt_core.journal._records import Record, encode
from ckpt_core.journal._run_log import MOST_WAITING, RunLog, Training
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Event

_logger = logger_of(__name__)

_GRACE_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 60.0
_TIER_SECONDS: Final = 0.5
"""The longest wait for a further tier; the journal of the root must not wait for a bucket that is down."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Tenure:
    """The time for which a job holds a root.

    Attributes:
        run: its id.
        ranks: of the job.
        check: raises once another job has the root.
    """

    run: str
    ranks: int
    check: Callable[[], None]


@final
class TierHistory:
    """The copy of the history in a further tier, which may not answer.

    Every request is made on a thread of its own; while one has no answer, there is no other.

    Concurrency: one thread.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._file = HistoryFile(storage)
        self._free = threading.Event()
        self._free.set()
        self._failure: OSError | None = None

    def read(self) -> list[Record]:
        """Return the history that is there; what has not come in time is left out.

        Raises:
            OSError: storage failed.
        """
        found: list[Record] = []
        self._ask(lambda: found.extend(read_history(self._storage)))
        return found if self._free.is_set() else []

    def lacks(self, history: Sequence[Record]) -> bool:
        """Return whether the history is to be written there now; without I/O."""
        return self._free.is_set() and self._file.lacks(history)

    def write(self, history: Sequence[Record]) -> None:
        """Write the history, unless the request before has no answer yet.

        Raises:
            OSError: storage failed, now or in the request before.
        """
        self._ask(lambda: self._file.write(history))

    def _ask(self, act: Callable[[], None]) -> None:
        def quietly() -> None:
            try:
                act()
            except OSError as error:
                self._failure = error
            finally:
                self._free.set()

        if self._free.is_set():
            self._free.clear()
            run_with_timeout(_TIER_SECONDS, quietly)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@final
class Recorder:
    """Writes the journal of a root. Nothing raises, and no caller waits for storage.

    A failure of storage is one warning; what could not be written is tried again with what follows. Once
    another job has the root, nothing is written any more.

    Concurrency: `emit` on any thread, the other methods on the main thread, all else on `ckpt-journal`.

    Attributes:
        training: what the training thread notes.
        log: the records.
        known: set once the history has been read, or cannot be.
        wake: set when there is something to do.
        clock: seconds that never go back.

    Args:
        storage: the root.
        tiers: further roots of the run, which get a copy of the history.
        clock: see above.
    """

    def __init__(
        self, storage: Storage, tiers: Sequence[Storage] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.training = Training()
        self.log = RunLog(storage.url, self.training, clock)
        self.known, self.wake = threading.Event(), threading.Event()
        self.clock = clock
        self._storage = storage
        self._tiers = [TierHistory(tier) for tier in tiers]
        self._pid = os.getpid()
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._closing = self._stopped = self._warned = False
        self._wrote_at = -math.inf

    def emit(self, event: Event) -> None:
        """Take an event, if the journal has a record for it."""
        if is_wanted(event) and not self._stopped and os.getpid() == self._pid:
            self._waiting.append(event)
            self.wake.set()

    def begin(self, tenure: Tenure) -> None:
        """Start to write: this process is the coordinator, and has the root."""
        if self._thread is not None or self._stopped or os.getpid() != self._pid:
            return
        # A daemon: the process must be able to end while storage hangs.
        thread = threading.Thread(target=self._loop, args=(tenure,), name="ckpt-journal", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, or there are too many threads
            self.drop()
        else:
            self._thread = thread

    def finish(self) -> None:
        """Write what is left, and end the thread, unless storage hangs."""
        if os.getpid() != self._pid or self._thread is None:
            return
        self._closing = True
        self.wake.set()
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive() and not self._stopped:
            self._warn("storage has not answered for a while, and the last lines may be missing")
        self._stopped = True

    def drop(self) -> None:
        """Take no more events: another rank writes them, or none."""
        self._stopped = True
        self._waiting.clear()
        self.known.set()

    def _loop(self, tenure: Tenure) -> None:
        try:
            self.log.begin(tenure.run, tenure.ranks)
            self._read()
            own = self._storage.own
            files = HistoryFile(own), EventFile(own), self._tiers
            closing = False
            while not (closing or self._stopped):
                self.wake.wait(self.log.next_look(self.clock()) if self.training.first else _IDLE_SECONDS)
                closing = self._closing  # before anything is looked at
                self.wake.clear()
                while self._waiting:
                    self.log.take(self._waiting.popleft())
                self.log.look(closing=closing)
                self._write(*files, check=tenure.check, closing=closing)
        except CheckpointError:
            pass  # another job has the root, and keeps its journal
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread, and no save may fail with it
            self._warn(f"{type(error).__name__}: {error}")
        finally:
            self.drop()

    def _read(self) -> None:
        """Read what earlier runs have left; a tier may know what a new disk does not."""
        histories: list[list[Record]] = []
        events: list[Record] = []
        own: Callable[[], list[Record]] = partial(read_history, self._storage)
        reads = [own, *(tier.read for tier in self._tiers)]
        for read in reads:
            with self._warning():
                histories.append(read())
        with self._warning():
            events = last_events(self._storage)
        self.log.continue_from(histories, events)
        self.known.set()

    def _write(
        self,
        history: HistoryFile,
        events: EventFile,
        copies: Sequence[TierHistory],
        *,
        check: Callable[[], None],
        closing: bool,
    ) -> None:
        """Write what is new, the history first.

        Raises:
            RootBusyError: another job has the root.
        """
        log, now = self.log, self.clock()
        pause = log.pause(self._wrote_at, whole_run=True)
        waited = closing or log.ended or events.appends or now - self._wrote_at >= pause
        lines_due = bool(log.lines) and waited
        files: Sequence[HistoryFile | TierHistory] = (history, *copies)
        due = [each for each in files if log.started and each.lacks(log.history)]
        if not due and not lines_due:
            return
        with self._warning():
            check()
            with self._warning():
                if history in due:
                    history.write(log.history)
                if lines_due:
                    self._wrote_at = now
                    events.write(encode(log.lines))
                    log.lines.clear()
            for copy in copies:
                with self._warning():  # a tier that fails keeps nothing from the root, or from other tiers
                    if copy in due:
                        copy.write(log.history)

    @contextmanager
    def _warning(self) -> Generator[None]:
        """Turn a failure of storage into the warning."""
        try:
            yield
        except OSError as error:
            self._warn(str(error))

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "the journal of %s is not complete: %s. Saves go on without it", self._storage.url, problem
            )
