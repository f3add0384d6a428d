"""What is due for a further tier, by a rule or left by a run, and its line.

With `save=EverySteps(100)` and `every=10`, due is the first save at or after each multiple of 1,000 steps,
whatever was saved, skipped or lost in between. With any other policy, due is every tenth save, counted over
restarts; saves at a preemption come in addition, and are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias, final

from ckpt_core.cadence import EverySteps
from ckpt_core.commit import Catalog
from ckpt_core.crew import settle
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, UploadError
from ckpt_core.messages import message
from ckpt_core.options import Upload, WhenBusy
from ckpt_core.policies import AnyOf, SavePolicy
from ckpt_core.storage import Storage
from ckpt_core.tiers import read_tiers
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import integer

_logger = logger_of(__name__)

UPLOAD: Final = "upload"
"""The annotation that holds the number of a checkpoint."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SaveNumber:
    """The place of a save in its run.

    Attributes:
        number: of saves so far, those before restarts included.
        after: the step of the save before.
        extra: whether only a preemption asked for it.
    """

    number: int = 0
    after: int = 0
    extra: bool = False

    @classmethod
    def read(cls, annotations: Mapping[str, Any]) -> Self | None:
        """Read the number from annotations, which users may have written; else None."""
        found = annotations.get(UPLOAD)
        if not isinstance(found, Mapping):
            return None
        number, after = found.get("number"), found.get("after")
        if integer("number", number, minimum=0) or integer("after", after, minimum=0):
            return None
        return cls(number=number, after=after, extra=found.get("extra") is True)  # type: ignore[arg-type]

    @property
    def annotations(self) -> dict[str, Any]:
        """What the manifest of the save notes."""
        extra = {"extra": True} if self.extra else {}
        return {UPLOAD: {"number": self.number, "after": self.after, **extra}}


@final
@dataclass(frozen=True, slots=True)
class DueRule:
    """The rule for one run: which of its saves are the n-th.

    `steps` is the policy that saves by steps, if there is exactly one.
    """

    steps: EverySteps | None

    @classmethod
    def of(cls, policy: SavePolicy | None) -> Self:
        """Find the policy that saves by steps."""
        each = policy.policies if isinstance(policy, AnyOf) else (policy,)
        by_steps = [one for one in each if isinstance(one, EverySteps)]
        return cls(by_steps[0] if len(by_steps) == 1 else None)

    def is_due(self, step: int, number: SaveNumber | None, every: int) -> bool:
        """Return whether a checkpoint is due for a tier that gets every n-th."""
        if every == 1:
            return True
        if number is None:
            return False
        if self.steps is None:
            return not number.extra and number.number % every == 0
        interval, offset = self.steps.n * every, self.steps.offset
        return (step - offset) // interval > max(0, (number.after - offset) // interval)


def left_due(
    storage: Storage, rule: DueRule, uploads: Sequence[Upload], there: Sequence[Sequence[CheckpointInfo]]
) -> list[list[CheckpointInfo]]:
    """Return what an earlier run has left for each tier, oldest first.

    Warns of what is due for tiers that this run does not have.

    What is older than the newest in a tier was overtaken, or pruned there. Where a newer one overtakes, only
    the newest is due.
    """
    catalog, begun = Catalog(storage), _begun(storage)
    present = [info for info in catalog.committed() if info.usable]
    _warn_of_others(storage, present, begun - {(each.url, name) for each in uploads for _, name in begun})

    def is_due(info: CheckpointInfo, upload: Upload) -> bool:
        if (upload.url, info.name) in begun:
            return True
        try:
            annotations = catalog.manifest(info.name).annotations
        except CheckpointError as error:
            _logger.warning("%s is not uploaded: %s", info.name, error)
            return False
        return rule.is_due(info.step, SaveNumber.read(annotations), upload.every)

    found: list[list[CheckpointInfo]] = []
    for upload, copies in zip(uploads, there, strict=True):
        newest = max(map(_age, copies), default=(-1, -1))
        have = {info.save_id for info in copies}
        newer = (info for info in present if _age(info) > newest and info.save_id not in have)
        due = [info for info in newer if is_due(info, upload)]
        found.append(due[-1:] if upload.when_busy == "overtake" else due)
    return found


def _age(info: CheckpointInfo) -> tuple[int, int]:
    return info.lineage.number, info.step


