"""The uploads of a manager: what is due for which tier, and the end."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, final

from ckpt_core.crew import run_with_timeout
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import UploadError
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, OwnerHooks
from ckpt_core.tiers import CopyProcess, FurtherTier, Tier
from ckpt_core.tiers.uploading._claims import TierClaims
from ckpt_core.tiers.uploading._due import DueRule, SaveNumber
from ckpt_core.tiers.uploading._line import AllTiers, DueCheckpoint, Outcome, settle
from ckpt_core.tiers.uploading._places import refuse_one_place
from ckpt_core.tiers.uploading._tiers_record import SAID_EVERY, TiersRecord
from ckpt_core.tiers.uploading._upload_context import UploadContext
from ckpt_core.tiers.uploading._uploader import Uploader
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_END_SECONDS: Final = 2.0
"""The longest time for which the end of uploads is waited for, once they have been stopped."""
_GRACE_SECONDS: Final = 0.5
"""The part of it in which requests under way may end by themselves."""
_MOMENT_SECONDS: Final = 0.25
_RELEASE_SECONDS: Final = 15.0


class FollowedSave(Protocol):
    """A save in flight: see `SaveHandle`."""

    step: int
    committed: Future[CheckpointInfo]
    uploaded: Future[CheckpointInfo | None]


@final
class TierUploads:
    """The uploads of one manager; without an `Upload` every method returns at once.

    Concurrency: the main thread of every rank; `hooks.taken`, `before_save` and `close` are
    collective.

    Attributes:
        hooks: what the owner of the root must know.
        claims: of the tiers.

    Args:
        job: storage, ranks and telemetry.
        options: of the manager.
        tiers: of the run, its root first.

    Raises:
        ConfigError: two tiers are one place.
    """

    def __init__(self, job: Job, options: CheckpointOptions, tiers: Sequence[Tier]) -> None:
        refuse_one_place([tier.storage for tier in tiers], options)
        self._job = job
        self._options = options
        self._tiers = [tier for tier in tiers if isinstance(tier, FurtherTier)]
        self.hooks = OwnerHooks(taken=self._begin, held=self._held) if self._tiers else OwnerHooks()
        self._rule = DueRule.of(options.save)
        self._count = self._step = 0
        self._uploaders: list[Uploader] = []
        self.claims = TierClaims(job, options, self._tiers, partial(_halt, self._uploaders))
        self._settled = True
        self._record = TiersRecord(job.storage, options.uploads, self._due)
        self._newest: CheckpointInfo | None = None
        self._there: dict[int, str] = {}
        self._left: set[str] = set()

    def count_from(self, number: SaveNumber | None, step: int) -> None:
        """Continue counting saves after the checkpoint of `step`, whose state is live."""
        self._count, self._step = 0 if number is None else number.number, step

    def number(self, *, extra: bool) -> SaveNumber:
        """Return the number of the save that is about to begin.

        Args:
            extra: whether only a preemption asks for it.
        """
        return SaveNumber(number=self._count + (not extra), after=self._step, extra=extra)

    def annotations(self, number: SaveNumber) -> dict[str, Any]:
        """Return what the manifest of a save notes for the next run."""
        return number.annotations if self._tiers else {}

    def before_save(self, *, preempted: bool) -> None:
        """Wait for uploads that a save must wait for, and raise failures. Collective.

        Ranks communicate only if an upload has `on_error="raise"`, or a tier has not answered yet. The save
        of a job that is being stopped is its last, and more than any upload.

        Raises:
            UploadError: an upload has failed that is to stop training, or a tier was refused, here or on
                another rank.
        """
        if preempted:
            return
        for uploader in self._uploaders:
            uploader.line.wait_for_turn(uploader.upload.deadline_seconds)
        coordinator = self._job.coordinator
        if not self._settled:
            try:
                self._settled = coordinator.run_on_coordinator(
                    self.claims.settled, what="looking for refused tiers"
                )
            except UploadError:
                _take_failure(self._uploaders)  # the same one
                raise
        if all(upload.on_error == "warn" for upload in self._options.uploads):
            return
        own = _take_failure(self._uploaders)
        if any(coordinator.all_reduce_max([int(own is not None)], what="looking for lost uploads")):
            raise own or UploadError("an upload has failed; the log of another rank has the reason")

    def follow(self, save: FollowedSave, number: SaveNumber) -> None:
        """Upload a save once it is committed, if it is due."""
        if not self._uploaders or save.uploaded is not save.committed:
            return
        for tier in self._tiers:
            tier.note(None)
        save.uploaded = Future()
        save.uploaded.set_running_or_notify_cancel()
        self._count, self._step = number.number, save.step
        due = [each for each in self._uploaders if self._rule.is_due(save.step, number, each.upload.every)]
        save.committed.add_done_callback(partial(self._committed, save.uploaded, due))

    def close(self, *, leave: bool, preempted: bool, seconds_left: float = math.inf) -> None:
        """Wait for uploads, each up to its deadline, and give the tiers back.

        Args:
            leave: whether to leave what is not there to the next run.
            preempted: whether this job is being stopped.
            seconds_left: until it is; what is not there by then is left to the next run.

        Raises:
            UploadError: one has failed, and is to stop training.
        """
        began, uploaders = time.monotonic(), self._uploaders
        deadlines = [began + min(each.upload.deadline_seconds, max(0.0, seconds_left)) for each in uploaders]
        for uploader in uploaders:
            uploader.ending = True
            if leave or (preempted and uploader.upload.on_preemption == "leave"):
                uploader.stop()
        for uploader, deadline in zip(uploaders, deadlines, strict=True):
            self._wait(uploader, deadline)
        # Only now: whether the last checkpoint is there must be known on every rank alike.
        for index, uploader in enumerate(uploaders):
            self._add_newest(index, uploader)
            uploader.line.close()
        for uploader, deadline in zip(uploaders, deadlines, strict=True):
            self._wait(uploader, deadline)
        self._end(uploaders, max(deadlines, default=began))
        self._uploaders = []
        if (failure := _take_failure(uploaders)) is not None:
            raise failure

    def _begin(self) -> None:
        """Claim the tiers and begin to upload what an earlier run has left. Collective."""
        if self._uploaders:
            return
        coordinator = self._job.coordinator
        session, backlog, self._settled = coordinator.run_on_coordinator(
            partial(self.claims.opened, self._rule), what="taking the further tiers"
        )
        if coordinator.is_coordinator:
            self._record.write()
        for index, (upload, tier) in enumerate(zip(self._options.uploads, self._tiers, strict=True)):
            context = UploadContext(
                source=self._job.storage,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                deadline_seconds=self._options.deadline_seconds,
                open_channel=partial(coordinator.background_channel, f"upload/{session}/{index}"),
                telemetry=self._job.telemetry,
                process=CopyProcess.between(
                    self._job.storage,
                    tier.storage,
                    upload,
                    deadline_seconds=self._options.deadline_seconds,
                ),
                note=partial(self._record.note, index) if coordinator.is_coordinator else _ignore,
            )
            durable = self.claims.durable[index] if coordinator.is_coordinator else None
            uploader = Uploader(upload, tier.storage, context, durable)
            self._uploaders.append(uploader)
            for info in backlog[index]:
                uploader.line.add(DueCheckpoint(info, partial(self._note, index, info, None)))
            uploader.start()

    def _committed(
        self, uploaded: Future[CheckpointInfo | None], due: Sequence[Uploader], done: Future[CheckpointInfo]
    ) -> None:
        """Put a committed save in the lines that it is due for. On the save thread."""
        error = Future.exception(done)  # looked at without taking it from the user
        if error is not None:
            settle(uploaded, error)
            return
        info = self._newest = done.result()
        if not due:
            settle(uploaded, None)
            return
        outcomes = AllTiers(uploaded, len(due))
        for uploader in due:
            index = self._uploaders.index(uploader)
            uploader.line.add(DueCheckpoint(info, partial(self._note, index, info, outcomes)))
        if self._job.coordinator.is_coordinator:
            self._record.write()

    def _note(self, index: int, info: CheckpointInfo, outcomes: AllTiers | None, outcome: Outcome) -> None:
        if isinstance(outcome, CheckpointInfo):
            self._there[index] = info.save_id
        if outcomes is not None:
            outcomes.report(outcome)

    def _held(self) -> Collection[str]:
        return self._left.union(*(uploader.line.held for uploader in self._uploaders))

    def _due(self, index: int) -> list[str]:
        """Return the names that are due for a tier and not there."""
        if index >= len(self._uploaders):
            return []
        return [info.name for info in self._uploaders[index].line.unfinished]

    def _add_newest(self, index: int, uploader: Uploader) -> None:
        """Let the last checkpoint of the run be due whatever its number is."""
        newest = self._newest
        if newest is not None and self._there.get(index) != newest.save_id:
            uploader.line.add(DueCheckpoint(newest, partial(self._note, index, newest, None), last=True))

    def _wait(self, uploader: Uploader, deadline: float) -> None:
        """Wait until nothing is due; at the deadline, stop."""
        while not uploader.stopped and not uploader.line.wait(
            max(0.0, min(SAID_EVERY, deadline - time.monotonic()))
        ):
            if time.monotonic() >= deadline:
                uploader.stop()
                return
            if self._job.coordinator.is_coordinator:
                self._record.say(uploader.upload, uploader.line.unfinished)

    def _end(self, uploaders: Sequence[Uploader], deadline: float) -> None:
        """End the uploads; say what is not there, and how it gets there."""
        until = max(deadline, time.monotonic()) + _END_SECONDS
        for uploader in uploaders:
            left = uploader.line.unfinished
            self._left |= {info.name for info in left}
            if left and self._job.coordinator.is_coordinator:
                _logger.warning(
                    "not yet in %s: step(s) %s; the next run uploads the rest, and so does "
                    "`ckpt upload %s --to %s`",
                    uploader.upload.url,
                    ", ".join(str(info.step) for info in left),
                    self._job.storage.url,
                    uploader.upload.url,
                )
        _join_all(uploaders)
        if uploaders and self._job.coordinator.is_coordinator:
            self._record.write()
        for uploader in uploaders:
            # A thread that hangs in storage gives its tier back itself, when it wakes up.
            if uploader.ended:
                limit = min(until - time.monotonic(), _RELEASE_SECONDS)
                if not run_with_timeout(max(_MOMENT_SECONDS, limit), uploader.release):
                    uploader.interrupt()
        if not uploaders:
            self.claims.release()


def _take_failure(uploaders: Sequence[Uploader]) -> UploadError | None:
    """Return a failure that is to stop training, once."""
    for uploader in uploaders:
        if uploader.upload.on_error == "raise" and uploader.failure is not None:
            failure, uploader.failure = uploader.failure, None
            return failure
    return None


def _halt(uploaders: Sequence[Uploader]) -> None:
    """Stop the uploads of a manager whose root another one of this process takes."""
    for uploader in uploaders:
        uploader.stop()
    _join_all(uploaders)


def _join_all(uploaders: Sequence[Uploader]) -> None:
    """Wait until stopped uploads have ended; cancel requests that do not."""
    until = time.monotonic() + _END_SECONDS
    for uploader in uploaders:
        uploader.join(min(_GRACE_SECONDS, until - time.monotonic()))
    # Several times, because one request may follow another; the last moment is for threads without a channel.
    while (alive := _alive(uploaders)) and time.monotonic() < until - _MOMENT_SECONDS:
        for uploader in alive:
            uploader.interrupt()
        alive[0].join(_MOMENT_SECONDS)
    for uploader in alive:
        uploader.abandon()
    for uploader in alive:
        uploader.join(until - time.monotonic())


def _alive(uploaders: Sequence[Uploader]) -> list[Uploader]:
    return [uploader for uploader in uploaders if not uploader.join(0)]


def _ignore(_: object) -> None:
    """Ignore progress: the coordinator records that of all."""
