"""One run in records: from telemetry, and from what its training thread notes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from ckpt_core.disclosure import public_url
from ckpt_core.journal._history import Trail, loss, trail_of, unclean, without_end
from ckpt_core.journal._records import Record, record
from ckpt_core.journal._run_files import Runs
from ckpt_core.telemetry import Event

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


def is_wanted(event: Event) -> bool:
    """Return whether an event becomes a record, or says that a save was committed."""
    return event.phase != "started" and (event.name in _KINDS or event.name == "save.commit")


Moment: TypeAlias = tuple[int, float, float]
"""A step, the time on the clock, and the Unix time."""


@final
@dataclass(slots=True)
class Training:
    """Where the training thread is: each field is set in one step.

    Attributes:
        first: the first step.
        last: the last step.
        resumed: the steps that were resumed from, and not yet looked at, each with the last step before.
        ending: how the run ended, "end" or "preempted", "" for neither, and the Unix time; None until it has.
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
