"""One start of a simulated job, until it fails or the training ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, final

from benchmarks.simulation._next_save import ContextAt, NextSave, repeats
from benchmarks.simulation._simulated_job import STEPS_TO_MEASURE, LearnedRate, RunParts, SimulatedJob
from benchmarks.simulation._tiers_of_run import TiersOfRun
from ckpt_core.cadence import CadenceContext, Counts, FailureRate, SaveCosts, SavePolicy

_SETTLED: Final = 4
"""After so many saves of a start, no fact that a decision reads changes any more."""
_ROUNDING: Final = 1e-9
_NO_SIGNALS: Final = frozenset[str]()
_NO_COUNTS: Final = Counts()


@final
class RunSoFar:
    """What the starts of one run share.

    Args:
        policy: when to save; its real `decide` is asked.
        job: to run.
        tiers: what each holds.
        learned: the rate of failures that the policy is given.
        every_save: whether each save is made, and none skipped over in closed form.
        factor: draws what one save costs, in medians.
    """

    def __init__(
        self,
        policy: SavePolicy,
        job: SimulatedJob,
        tiers: TiersOfRun,
        *,
        learned: LearnedRate | None,
        every_save: bool,
        factor: Callable[[], float],
    ) -> None:
        self.job, self.tiers, self.learned = job, tiers, learned
        self.next_save = NextSave(policy)
        self.gap = 0
        self.repeats = repeats(policy) and job.spread == 1
        self.factor = factor
        self.every_save = every_save
        self.parts = RunParts()
        self.trained = 0.0
        self._annotated_from: int | None = None

    def annotate(self, step: int, costs: SaveCosts | None) -> None:
        """Note that a save carries the costs known so far, as every later one does."""
        if costs is not None and self._annotated_from is None:
            self._annotated_from = step

    def carried(self, step: int) -> SaveCosts | None:
        """Return the costs that the checkpoint of a step carries, with nothing lost."""
        if self._annotated_from is None or step < self._annotated_from:
            return None
        return costs_of(self.job, saves=_SETTLED, lost=0.0)

    def rate(self) -> FailureRate | None:
        """Return the rate that a start learns."""
        return None if self.learned is None else self.learned(self.parts.failures, self.trained)


def costs_of(job: SimulatedJob, *, saves: int, lost: float) -> SaveCosts:
    """Return what a manager measures of this job's saves."""
    return SaveCosts(job.stall, job.slowdown, job.durable, job.uploaded, saves, lost, job.step)


