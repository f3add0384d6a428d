"""The thread that writes the journal of a root, and the records of its run."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from ckpt_core.crew import run_with_timeout
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.errors import CheckpointError
from ckpt_core.journal._records import (
    Record,
    Trail,
    encode,
    failure_rate,
    loss,
    record,
    trail_of,
    unclean,
    without_end,
)
from ckpt_core.journal._run_files import MOST_RUNS, RunFile, Runs, read_runs, run_files
from ckpt_core.policies import FailureRate
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Event, Sink

MOST_WAITING: Final = 2000
_SOONEST_SECONDS: Final = 1.0
_LATEST_SECONDS: Final = 60.0
_SAME_INTERVAL: Final = 0.1


_KINDS: Final[Mapping[str, str]] = {
    "save.cost": "save",
    "upload.failed": "upload",
    **{name: name for name in ("load", "upload", "export", "prune", "retention", "cadence")},
}
"""Name of the event -> kind of the record."""


Moment: TypeAlias = tuple[int, float, float]
"""A step, the time on the clock, and the Unix time."""


@final
@dataclass(slots=True)
class Training:
    """Where the training thread is: each field is set in one step.

    `resumed` are steps not yet looked at, each with the last step before; `ending` is "end", "preempted" or
    "" for neither, with the Unix time.
    """

    first: Moment | None = None
    last: Moment | None = None
    resumed: deque[tuple[Moment, Moment | None]] = field(default_factory=lambda: deque(maxlen=100))
    ending: tuple[str, float] | None = None


@final
class RunLog:
    """The records of one run, and the history that they continue.

    Concurrency: one thread; `provisional` on any.
    """

    def __init__(self, root: str, training: Training, clock: Callable[[], float]) -> None:
        self._root = root
        self.history: Sequence[Record] = []
        self.lines: deque[Record] = deque(maxlen=MOST_WAITING)
        self.started = self.ended = False
        self._training = training
        self._clock = clock
        self._run, self._ranks = "", 0
        self._dead: Sequence[tuple[Record, Trail]] = ()
        self._trail: deque[tuple[int, float]] = deque(maxlen=MOST_WAITING)
        self._committed: int | None = None
        self._resumed: int | None = None
        self._interval: float | None = None
        self._looked_at = self._kept_at = -math.inf

    def begin(self, run: str, ranks: int) -> None:
        """Set the id of the run, and how many ranks it has."""
        self._run, self._ranks = run, ranks

    def continue_from(self, runs: Runs) -> None:
        """Set what earlier runs have left."""
        events = [each for records in runs.values() for each in records]
        self.history = [each for each in events if each["kind"] == "run"]
        dead = without_end(self.history)
        self._dead = [(start, trail_of(start["run"], start["step"] or 0, events)) for start in dead]

    def provisional(self) -> list[Record]:
        """Return the history, with the ends of dead runs as far as they are known."""
        return [*self.history, *(self._unclean(*each, time.time()) for each in self._dead)]

    def pause(self, at: float, *, whole_run: bool = False) -> float:
        """Return the time from one look at the training to the next.

        It is as long as the training had lasted at the first one since its last commit, or with `whole_run`
        since its start, within limits: so at most half is unknown of what a run that dies has lost.
        """
        if self._training.first is None:
            return _LATEST_SECONDS
        first = self._training.first[1]
        since = first if whole_run else max(first, self._kept_at)
        return min(max(at - since, _SOONEST_SECONDS), _LATEST_SECONDS)

    def next_look(self, now: float) -> float:
        """Return the seconds until the next look at the training is due."""
        return max(0.0, self._looked_at + self.pause(self._looked_at) - now)

    def take(self, event: Event) -> None:
        """Put an event into a record, if there is one for it."""
        if event.name in {"save.commit", "save.cost"}:
            self._looked_at = -math.inf  # what is known of a save lies within the training that is known
        if event.name == "save.commit":
            if event.phase == "finished":
                self._committed = event.attributes.get("step", self._committed)
                self._kept_at = self._clock()
            return
        kind, fields = _KINDS[event.name], dict(event.attributes)
        if event.name in {"load", "upload", "export", "upload.failed"}:
            failed = event.phase == "failed" or event.name == "upload.failed"
            fields |= {"seconds": event.duration_seconds, "outcome": "failed" if failed else "done"}
        # The place of the root is not written into it: it may be copied elsewhere.
        place, error = str(fields.get("tier", fields.get("to", "root"))), fields.get("error")
        fields["tier"] = "root" if place == self._root else public_url(place)
        fields["error"] = None if error is None else str(error).replace(self._root, "root")
        if kind != "cadence" or self._is_new(fields.get("interval_seconds")):
            self.lines.append(record(kind, fields.get("began", event.time), self._run, fields))

    def look(self, *, closing: bool) -> None:
        """Put into records where training is."""
        training, now = self._training, self._clock()
        if training.first is not None and not self.started:
            self._start(training.first[2])
        while self.started and training.resumed:
            (step, _, moment), last = training.resumed.popleft()
            self._progress(last)
            self._note("resume", step, moment, loss(list(self._trail), step))
        if self.started and (closing or self.next_look(now) <= 0):
            self._looked_at = now
            self._progress(training.last)
        if training.ending is not None and training.ending[0] and self.started and not self.ended:
            self._end(*training.ending)

    def _is_new(self, interval: Any) -> bool:
        """Return whether an interval is more than a tenth off the last one written."""
        before, self._interval = self._interval, interval if isinstance(interval, int | float) else None
        if not before or self._interval is None or abs(self._interval - before) > _SAME_INTERVAL * before:
            return True
        self._interval = before
        return False

    def _start(self, begun: float) -> None:
        """Note that training has begun, and what the runs before have lost by then."""
        self.started = True
        step, training = 0, self._training
        before = [resumed for resumed, last in list(training.resumed) if last is None]
        if before:
            step = self._resumed = before[-1][0]
            for _ in before:
                training.resumed.popleft()  # what was loaded before it was not trained from
        self._trail.append((step, 0.0))
        for start, trail in self._dead:
            self._append(self._unclean(start, trail, begun))
        self._dead = ()
        self._note("start", step, begun)
        if self._resumed is not None:
            self._note("resume", step, begun)

    def _unclean(self, start: Record, trail: Trail, moment: float) -> Record:
        return unclean(start, trail, self._resumed, time=moment, found_by=self._run)

    def _progress(self, last: Moment | None) -> None:
        first = self._training.first
        if first is None or last is None:
            return
        point = (last[0], round(last[1] - first[1], 3))
        if self._trail[-1] == point or point[1] < self._trail[-1][1]:
            return
        self._trail.append(point)
        fields = {"step": point[0], "training_seconds": point[1]}
        self.lines.append(record("progress", last[2], self._run, fields))

    def _end(self, ending: str, moment: float) -> None:
        self._progress(self._training.last)
        self.ended = True
        lost: Mapping[str, float] = {"lost_steps": 0, "lost_seconds": 0.0}
        if ending == "preempted":
            lost = loss(list(self._trail), self._resumed if self._committed is None else self._committed)
        step, seconds = self._trail[-1]
        self._note(ending, step, moment, {"seconds": seconds, **lost})

    def _note(self, event: str, step: int, moment: float, fields: Mapping[str, Any] | None = None) -> None:
        ranks = self._ranks
        own = {"event": event, "step": step, "world_size": ranks, "devices": ranks, **(fields or {})}
        self._append(record("run", moment, self._run, own))

    def _append(self, each: Record) -> None:
        # A new list: `provisional` may be reading the old one on another thread.
        self.history = [*self.history, each]
        self.lines.append(each)


_logger = logger_of(__name__)

_GRACE_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 60.0
_TIER_SECONDS: Final = 0.5
"""The longest wait for a further tier; the journal of the root must not wait for a bucket that is down."""
_ENDS_BYTES: Final = 1 << 19
"""So much of a file tells how its run began, and where it was last."""


@final
class _FurtherCopy:
    """The copy of the journal in a further tier, which may not answer.

    Every request is made on a thread of its own; while one has no answer, there is no other.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._free = threading.Event()
        self._free.set()
        self._failure: OSError | None = None
        self._has: set[str] | None = None
        self._told = 0

    def read(self) -> Runs:
        """Return the runs that are there; what has not come in time is left out."""
        found: dict[str, Sequence[Record]] = {}

        def read() -> None:
            found.update(read_runs(self._storage, most=_ENDS_BYTES))
            self._has = {*found}

        self._ask(read)
        return found if self._free.is_set() else {}

    def has(self, key: str) -> bool:
        """Return whether the file of an earlier run is known to be there."""
        return self._has is not None and key in self._has

    def is_due(self, told: int) -> bool:
        """Return whether so long a history is to be written there now; without I/O."""
        return self._free.is_set() and self._told != told

    def write(self, earlier: Mapping[str, bytes], own: tuple[str, bytes], told: int) -> None:
        """Write what it lacks of earlier runs, and the file of this one."""

        def write() -> None:
            if self._told and not self._storage.exists(own[0]):
                return  # the tier was moved away or unmounted, and is not made again
            if self._has is None:
                self._has = {*run_files(self._storage)}
            for key in earlier.keys() - self._has:
                self._storage.replace(key, earlier[key])
                self._has.add(key)
            self._storage.replace(*own)
            self._told = told

        self._ask(write)

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
    """

    def __init__(
        self, storage: Storage, tiers: Sequence[Storage] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.training = Training()
        self.log = RunLog(storage.url, self.training, clock)
        self.known, self.wake = threading.Event(), threading.Event()
        self.clock = clock
        self._storage = storage
        self._tiers = [_FurtherCopy(tier) for tier in tiers]
        self._pid = os.getpid()
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._closing = self._stopped = self._warned = False
        self._file: RunFile | None = None
        self._earlier = dict[str, bytes]()
        self._lacking = set[str]()
        self._told, self._wrote_at = 0, -math.inf

    def emit(self, event: Event) -> None:
        """Take an event, if the journal has a record for it."""
        wanted = event.phase != "started" and (event.name in _KINDS or event.name == "save.commit")
        if wanted and not self._stopped and os.getpid() == self._pid:
            self._waiting.append(event)
            self.wake.set()

    def begin(self, run: str, ranks: int, check: Callable[[], None]) -> None:
        """Start to write: this process is the coordinator, and has the root.

        `run` is the id of this start of the job; `check` raises once another job has the root.
        """
        if self._thread is not None or self._stopped or os.getpid() != self._pid:
            return
        self.log.begin(run, ranks)
        # A daemon: the process must be able to end while storage hangs.
        thread = threading.Thread(target=self._loop, args=(run, check), name="ckpt-journal", daemon=True)
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

    def _loop(self, run: str, check: Callable[[], None]) -> None:
        try:
            self._read()
            closing = False
            while not (closing or self._stopped):
                self.wake.wait(self.log.next_look(self.clock()) if self.training.first else _IDLE_SECONDS)
                closing = self._closing  # before anything is looked at
                self.wake.clear()
                while self._waiting:
                    self.log.take(self._waiting.popleft())
                self.log.look(closing=closing)
                if self._file is None and (self.log.started or self.log.lines):
                    first = self.training.first
                    begun = self.log.lines[0]["time"] if first is None else first[2]
                    self._file = RunFile(self._storage.own, run, begun)
                if self._file is not None:
                    self._write(self._file, check=check, closing=closing)
        except CheckpointError:
            pass  # another job has the root, and keeps its journal
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread, and no save may fail with it
            self._warn(f"{type(error).__name__}: {error}")
        finally:
            self.drop()

    def _read(self) -> None:
        """Read what earlier runs have left; a tier may know what a new disk does not."""
        runs: dict[str, Sequence[Record]] = {}
        for tier in self._tiers:
            with self._warning():
                runs |= tier.read()
        with self._warning():
            own = read_runs(self._storage, most=_ENDS_BYTES)
            self._lacking = runs.keys() - own.keys()
            runs |= own
        self._earlier = {
            key: encode(runs[key])
            for key in sorted(runs)[-MOST_RUNS:]
            if key in self._lacking or not all(tier.has(key) for tier in self._tiers)
        }
        self.log.continue_from({key: runs[key] for key in sorted(runs)})
        self._told = len(self.log.history)
        self.known.set()

    def _write(self, file: RunFile, *, check: Callable[[], None], closing: bool) -> None:
        """Write what is new; how a run began or ended at once, and to further tiers, too."""
        log, now, told = self.log, self.clock(), len(self.log.history)
        pause = log.pause(self._wrote_at, whole_run=True)
        at_once = closing or log.ended or file.appends or told != self._told
        lines_due = bool(log.lines) and (at_once or now - self._wrote_at >= pause)
        tiers = [tier for tier in self._tiers if log.started and tier.is_due(told)]
        if not lines_due and not tiers:
            return
        with self._warning():
            check()
            with self._warning():
                if log.started and self._told != told:
                    self._settle()
                if lines_due:
                    self._wrote_at = now
                    file.write(log.lines)
                    log.lines.clear()
                    self._told = told
            content = file.content + encode(log.lines)  # also what the root would not take
            for tier in tiers:
                with self._warning():  # a tier that fails keeps nothing from the root, or from other tiers
                    tier.write(self._earlier, (file.key, content), told)

    def _settle(self) -> None:
        """Write the files that only a tier has, and delete those of runs too old to count."""
        own = self._storage.own
        for key in sorted(self._lacking & self._earlier.keys()):
            own.replace(key, self._earlier[key])
            self._lacking.discard(key)
        for key in run_files(own)[:-MOST_RUNS]:
            own.delete(key)

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


_PATIENCE_SECONDS: Final = 5.0


@final
class Journal:
    """What has happened to a root: a file for this run, beside those of earlier ones.

    Every rank of a job has one, and that of the coordinator writes, on a thread of its own, from the moment
    at which the root is taken. A run begins with its first step, so that one that only loads leaves no
    trace. It ends with `end`, or with the process: one whose training an exception has ended has no end, as
    if it had been killed, and the next run says what it lost.

    Concurrency: main thread. The `tiers` get a copy when a run begins or ends.
    """

    def __init__(self, storage: Storage, tiers: Sequence[Storage] = (), *, enabled: bool = True) -> None:
        self._recorder = Recorder(storage, tiers)
        self._enabled = enabled
        self._opened = False
        # An exception that is being handled already will not have ended the training.
        error = sys.exc_info()[1]
        self._amid = 0 if error is None else id(error)
        # Also at exit, for scripts that never close their manager, and for managers that are forgotten.
        self._finish = weakref.finalize(self, _finish, self._recorder, self._amid)

    @property
    def sinks(self) -> Sequence[Sink]:
        """The receivers of telemetry: the one that writes, or none."""
        return (self._recorder,) if self._enabled else ()

    def open(self, run: str, ranks: int, check: Callable[[], None] | None) -> None:
        """Begin to write, where this process has the root.

        `run` is the id of this start of the job; `check` raises once another job has the root. It is None
        on all ranks but the coordinator.
        """
        if not self._enabled:
            return
        if check is None:
            self._recorder.drop()
            return
        self._opened = True
        self._recorder.begin(run, ranks, check)

    def seen(self, step: int, *, began: tuple[float, float] | None = None) -> None:
        """Note that training has come to a step. In every step: two writes to memory.

        `began` is when the save of it began, on the clock and as Unix time: training may begin with it.
        """
        recorder = self._recorder
        training = recorder.training
        training.last = (step, recorder.clock(), time.time())
        if training.first is None:
            training.first = training.last if began is None else (step, *began)
            recorder.wake.set()

    def waited(self) -> None:
        """Note that training has waited for a save since its last step."""
        last = self._recorder.training.last
        if last is not None:
            self.seen(last[0])

    def resumed(self, step: int) -> None:
        """Note that the live state is that of a checkpoint."""
        training = self._recorder.training
        training.resumed.append(((step, self._recorder.clock(), time.time()), training.last))

    def end(self, *, preempted: bool = False, failed: bool | None = None) -> None:
        """Note that training is over, as a scheduler has asked if `preempted`.

        An exception has ended it if `failed`; None looks for one that is being handled.
        """
        if failed is None:
            failed = _has_failed(self._amid)
        _note_end(self._recorder, "" if failed else "preempted" if preempted else "end")

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._opened:
            self._finish()

    def failures(self, devices: int) -> FailureRate:
        """Return how often this job fails. Coordinator only, once the root is taken.

        It waits a few seconds for the history; if that is not there by then, published rates are all.
        """
        recorder = self._recorder
        known = self._opened and recorder.known.wait(_PATIENCE_SECONDS)
        return failure_rate(recorder.log.provisional() if known else [], devices)


def _finish(recorder: Recorder, amid: int) -> None:
    if recorder.training.ending is None:
        _note_end(recorder, "" if _has_failed(amid) else "end")
    recorder.finish()


def _note_end(recorder: Recorder, ending: str) -> None:
    if recorder.training.ending is None:
        recorder.training.ending = ending, time.time()
        recorder.wake.set()


def _has_failed(amid: int) -> bool:
    """Return whether an exception ends training now.

    One that was being handled before training began does not. At exit it is the one that has ended the
    script. In a notebook that may be an old one.
    """
    kind, error, _ = sys.exc_info()
    if error is not None and id(error) != amid:
        return _is_failure(kind, error)
    if threading.main_thread().is_alive() or hasattr(sys, "ps1"):
        return False
    return _is_failure(getattr(sys, "last_type", None), getattr(sys, "last_value", None))


def _is_failure(kind: type[BaseException] | None, error: BaseException | None) -> bool:
    """Return whether it is an error, not a user who stops, or a script that is done."""
    if kind is None or issubclass(kind, KeyboardInterrupt | GeneratorExit):
        return False
    return not (isinstance(error, SystemExit) and error.code in {None, 0})
