"""One run in records: from telemetry, and from what its training thread notes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from ckpt_core.journal._event_records import translate
from ckpt_core.journal._history import Trail, loss, merge, trail_of, unclean, without_end
from ckpt_core.journal._records import Record, record
from ckpt_core.telemetry import Event

MOST_WAITING: Final = 2000
_SOONEST_SECONDS: Final = 1.0
_LATEST_SECONDS: Final = 60.0
_SAME_INTERVAL: Final = 0.1


@final
@dataclass(slots=True)
class Training:
    """Where the training thread is: each field is set in one step.

    Attributes:
        first: the first step, and the moment, on the clock.
        last: the last step, and the moment.
        resumed: the steps that were resumed from, and not yet looked at.
        ending: how the run ended: "end" or "preempted", "" for neither; None until it has.
    """

    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None
    resumed: deque[int] = field(default_factory=lambda: deque(maxlen=100))
    ending: str | None = None


@final
class RunLog:
    """The records of one run, and the history that they continue.

    Concurrency: one thread; `provisional` on any.

    Attributes:
        history: of the root, with this run.
        lines: for `events.jsonl`, not yet written.
        started: whether training has begun.

    Args:
        root: its path or URL.
        training: what the training thread notes.
        clock: seconds that never go back.
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
        self._progressed_at = -math.inf

    def begin(self, run: str, ranks: int) -> None:
        """Set the id of the run, and how many ranks it has."""
        self._run, self._ranks = run, ranks

    def continue_from(self, histories: Sequence[Sequence[Record]], events: Sequence[Record]) -> None:
        """Set what earlier runs have left."""
        self.history = merge(histories)
        dead = without_end(self.history)
        self._dead = [(start, trail_of(start["run"], start["step"] or 0, events)) for start in dead]

    def provisional(self) -> list[Record]:
        """Return the history, with the ends of dead runs as far as they are known."""
        return [*self.history, *(self._unclean(*each) for each in self._dead)]

    def pause(self, since: float) -> float:
        """Return the time from one look at the training to the next.

        It is as long as the training had lasted at the first one, within limits: so at most half is unknown
        of a run that dies soon.
        """
        first = self._training.first
        lasted = _LATEST_SECONDS if first is None else since - first[1]
        return min(max(lasted, _SOONEST_SECONDS), _LATEST_SECONDS)

    def take(self, event: Event) -> None:
        """Put an event into a record, if there is one for it."""
        if event.name == "save.commit":
            if event.phase == "finished":
                self._committed = event.attributes.get("step", self._committed)
            return
        found = translate(event, self._root)
        if found is None:
            return
        kind, fields = found
        if kind != "cadence" or self._is_new(fields.get("interval_seconds")):
            self.lines.append(record(kind, event.time, self._run, fields))

    def look(self, *, closing: bool) -> None:
        """Put into records where training is."""
        training, now = self._training, self._clock()
        if training.first is not None and not self.started:
            self._start()
        while self.started and training.resumed:
            step = training.resumed.popleft()
            self._note("resume", step, loss(list(self._trail), step))
        if self.started and (closing or now - self._progressed_at >= self.pause(self._progressed_at)):
            self._progress(now)
        if training.ending and self.started and not self.ended:
            self._end(training.ending)

    def _is_new(self, interval: Any) -> bool:
        """Return whether an interval is more than a tenth off the last one written."""
        before, self._interval = self._interval, interval if isinstance(interval, int | float) else None
        if not before or self._interval is None or abs(self._interval - before) > _SAME_INTERVAL * before:
            return True
        self._interval = before
        return False

    def _start(self) -> None:
        """Note that training has begun, and what the runs before have lost by then."""
        self.started = True
        step, training = 0, self._training
        if training.resumed:
            step = self._resumed = training.resumed.pop()
            training.resumed.clear()  # what was loaded before it was not trained from
        self._trail.append((step, 0.0))
        for start, trail in self._dead:
            self._append(self._unclean(start, trail))
        self._dead = ()
        self._note("start", step)
        if self._resumed is not None:
            self._note("resume", step)

    def _unclean(self, start: Record, trail: Trail) -> Record:
        return unclean(start, trail, self._resumed, time=time.time(), found_by=self._run)

    def _progress(self, now: float) -> None:
        first, last = self._training.first, self._training.last
        if first is None or last is None:
            return
        point = (last[0], round(last[1] - first[1], 3))
        if self._trail[-1] == point:
            return
        self._trail.append(point)
        self._progressed_at = now
        fields = {"step": point[0], "training_seconds": point[1]}
        self.lines.append(record("progress", time.time(), self._run, fields))

    def _end(self, ending: str) -> None:
        self._progress(self._clock())
        self.ended = True
        lost: Mapping[str, float] = {"lost_steps": 0, "lost_seconds": 0.0}
        if ending == "preempted":
            lost = loss(list(self._trail), self._resumed if self._committed is None else self._committed)
        step, seconds = self._trail[-1]
        self._note(ending, step, {"seconds": seconds, **lost})

    def _note(self, event: str, step: int, fields: Mapping[str, Any] | None = None) -> None:
        ranks = self._ranks
        own = {"event": event, "step": step, "world_size": ranks, "devices": ranks, **(fields or {})}
        self._append(record("run", time.time(), self._run, own))

    def _append(self, each: Record) -> None:
        # A new list: `provisional` may be reading the old one on another thread.
        self.history = [*self.history, each]
        self.lines.append(each)
