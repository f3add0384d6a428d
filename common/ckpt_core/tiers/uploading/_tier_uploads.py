"""The uploads of a manager: what is due for which tier, and the end; its exports."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Final, Protocol, final

from ckpt_core.commit import Survey, working_name
from ckpt_core.crew import run_with_timeout, settle
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.errors import CheckpointError, ConfigError, UploadError, failure_text
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, OwnerHooks
from ckpt_core.storage import LocalStorage, ObjectStorage, Storage
from ckpt_core.tiers import (
    Asked,
    CheckpointCopy,
    FurtherTier,
    Tier,
    TierRecord,
    Uploading,
    unite,
    write_tiers,
)
from ckpt_core.tiers.uploading._due import AllTiers, DueCheckpoint, DueRule, Outcome, SaveNumber, left_due
from ckpt_core.tiers.uploading._follower import Follower, TierThread, UploadJob, UploadListener
from ckpt_core.tiers.uploading._run_exports import RunExports
from ckpt_core.tiers.uploading._tier_root import TierRoot
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)

_MOMENT_SECONDS: Final = 2.0
"""The longest wait of a first save for all tiers together: no tier may hold up a save."""
_END_SECONDS: Final = 2.0
"""The longest time for which the end of uploads is waited for, once they have been stopped."""
_GRACE_SECONDS: Final = 0.5
"""The part of it in which requests under way may end by themselves."""
_LOOK_SECONDS: Final = 0.25
_RELEASE_SECONDS: Final = 15.0
_SAID_EVERY: Final = 5.0
"""Seconds between two lines of progress, and between two records of it in the root."""


class FollowedSave(Protocol):
    """A save in flight: see `SaveHandle`."""

    step: int
    committed: Future[CheckpointInfo]
    uploaded: Future[CheckpointInfo | None]


@final
class TierUploads:
    """The uploads and exports of one manager; without, every method returns at once.

    The coordinator claims and lists every tier on a thread of its own when it takes the root. The first save
    waits a moment for the answers, because what cannot be right is refused before it. A resume waits longer,
    because a tier may hold the newest checkpoint. What answers later is heard at a later save.

    Concurrency: the main thread of every rank; `hooks.taken`, `before_save` and `close` are
    collective. `claim` on the coordinator alone.

    Attributes:
        hooks: what the owner of the root must know.
        patient: whether the next claims are waited for as a resume must.

    Raises:
        ConfigError: two tiers are one place.
    """

    def __init__(
        self, job: Job, options: CheckpointOptions, tiers: Sequence[Tier], exports: RunExports
    ) -> None:
        refuse_one_place([tier.storage for tier in tiers], options)
        self._job = job
        self._options = options
        self._tiers = [tier for tier in tiers if isinstance(tier, FurtherTier)]
        self._exports, used = exports, bool(self._tiers or options.exports)
        self._annotates = used
        self.hooks = OwnerHooks(taken=self._begin, held=self._held) if used else OwnerHooks()
        self.patient = False
        self._rule = DueRule.of(options.save)
        self._count = self._step = 0
        self._followed: FollowedSave | None = None
        self._roots: list[TierRoot] = []
        self._threads: list[TierThread] = []
        self._settled = True
        self._progress = UploadProgress(job, self._threads)
        self._newest: CheckpointInfo | None = None
        self._there: dict[int, str] = {}
        self._left: set[str] = set()

    def count_from(self, number: SaveNumber | None, step: int) -> None:
        """Continue counting saves after the checkpoint of `step`, whose state is live."""
        self._count, self._step = 0 if number is None else number.number, step

    def number(self, *, extra: bool) -> SaveNumber:
        """Return the number of the save about to begin; `extra`: for a preemption alone."""
        return SaveNumber(number=self._count + (not extra), after=self._step, extra=extra)

    def annotations(self, number: SaveNumber) -> dict[str, Any]:
        """Return what the manifest of a save notes for the next run."""
        return number.annotations if self._annotates else {}

    def claim(self, nearest: Survey) -> tuple[Sequence[CheckpointInfo], Lineage]:
        """Claim the tiers, and list them; `nearest` is what the root holds.

        Returns the checkpoints that only further tiers hold, and the present lineage of all tiers, as far as
        they have answered.

        Raises:
            ConfigError: a tier cannot be written.
            RootBusyError: another job uploads to one.
        """
        if not self._tiers:
            return (), nearest.lineage
        self._release()
        asked: list[Asked[Survey]] = []
        for upload, tier in zip(self._options.uploads, self._tiers, strict=True):
            root = TierRoot(
                upload,
                tier.storage,
                self._options,
                telemetry=self._job.telemetry,
                until_idle=partial(_halt, self._threads),
                spared={working_name(tier.storage, info.name, info.save_id) for info in nearest.everything},
            )
            self._roots.append(root)
            asked.append(root.ask())
            tier.note(asked[-1])
        if self.patient:
            self.patient = False
            for tier, each in zip(self._tiers, asked, strict=True):
                with suppress(OSError, CheckpointError):
                    each.result(tier.label, tier.patience_seconds)
        else:
            wait([each.answer for each in asked], _MOMENT_SECONDS)
        try:
            found = [_heard(tier.label, each) for tier, each in zip(self._tiers, asked, strict=True)]
        except CheckpointError:
            self._release()
            raise
        union = unite([nearest, *filter(None, found)])
        further = [held.info for held in union.everything if held.copies[0].tier or held.copies[0].part]
        return further, union.lineage

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
        for each in self._threads:
            each.line.wait_for_turn(each.upload.deadline_seconds)
        coordinator = self._job.coordinator
        if not self._settled:
            try:
                self._settled = coordinator.run_on_coordinator(self._settle, what="looking for refused tiers")
            except UploadError:
                _take_failure(self._threads)  # the same one
                raise
        if all(upload.on_error == "warn" for upload in self._options.uploads):
            return
        own = _take_failure(self._threads)
        if any(coordinator.all_reduce_max([int(own is not None)], what="looking for lost uploads")):
            raise own or UploadError("an upload has failed; the log of another rank has the reason")

    def follow(self, save: FollowedSave, number: SaveNumber) -> None:
        """Upload and export a save once it is committed, where it is due."""
        if save is self._followed:
            return
        self._followed, self._count, self._step = save, number.number, save.step
        self._exports.follow(save.committed, number)
        if not self._threads:
            return
        for tier in self._tiers:
            tier.note(None)
        save.uploaded = Future()
        save.uploaded.set_running_or_notify_cancel()
        due = [
            (index, each)
            for index, each in enumerate(self._threads)
            if self._rule.is_due(save.step, number, each.upload.every)
        ]
        save.committed.add_done_callback(partial(self._committed, save.uploaded, due))

    def close(self, *, leave: bool, preempted: bool, seconds_left: float = math.inf) -> None:
        """Wait for uploads, then exports, up to their deadlines; give the tiers back.

        What is not there by then, or in `seconds_left` of a job that is being stopped, is left to the next
        run; with `leave` at once.

        Raises:
            UploadError: one has failed, and is to stop training.
        """
        began, threads = time.monotonic(), list(self._threads)
        deadlines = [began + min(each.upload.deadline_seconds, max(0.0, seconds_left)) for each in threads]
        for each in threads:
            each.ending = True
            if leave or (preempted and each.upload.on_preemption == "leave"):
                each.stop()
        for each, deadline in zip(threads, deadlines, strict=True):
            self._wait(each, deadline)
        newest = self._newest
        for index, each in enumerate(threads):
            # Only now: whether the last checkpoint is there must be known. It is due whatever its number is.
            if newest is not None and self._there.get(index) != newest.save_id:
                each.line.add(DueCheckpoint(newest, partial(self._note, index, newest, None)))
            each.line.close()
        for each, deadline in zip(threads, deadlines, strict=True):
            self._wait(each, deadline)
        self._end(threads, max(deadlines, default=began) + _END_SECONDS)
        self._exports.finish(leave=leave or preempted)
        if (failure := _take_failure(threads)) is not None:
            raise failure

    def _begin(self) -> None:
        """Begin to upload and export, also what an earlier run has left. Collective."""
        self._exports.begin()
        if self._threads or not self._tiers:
            return
        job, coordinator, options = self._job, self._job.coordinator, self._options
        session, backlog, self._settled = coordinator.run_on_coordinator(
            self._opened, what="taking the further tiers"
        )
        disk = None
        if job.storage.num_disks > 1:
            number = [part is job.storage.own for part in job.storage.parts].index(True)
            disks = coordinator.gather(number, what="taking the further tiers")
            disk = number if disks.index(number) == coordinator.rank else None
        for index, (upload, tier) in enumerate(zip(options.uploads, self._tiers, strict=True)):
            shared = UploadJob(
                source=job.storage,
                rank=coordinator.rank,
                open_channel=partial(coordinator.background_channel, f"upload/{session}/{index}"),
                deadline_seconds=options.deadline_seconds,
                telemetry=job.telemetry,
                sign=options.manifest_signer,
            )
            note = partial(self._progress.note, index)
            thread: TierThread = (
                Follower(self._roots[index], upload, shared, note)
                if coordinator.is_coordinator
                else UploadListener(tier.storage, upload, shared, disk)
            )
            for info in backlog[index]:
                thread.line.add(DueCheckpoint(info, partial(self._note, index, info, None)))
            self._threads.append(thread)
        if coordinator.is_coordinator:
            self._progress.write()
        for thread in self._threads:
            thread.start()

    def _opened(self) -> tuple[str, list[list[CheckpointInfo]], bool]:
        """Return an id, what was left due for each tier, and whether all are claimed."""
        there = [root.everything for root in self._roots]
        due = left_due(self._job.storage, self._rule, self._options.uploads, there)
        for root, found in zip(self._roots, due, strict=True):
            root.continues(found)
        return secrets.token_hex(4), due, all(root.taken for root in self._roots)

    def _settle(self) -> bool:
        """Return whether every tier has been claimed; never waits.

        Raises:
            UploadError: one was refused since; once for each time.
        """
        for root in self._roots:
            refusal, root.refusal = root.refusal, None
            if refusal is not None:
                raise UploadError(
                    f"nothing can be uploaded to {root.url}: {refusal}. It had not answered before the "
                    f"first save; the saves to {self._job.storage.url} so far are whole",
                    lasting=True,
                ) from refusal
        return all(root.taken for root in self._roots)

    def _release(self) -> None:
        """Give every tier back, in the background."""
        for root in self._roots:
            run_with_timeout(0, root.release)
        for tier in self._tiers:
            tier.note(None)
        self._roots.clear()

    def _committed(
        self,
        uploaded: Future[CheckpointInfo | None],
        due: Sequence[tuple[int, TierThread]],
        done: Future[CheckpointInfo],
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
        for index, each in due:
            each.line.add(DueCheckpoint(info, partial(self._note, index, info, outcomes)))
        if self._job.coordinator.is_coordinator:
            self._progress.write()

    def _note(self, index: int, info: CheckpointInfo, outcomes: AllTiers | None, outcome: Outcome) -> None:
        if isinstance(outcome, CheckpointInfo):
            self._there[index] = info.save_id
        if outcomes is not None:
            outcomes.report(outcome)

    def _held(self) -> Collection[str]:
        return self._left.union(self._exports.held, *(each.line.held for each in self._threads))

    def _wait(self, thread: TierThread, deadline: float) -> None:
        """Wait until nothing is due; at the deadline, stop."""
        while not thread.stopped.is_set() and not thread.wait(
            max(0.0, min(_SAID_EVERY, deadline - time.monotonic()))
        ):
            if time.monotonic() >= deadline:
                thread.stop()
            elif self._job.coordinator.is_coordinator:
                self._progress.say(thread)

    def _end(self, threads: Sequence[TierThread], until: float) -> None:
        """End the uploads; say what is not there, and how it gets there."""
        root = self._job.storage.url
        leads = self._job.coordinator.is_coordinator
        for each in threads:
            left = each.line.unfinished
            self._left |= {info.name for info in left}
            if left and leads:
                _logger.warning(
                    "not yet in %s: step(s) %s; the next run uploads the rest, and so does "
                    "`ckpt upload %s --to %s`",
                    each.upload.url,
                    ", ".join(str(info.step) for info in left),
                    root,
                    each.upload.url,
                )
        _join_all(threads)
        if threads and leads:
            self._progress.write()
        self._threads.clear()
        for each in threads:
            # A thread that hangs in storage gives its tier back itself, when it wakes up.
            if each.ended:
                limit = min(until - time.monotonic(), _RELEASE_SECONDS)
                if not run_with_timeout(max(_LOOK_SECONDS, limit), each.release):
                    each.interrupt()
        if not threads:
            self._release()


@final
class UploadProgress:
    """How far uploads are, in `tiers.json` and in the log. Coordinator only."""

    def __init__(self, job: Job, threads: Sequence[TierThread]) -> None:
        self._storage = job.storage
        self._threads = threads
        self._guard = threading.Lock()
        self._running: dict[int, tuple[Uploading, float]] = {}
        self._written_at = 0.0
        self._told = False

    def note(self, index: int, copy: CheckpointCopy | None, done_bytes: int) -> None:
        """Note bytes that have arrived: 0 when an upload begins, no copy when it ends."""
        now = time.monotonic()
        with self._guard:
            if copy is None:
                self._running.pop(index, None)
            elif not done_bytes:
                size = copy.manifest.size_bytes
                self._running[index] = Uploading(name=copy.name, done_bytes=0, size_bytes=size), now
            elif index in self._running:
                running, began = self._running[index]
                done = running.done_bytes + done_bytes
                self._running[index] = replace(running, done_bytes=done), began
        if not done_bytes or now - self._written_at > _SAID_EVERY:
            self.write()

    def say(self, thread: TierThread) -> None:
        """Log how far the upload to a tier is, and what waits for it."""
        steps, url = ", ".join(str(info.step) for info in thread.line.unfinished), thread.upload.url
        found = self._running.get(self._threads.index(thread))
        how = "not begun, or to be tried again"
        if found is not None:
            (running, began), now = found, time.monotonic()
            percent = 100 * running.done_bytes // running.size_bytes if running.size_bytes else 100
            rate = running.done_bytes / max(1e-3, now - began) / 1e6
            how = f"{running.name}, {percent} % of {running.size_bytes / 1e6:.1f} MB, {rate:.1f} MB/s"
        _logger.info("waiting for step(s) %s to be in %s: %s", steps, url, how)

    def write(self) -> None:
        """Write the record; a failure is a warning, once."""
        with self._guard:
            self._written_at = time.monotonic()
            records = [
                TierRecord(
                    url=each.upload.url,
                    every=each.upload.every,
                    due=[info.name for info in each.line.unfinished],
                    uploading=self._running[index][0] if index in self._running else None,
                )
                for index, each in enumerate(self._threads)
            ]
            if not records:
                return  # the root has been given back
            try:
                write_tiers(self._storage, records)
            except OSError as error:
                if not self._told:
                    _logger.warning("the progress of uploads is not recorded: %s", error)
                self._told = True


def _heard(label: str, asked: Asked[Survey]) -> Survey | None:
    """Return what a tier holds; None, with a warning, if that is not known yet.

    Raises:
        CheckpointError: it is refused.
    """
    why = "has not answered yet"
    if asked.answer.done():
        try:
            return asked.answer.result()
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            why = f"cannot be reached ({failure_text(error)})"
    _logger.warning(
        "%s %s: saves go on, uploads are tried later; checkpoints and lineages that only it has are not "
        "known to the first save",
        label,
        why,
    )
    return None


def _take_failure(threads: Sequence[TierThread]) -> UploadError | None:
    """Return a failure that is to stop training, once."""
    for each in threads:
        if each.upload.on_error == "raise" and each.failure is not None:
            failure, each.failure = each.failure, None
            return failure
    return None


def _halt(threads: Sequence[TierThread]) -> None:
    """Stop the uploads of a manager whose root another one of this process takes."""
    for each in threads:
        each.stop()
    _join_all(threads)


def _join_all(threads: Sequence[TierThread]) -> None:
    """Wait until stopped uploads have ended; cancel requests that do not."""
    until = time.monotonic() + _END_SECONDS
    for each in threads:
        each.join(min(_GRACE_SECONDS, until - time.monotonic()))
    # Several times, because one request may follow another; the last moment is for threads without a channel.
    while (alive := [each for each in threads if not each.join(0)]) and (
        time.monotonic() < until - _LOOK_SECONDS
    ):
        for each in alive:
            each.interrupt()
        alive[0].join(_LOOK_SECONDS)
    for each in alive:
        each.abandon()
    for each in alive:
        each.join(until - time.monotonic())


_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


def refuse_one_place(tiers: Sequence[Storage], options: CheckpointOptions) -> None:
    """Refuse tiers of which one is in another.

    Raises:
        ConfigError: there are such.
    """
    given = [options.storage_options, *(upload.storage_options for upload in options.uploads)]
    places = list(zip((tier.own for tier in tiers), given, strict=True))
    for (one, its_options), (other, others_options) in combinations(places, 2):
        if _is_one_place(one, its_options, other, others_options):
            raise ConfigError(
                f"upload: {public_url(other.url)} and {public_url(one.url)} are the same place, or one is in "
                "the other; a further tier needs a place of its own"
            )


def _is_one_place(
    one: Storage, its_options: Mapping[str, Any], other: Storage, others_options: Mapping[str, Any]
) -> bool:
    if one is other:
        return True
    if isinstance(one, LocalStorage) and isinstance(other, LocalStorage):
        return _nested(_parts(os.path.realpath(one.url)), _parts(os.path.realpath(other.url)))
    if isinstance(one, ObjectStorage) and isinstance(other, ObjectStorage):
        same_service = _endpoint(its_options) == _endpoint(others_options)
        return same_service and _nested(_parts(_plain(one.url)), _parts(_plain(other.url)))
    return False


def _nested(one: Sequence[str], other: Sequence[str]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _parts(place: str) -> Sequence[str]:
    return place.rstrip("/").split("/")


def _plain(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{_ALIASES.get(scheme, scheme)}{separator}{rest}"


def _endpoint(options: Mapping[str, Any]) -> object:
    client = options.get("client_kwargs")
    inner = client.get("endpoint_url") if isinstance(client, Mapping) else None
    return options.get("endpoint_url") or options.get("endpoint") or inner
