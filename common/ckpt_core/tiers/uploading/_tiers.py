"""The further tiers of a manager: what is due for them, their uploads, and the end."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, final

from ckpt_core.commit import working_name
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import UploadError
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.root import Job, OwnerHooks
from ckpt_core.storage import Storage
from ckpt_core.tiers import TierRecord, Uploading, write_tiers
from ckpt_core.tiers.uploading._backlog import Backlog
from ckpt_core.tiers.uploading._due import DueRule, SaveNumber
from ckpt_core.tiers.uploading._durable import DurableRoot
from ckpt_core.tiers.uploading._line import AllTiers, DueCheckpoint, Outcome, settle
from ckpt_core.tiers.uploading._places import open_tiers
from ckpt_core.tiers.uploading._uploader import Progress, UploadContext, Uploader
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_SAID_EVERY: Final = 5.0
"""Seconds between two lines of progress, and between two records of it in the root."""
_GRACE_SECONDS: Final = 15.0
"""Time for ranks to meet once more after they have been stopped."""


class FollowedSave(Protocol):
    """A save in flight: see `SaveHandle`."""

    step: int
    committed: Future[CheckpointInfo]
    uploaded: Future[CheckpointInfo | None]


@final
class Tiers:
    """The further tiers of one manager; without an `Upload` every method returns at once.

    Concurrency: the main thread of every rank; `hooks.taken`, `raise_failed` and `close` are collective.

    Attributes:
        storages: of the tiers, the nearest first.
        hooks: what the owner of the root must know.

    Raises:
        ConfigError: a tier cannot be opened, or two are one place.
    """

    def __init__(self, job: Job, options: CheckpointOptions) -> None:
        self._job = job
        self._options = options
        self.storages: Sequence[Storage] = open_tiers(job.storage, options)
        self.hooks = OwnerHooks(taken=self._begin, held=self._held) if self.storages else OwnerHooks()
        self._rule = DueRule.of(options.save)
        self._count = self._step = 0
        self._uploaders: list[Uploader] = []
        self._durable: list[DurableRoot] = []
        self._record = _Record(job.storage, options.uploads)
        self._newest: CheckpointInfo | None = None
        self._there: dict[int, str] = {}

    def count_from(self, annotations: Mapping[str, Any], step: int) -> None:
        """Continue counting saves after the checkpoint of `step`, which was loaded."""
        found = SaveNumber.read(annotations)
        self._count, self._step = 0 if found is None else found.number, step

    def number(self, *, extra: bool) -> SaveNumber:
        """Return the number of the save that is about to begin.

        Args:
            extra: whether only a preemption asks for it.
        """
        return SaveNumber(number=self._count + (not extra), after=self._step, extra=extra)

    def annotations(self, number: SaveNumber) -> dict[str, Any]:
        """Return what the manifest of a save notes for the next run."""
        return number.annotations if self.storages else {}

    def wait_for_turn(self) -> None:
        """Wait, ahead of a save, until no checkpoint waits for its upload, where it must."""
        for uploader in self._uploaders:
            uploader.line.wait_for_turn()

    def raise_failed(self) -> None:
        """Raise the failure of an upload that is to stop training, on every rank. Collective.

        Raises:
            UploadError: there is one, here or on another rank.
        """
        if all(upload.on_error == "warn" for upload in self._options.uploads):
            return
        own = self._take_failure()
        if any(self._job.coordinator.all_reduce_max([int(own is not None)], what="looking for lost uploads")):
            raise own or UploadError("an upload has failed; the log of another rank has the reason")

    def follow(self, save: FollowedSave, number: SaveNumber) -> None:
        """Upload a save once it is committed, if it is due."""
        if not self._uploaders or save.uploaded is not save.committed:
            return
        save.uploaded = Future()
        save.uploaded.set_running_or_notify_cancel()
        self._count, self._step = number.number, save.step
        due = [
            each for each in self._uploaders if self._rule.is_due(save.step, number, each.upload.every)
        ]
        save.committed.add_done_callback(partial(self._committed, save.uploaded, due))

    def close(self, *, leave: bool, preempted: bool) -> None:
        """Wait for uploads, each up to its deadline, and give the tiers back.

        Args:
            leave: whether to leave what is not there to the next run.
            preempted: whether this job is being stopped.

        Raises:
            UploadError: one has failed, and is to stop training.
        """
        began, uploaders = time.monotonic(), self._uploaders
        for index, uploader in enumerate(uploaders):
            if leave or (preempted and uploader.upload.on_preemption == "leave"):
                self._leave(uploader)
            else:
                self._add_newest(index, uploader)
                uploader.line.close()
        ended = True
        for uploader in uploaders:
            self._wait(uploader, began + uploader.upload.deadline_seconds)
            ended &= uploader.join(_GRACE_SECONDS)
        self._uploaders = []
        if ended:
            # Otherwise a thread hangs in storage, and the tier is its own until the process ends.
            for durable in self._durable:
                durable.release()
        failures = [each.failure for each in uploaders if each.upload.on_error == "raise" and each.failure]
        if failures:
            raise failures[0]

    def _begin(self) -> None:
        """Claim the tiers and begin to upload what an earlier run has left. Collective."""
        if self._uploaders:
            return
        session, backlog = self._job.coordinator.run_on_coordinator(
            self._claim, what="taking the further tiers"
        )
        coordinator = self._job.coordinator
        for index, (upload, storage) in enumerate(zip(self._options.uploads, self.storages, strict=True)):
            context = UploadContext(
                source=self._job.storage,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                deadline_seconds=self._options.deadline_seconds,
                open_channel=partial(coordinator.background_channel, f"upload/{session}/{index}"),
                telemetry=self._job.telemetry,
                note=partial(self._record.note, index) if coordinator.is_coordinator else _ignore,
            )
            durable = self._durable[index] if coordinator.is_coordinator else None
            uploader = Uploader(upload, storage, context, durable)
            self._uploaders.append(uploader)
            for info in backlog[index]:
                uploader.line.add(DueCheckpoint(info, partial(self._note, index, info)))
            uploader.start()

    def _claim(self) -> tuple[str, list[list[CheckpointInfo]]]:
        """Take every tier; return an id, and what is due for each. Coordinator only."""
        backlog, found = Backlog(self._job.storage, self._rule), list[list[CheckpointInfo]]()
        try:
            for upload, storage in zip(self._options.uploads, self.storages, strict=True):
                spared = [
                    name
                    for own, save_id in backlog.names
                    for name in (own, working_name(storage, own, save_id))
                ]
                durable = DurableRoot(
                    upload,
                    storage,
                    self._options,
                    telemetry=self._job.telemetry,
                    until_idle=partial(_stop_all, self._uploaders),
                    spared=spared,
                )
                self._durable.append(durable)
                found.append(backlog.due(upload, durable.content()))
        except BaseException:
            for durable in self._durable:
                durable.release()
            self._durable = []
            raise
        self._record.write()
        return secrets.token_hex(4), found

    def _committed(
        self, uploaded: Future[CheckpointInfo | None], due: Sequence[Uploader], done: Future[CheckpointInfo]
    ) -> None:
        """Put a committed save in the lines that it is due for. On the save thread."""
        error = done.exception()
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

    def _note(
        self, index: int, info: CheckpointInfo, outcomes: AllTiers | None, outcome: Outcome = None
    ) -> None:
        if isinstance(outcome, CheckpointInfo):
            self._there[index] = info.save_id
        if outcomes is not None:
            outcomes.report(outcome)

    def _held(self) -> Collection[str]:
        return {name for uploader in self._uploaders for name in uploader.line.held}

    def _take_failure(self) -> UploadError | None:
        for uploader in self._uploaders:
            if uploader.upload.on_error == "raise" and uploader.failure is not None:
                failure, uploader.failure = uploader.failure, None
                return failure
        return None

    def _add_newest(self, index: int, uploader: Uploader) -> None:
        """Let the last checkpoint of the run be due whatever its number is."""
        newest = self._newest
        if newest is not None and self._there.get(index) != newest.save_id:
            uploader.line.add(DueCheckpoint(newest, partial(self._note, index, newest, None), last=True))

    def _wait(self, uploader: Uploader, deadline: float) -> None:
        while not uploader.line.wait(max(0.0, min(_SAID_EVERY, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                self._leave(uploader)
                return
            self._record.say()

    def _leave(self, uploader: Uploader) -> None:
        """Stop an upload, and say what is not there and how it gets there."""
        left = uploader.line.unfinished
        uploader.stop()
        if left and self._job.coordinator.is_coordinator:
            _logger.warning(
                "not yet in %s: step(s) %s; the next run uploads the rest, and so does `ckpt upload %s`",
                uploader.upload.url,
                ", ".join(str(info.step) for info in left),
                self._job.storage.url,
            )


@final
class _Record:
    """The progress of uploads, in `tiers.json` and in the log. Coordinator only."""

    def __init__(self, storage: Storage, uploads: Sequence[Upload]) -> None:
        self._storage = storage
        self._uploads = uploads
        self._guard = threading.Lock()
        self._running: dict[int, Progress] = {}
        self._written_at = 0.0
        self._told = False

    def note(self, index: int, progress: Progress | None) -> None:
        """Note the progress of one upload, or its end."""
        with self._guard:
            begins = progress is not None and index not in self._running
            if progress is None:
                self._running.pop(index, None)
            else:
                self._running[index] = progress
        if begins or progress is None or time.monotonic() - self._written_at > _SAID_EVERY:
            self.write()

    def say(self) -> None:
        """Log how far the uploads are."""
        with self._guard:
            running = dict(self._running)
        for index, progress in running.items():
            _logger.info("uploading %s to %s: %s", progress.name, self._uploads[index].url, progress.text)

    def write(self) -> None:
        """Write the record; a failure is a warning, once."""
        with self._guard:
            self._written_at = time.monotonic()
            records = [
                TierRecord(url=upload.url, every=upload.every, uploading=_uploading(self._running.get(index)))
                for index, upload in enumerate(self._uploads)
            ]
            try:
                write_tiers(self._storage, records)
            except OSError as error:
                if not self._told:
                    _logger.warning("the progress of uploads is not recorded: %s", error)
                self._told = True


def _uploading(progress: Progress | None) -> Uploading | None:
    if progress is None:
        return None
    return Uploading(name=progress.name, done_bytes=progress.done_bytes, size_bytes=progress.size_bytes)


def _stop_all(uploaders: Sequence[Uploader]) -> None:
    """Stop the uploads of a manager whose root another one of this process takes."""
    for uploader in uploaders:
        uploader.stop()
    for uploader in uploaders:
        uploader.join(_GRACE_SECONDS)


def _ignore(_: object) -> None:
    """Ignore progress: the coordinator records that of all."""