@final
class Stretch:
    """A start of the job.

    The last save is the anchor: when each step after it ends is known in closed form.

    Args:
        replay: the run.
        began: time.
        fails_at: time of the next failure.
        step: resumed; 0 for a new training.
    """

    def __init__(self, replay: RunSoFar, began: float, fails_at: float, step: int) -> None:
        self._replay, self._job, self._began, self._fails_at = replay, replay.job, began, fails_at
        self._time, self._step, self._fresh = began, step, step == 0
        self._stall = self._in_flight = self._work_in_flight = 0.0
        self._saves, self._lost = 0, 0.0
        self._costs = replay.carried(step)
        self._measured = 0
        self._rate = None if self._fresh else replay.rate()
        self._gap = 0
        self._gap_is_fixed = False
        self._counting = bool(replay.job.tokens_per_step or replay.job.steps_per_epoch)

    def run(self) -> float:
        """Train; return when the training ended, or `fails_at`."""
        while (due := self._next()) is not None:
            self._save(due)
            if self._gap_is_fixed:
                self._skip()
        ended = self._ends(self._job.steps)
        reached = min(ended, self._fails_at)
        self._account(reached)
        return reached

    def done_at(self, now: float) -> float:
        """Return the training done by then, in seconds from its very beginning."""
        return self._step * self._job.step + self._work(now - self._time)

    def _next(self) -> int | None:
        """Return the next step to save before the failure or the end."""
        anchor = self._step
        reached = math.floor(self._work(self._fails_at - self._time) / self._job.step + _ROUNDING)
        last = min(self._job.steps - 1, anchor + reached)
        if self._gap_is_fixed:
            return anchor + self._gap if anchor + self._gap <= last else None
        durable = known = anchor + 1
        if self._saves:
            durable = anchor + max(1, math.ceil(self._work_in_flight / self._job.step - _ROUNDING))
            known = durable + STEPS_TO_MEASURE
        for first, end, in_flight in ((anchor + 1, durable, True), (durable, known, False)):
            found = self._search(first, min(end - 1, last), in_flight=in_flight)
            if found is not None:
                return found
        self._measure()
        return self._search(known, last, in_flight=False)

    def _search(self, first: int, last: int, *, in_flight: bool) -> int | None:
        if first > last:
            return None
        previous = None if self._fresh and not self._saves else first - 1
        expected = self._step + self._replay.gap
        at = self._context_at(in_flight=in_flight)
        return self._replay.next_save.first(at, first, last, previous=previous, expected=expected)

    def _context_at(self, *, in_flight: bool) -> ContextAt:
        total, began, costs, rate = self._job.steps, self._began, self._costs, self._rate
        saved = self._step if self._saves or not self._fresh else None
        saved_at = self._time if self._saves else None if self._fresh else began + self._job.step
        ends, counts, counting = self._ends, self._counts, self._counting

        def at(step: int, previous: int | None) -> CadenceContext:
            found = counts(step) if counting else _NO_COUNTS
            since = counts(previous or 0) if counting else _NO_COUNTS
            # By position, as many are made; in the order of the class.
            facts = (step, ends(step), began, previous, saved, saved_at, total)
            return CadenceContext._make((*facts, _NO_SIGNALS, found, since, costs, rate, in_flight))

        return at

    def _counts(self, step: int) -> Counts:
        found = Counts()
        if self._job.tokens_per_step is not None:
            found["tokens"] = step * self._job.tokens_per_step
        if self._job.steps_per_epoch is not None:
            found["epochs"] = step // self._job.steps_per_epoch
        return found

    def _save(self, step: int) -> None:
        """Make a save the anchor; it waits for the one before it."""
        job, now = self._job, self._ends(step)
        free = self._time + self._stall + self._in_flight
        wait = max(0.0, free - now) if self._saves else 0.0
        self._account(now)
        self._measure()
        self._replay.annotate(step, self._costs)
        if self._fresh and not self._saves:
            self._rate = self._replay.rate()
        gap = step - self._step
        self._gap_is_fixed = self._replay.repeats and self._saves >= _SETTLED and gap == self._gap
        self._gap = self._replay.gap = gap
        self._time, self._step = now, step
        factor = self._replay.factor()
        self._stall, self._in_flight, self._work_in_flight = (
            factor * job.stall + wait,
            factor * job.in_flight,
            factor * job.work_in_flight,
        )
        self._saves += 1
        self._lost += self._stall + factor * job.slowdown
        self._replay.parts.saves += 1
        self._replay.tiers.settle(now)
        self._replay.tiers.begin(now + self._stall + self._in_flight, step)

    def _skip(self) -> None:
        """Skip over saves that are each as the last one, but for the last two."""
        job, parts = self._job, self._replay.parts
        period = self._ends(self._step + self._gap) - self._time
        upload = 0.0 if job.uploaded is None else job.uploaded - job.durable
        if self._replay.every_save or self._stall > job.stall or max(job.durable, upload) > period:
            return
        count = (
            min(int((self._fails_at - self._time) / period), (job.steps - 1 - self._step) // self._gap) - 2
        )
        if count <= 0:
            return
        parts.saves += count
        parts.stall += count * job.stall
        parts.slowdown += count * job.slowdown
        self._saves += count
        self._lost += count * (job.stall + job.slowdown)
        self._time += count * period
        self._step += count * self._gap
        self._replay.tiers.skip(count * period, count * self._gap)

    def _measure(self) -> None:
        if self._measured < self._saves:
            self._measured = self._saves
            self._costs = costs_of(self._job, saves=self._saves, lost=self._lost)

    def _account(self, now: float) -> None:
        """Add what the anchor's save has cost by now."""
        since = now - self._time
        stall = min(since, self._stall)
        self._replay.parts.stall += stall
        self._replay.parts.slowdown += since - stall - self._work(since)

    def _ends(self, step: int) -> float:
        """Return when a step ends."""
        work = (step - self._step) * self._job.step
        if work >= self._work_in_flight:
            return self._time + self._stall + self._in_flight + work - self._work_in_flight
        return self._time + self._stall + work * self._in_flight / self._work_in_flight

    def _work(self, since: float) -> float:
        """Return the training done since the anchor: the inverse of `_ends`."""
        after_stall = max(0.0, since - self._stall)
        if after_stall >= self._in_flight:
            return after_stall - self._in_flight + self._work_in_flight
        return after_stall * self._work_in_flight / self._in_flight