def _begun(storage: Storage) -> set[tuple[str, str]]:
    """Return the uploads that were left: URL of the tier and name."""
    try:
        records = read_tiers(storage)
    except (OSError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
        _logger.warning("%s: which uploads were left is not known: %s", storage.url, error)
        return set()
    return {(each.url, name) for each in records for name in each.due}


def _warn_of_others(
    storage: Storage, present: Sequence[CheckpointInfo], others: set[tuple[str, str]]
) -> None:
    """Say what is due for tiers that this run does not upload to."""
    for url in sorted({url for url, _ in others}):
        steps = [str(info.step) for info in present if (url, info.name) in others]
        if steps:
            _logger.warning(
                "step(s) %s were due for %s, where this run uploads nothing: `ckpt upload %s --to %s --all` "
                "sends what is not there",
                ", ".join(steps),
                url,
                storage.url,
                url,
            )


Outcome: TypeAlias = CheckpointInfo | UploadError | None
"""A checkpoint that is in the tier; why it is not; or None if it was overtaken, or left."""


@final
@dataclass(frozen=True, eq=False, slots=True)
class DueCheckpoint:
    """A checkpoint due for a tier; what hears of it, perhaps of an error first."""

    info: CheckpointInfo
    report: Callable[[Outcome], None] = field(default=lambda _: None)


@final
class UploadLine:
    """The line of due checkpoints, first come, first served.

    Concurrency: `next` and `done` on the thread that uploads, or hears of uploads; the others on any.
    """

    def __init__(self, when_busy: WhenBusy) -> None:
        self._when_busy = when_busy
        self._waiting: list[DueCheckpoint] = []
        self._running: DueCheckpoint | None = None
        self._left: list[CheckpointInfo] = []
        self._closed = False
        self._changed = threading.Condition()

    def add(self, due: DueCheckpoint) -> None:
        """Add a checkpoint, unless it is there; in a closed line it is left."""
        with self._changed:
            if any(each.info.save_id == due.info.save_id for each in self._present()):
                return
            if not self._closed:
                self._waiting.append(due)
                self._changed.notify_all()
                return
            self._left.append(due.info)
        due.report(None)  # nobody serves it any more

    def next(self) -> DueCheckpoint | None:
        """Wait for the next checkpoint; None once the line is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._running = self._waiting.pop(0) if self._waiting else None
            self._changed.notify_all()
            return self._running

    def await_any(self) -> None:
        """Wait until something is in the line, or it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)

    def find(self, save_id: str) -> DueCheckpoint | None:
        """Return the checkpoint of a save, if it is in the line."""
        with self._changed:
            return next((each for each in self._present() if each.info.save_id == save_id), None)

    def done(self, due: DueCheckpoint, *, left: bool = False) -> None:
        """Note that a checkpoint has ended, or was left to the next run."""
        with self._changed:
            if left:
                self._left.append(due.info)
            if due is self._running:
                self._running = None
            else:
                self._waiting.remove(due)
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    @property
    def is_waited_for(self) -> bool:
        """Whether another one waits for its turn."""
        return bool(self._waiting)

    @property
    def overtakes(self) -> bool:
        """Whether the running one must give way, if it has not begun."""
        return self._when_busy == "overtake" and bool(self._waiting)

    @property
    def held(self) -> Collection[str]:
        """The names of checkpoints that are still needed in the root."""
        with self._changed:
            return {info.name for info in self._needed()}

    @property
    def unfinished(self) -> list[CheckpointInfo]:
        """The checkpoints that run, wait, or were left to the next run."""
        with self._changed:
            return list({info.save_id: info for info in (*self._left, *self._needed())}.values())

    def wait_for_turn(self, seconds: float) -> None:
        """Block until at most one is in line, where a save must wait for that."""
        if self._when_busy == "wait":
            with self._changed:
                self._changed.wait_for(lambda: len(self._present()) <= 1 or self._closed, seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing runs or waits; False if `seconds` pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._present(), seconds)

    def close(self) -> None:
        """Take no more checkpoints; those in the line are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _present(self) -> list[DueCheckpoint]:
        return [*filter(None, (self._running,)), *self._waiting]

    def _needed(self) -> list[CheckpointInfo]:
        """Return what runs, and what waits and is not overtaken."""
        waiting = self._waiting[-1:] if self._when_busy == "overtake" else self._waiting
        return [each.info for each in (*filter(None, (self._running,)), *waiting)]


class AllTiers:
    """The outcome of one save in all tiers that it is due for."""

    def __init__(self, future: Future[CheckpointInfo | None], tiers: int) -> None:
        self._future = future
        self._awaited = tiers
        self._guard = threading.Lock()
        self._there: CheckpointInfo | None = None
        self._missing = False

    def report(self, outcome: Outcome) -> None:
        """Note the outcome in one tier; the last, or the first error, resolves the future."""
        with self._guard:
            self._awaited -= 1
            if isinstance(outcome, UploadError):
                settle(self._future, outcome)
                return
            self._missing |= outcome is None
            self._there = self._there or outcome
            if self._awaited <= 0:
                settle(self._future, None if self._missing else self._there)
