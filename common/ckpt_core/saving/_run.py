"""One save from staged to committed, on the save thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import final

from ckpt_core.commit import abandon, begin
from ckpt_core.coordination import CommitChannel
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CoordinationError,
    DeadlineError,
    DivergenceError,
    Failure,
    SaveError,
    SavePhase,
)
from ckpt_core.options import SignManifest
from ckpt_core.saving._checks import refuse_non_finite
from ckpt_core.saving._handle import SaveHandle, failed_in, fulfil, reject, save_error
from ckpt_core.saving._in_flight import SaveThread, Task
from ckpt_core.saving._plan_cache import KeepOwn
from ckpt_core.saving._prepared import PreparedSave
from ckpt_core.saving._reports import ReportCache
from ckpt_core.saving._twins import Partners, TwinSession
from ckpt_core.saving._write import Terms, commit_all, write_rank
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContext:
    """The values that all saves of a manager share.

    Attributes:
        storage: the root.
        telemetry: receives spans.
        thread: receives a heartbeat at every step of progress.
        reports: caches for writing, kept from save to save.
        terms: conditions of a commit; `check` is also called before anything is written.
        make_room: called on the coordinator before anything is written; raises if the save does not fit.
        committed: called on the coordinator after the commit.
        diverged: called on every rank when a save is refused because replicas differ.
        reject_non_finite: whether NaN and infinities in staged weights make the save fail.
        partners: write a twin of every file; None without twins.
    """

    storage: Storage
    telemetry: Telemetry
    thread: SaveThread
    reports: ReportCache
    terms: Terms
    make_room: Callable[[PreparedSave], None]
    committed: Callable[[PreparedSave, CheckpointInfo], None]
    diverged: Callable[[], None]
    reject_non_finite: bool = False
    partners: Partners | None = None


@final
class SaveRun(Task):
    """One save on one rank, from staged to committed.

    Concurrency: `run` is called once, on the save thread, and uses no collective. `give_up` may be called on
    another thread meanwhile: from then on this rank reports its error and commits nothing.
    """

    def __init__(
        self, prepared: PreparedSave, handle: SaveHandle, context: SaveContext, channel: CommitChannel
    ) -> None:
        super().__init__()
        self._prepared = prepared
        self.handle = handle
        self._context = context
        self._storage = context.storage
        self._channel = channel
        self._telemetry = context.telemetry
        sign = context.terms.sign
        self._terms = replace(context.terms, sign=None if sign is None else partial(self._sign, sign))
        self._heartbeat = context.thread.heartbeat
        self._deadline_seconds = context.thread.deadline_seconds
        # Exchanges with other ranks have their own deadlines; beyond this limit they count as hanging, too.
        self._patience_seconds = 3 * self._deadline_seconds + 10
        self._refusal: CheckpointError | None = None
        self._opened = False
        self._silence: DeadlineError | None = None
        # The next phase, while an earlier save keeps this one from beginning.
        self._phase: SavePhase = "open"
        self._committing = False
        self._giving_up = threading.Lock()

    def run(self) -> None:
        """Write this rank's files, commit with all ranks and resolve the handle.

        Nothing is raised. A rank that failed still arrives at the commit barrier with its error, so that
        every rank learns of it.
        """
        partners = self._context.partners
        try:
            with nullcontext() if partners is None else partners.session(self._prepared.working) as twins:
                reference, failure = self._open(self._watch_copies())
                report = self._write(reference, twins) if failure is None else failure
                self._prepared.staged.release()
                info = self._commit_with_all(report, twins)
        except CheckpointError as error:
            reject(self.handle.committed, self._failed(error))
            return
        self._context.reports.committed()
        fulfil(self.handle.committed, info)
        if self._channel.is_coordinator:
            if partners is not None:
                partners.log_size(info.size_bytes // 2, self._storage.url)
            self._heartbeat("pruning")
            self._context.committed(self._prepared, info)

    def give_up(self, reason: str) -> None:
        """Fail this save, here now and later on all ranks, because the save thread hangs."""
        request, rank = self._prepared.request, self._channel.rank
        with self._giving_up:
            # A thread that wakes up continues, and a commit cannot be undone.
            error = DeadlineError(
                f"rank {rank}: {reason}", failures={rank: reason}, in_doubt=self._committing
            )
            failed = save_error(self._storage.url, request.step, self._phase, error)
            reject(self.handle.staged, failed)
            in_time = reject(self.handle.committed, failed)
        if not in_time:
            _logger.error("after the commit of step %d: %s", request.step, error)

    def _watch_copies(self) -> BaseException | None:
        """Resolve the handle's `staged` once copies are made; return an earlier error."""
        error, deferred = self._prepared.error or self._given_up(), self._prepared.staged.deferred
        if deferred is None or error is not None:
            self._resolve_staged(error)
            return error
        try:
            # Writing begins while the rest is being copied, and fails at its end if a copy failed.
            deferred.when_done(self._resolve_staged)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            return failed_in("stage", caught)
        return None

    def _resolve_staged(self, error: BaseException | None) -> None:
        if error is None:
            fulfil(self.handle.staged, None)
        else:
            reject(self.handle.staged, failed_in("stage", error))

    def _open(self, error: BaseException | None) -> tuple[bytes, bytes | BaseException | None]:
        """Create the working directory, or wait until the coordinator has.

        No rank writes before it exists. If the coordinator cannot create it, it reports that to all ranks.

        Returns:
            Digests of the coordinator's rank-local buffers, and the report that replaces a write: None if
            this rank may write.
        """
        lead = self._channel.is_coordinator
        if error is not None and not lead:
            return b"", error
        self._heartbeat("opening", None if lead else self._patience_seconds)
        topic = f"open/{self._prepared.request.name}/{self._prepared.save_id}"
        try:
            reference = self._channel.broadcast(
                topic, lambda: self._create(error), deadline_seconds=self._deadline_seconds
            )
        except DeadlineError as silence:
            self._silence = silence
            return b"", SaveError(f"while opening: {silence}", phase="open")
        except CheckpointError as refusal:
            self._refusal = refusal
            return b"", b""
        self._opened = True
        return reference, None

    def _create(self, error: BaseException | None) -> bytes:
        """Create the working directory; coordinator only."""
        if error is not None:
            found = Failure.of(error)
            raise CoordinationError(
                f"rank 0: {found.text}", failures={0: found.text}, causes={0: found}
            ) from error
        request = self._prepared.request
        self._terms.check()
        self._context.make_room(self._prepared)
        begin(self._storage, request.name, self._prepared.save_id, replace=request.replace)
        return self._prepared.local.digests()

    def _write(self, reference: bytes, twins: TwinSession | None) -> bytes | BaseException:
        """Write this rank's files; return the report, or the error."""
        prepared = self._prepared
        attributes = {"step": prepared.request.step, "rank": self._channel.rank}
        self._phase = "write"
        self._heartbeat("writing the tensors")
        try:
            small = _small_files(prepared, reference)
            with self._telemetry.span("save.write", size_bytes=prepared.staged.size_bytes, **attributes):
                report = write_rank(
                    self._storage.own,
                    prepared,
                    small,
                    self._context.reports,
                    progress=self._progress,
                    twins=twins,
                )
            if self._context.reject_non_finite:
                refuse_non_finite(prepared.staged.images, prepared.buffers)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            if twins is not None:
                twins.stop()  # before the staged copies are released
            return failed_in("write", caught)
        return self._given_up() or report

    def _commit_with_all(self, report: bytes | BaseException, twins: TwinSession | None) -> CheckpointInfo:
        """Pass the commit barrier: the coordinator commits once every rank has reported."""
        request = self._prepared.request

        def commit(reports: list[bytes]) -> bytes:
            if self._refusal is not None:
                raise self._refusal
            return json.dumps(asdict(self._commit(reports, twins))).encode()  # see `_decoded`

        name = f"save/{request.name}/{self._prepared.save_id}"
        attributes = {"step": request.step, "rank": self._channel.rank}
        self._phase = "commit"
        self._heartbeat("waiting for the other ranks", self._patience_seconds)
        # The error is for a coordinator that wakes up; another wait of the same length would be useless.
        deadline = self._deadline_seconds if self._silence is None else 0.0
        with self._telemetry.span("save.commit", **attributes) as details:
            info = _decoded(self._channel.commit_barrier(name, report, commit, deadline_seconds=deadline))
            details["size_bytes"] = info.size_bytes
        return info

    def _commit(self, reports: list[bytes], twins: TwinSession | None) -> CheckpointInfo:
        self._begin_committing()
        try:
            self._terms.check()
            return commit_all(
                self._storage,
                self._prepared,
                reports,
                self._context.reports,
                terms=self._terms,
                twins=twins,
            )
        finally:
            # Only the report is missing, for which a store may take its time.
            self._heartbeat("reporting to the other ranks", self._patience_seconds)

    def _begin_committing(self) -> None:
        """Note that from now on a save given up is in doubt: it may be committed."""
        with self._giving_up:
            if (late := self._given_up()) is not None:
                raise late
            self._committing = True
        self._heartbeat("committing")

    def _sign(self, sign: SignManifest, name: str, manifest: bytes) -> bytes:
        """Sign the manifest; raise if the save was given up meanwhile."""
        self._committing = False
        self._heartbeat("signing the manifest")
        signature = sign(name, manifest)
        self._begin_committing()
        return signature

    def _progress(self, doing: str) -> None:
        """Record progress of the writing; raise if the save was given up meanwhile."""
        if (late := self._given_up()) is not None:
            raise late
        self._heartbeat(doing)

    def _given_up(self) -> SaveError | None:
        if not self.handle.done():
            return None
        return SaveError(f"while writing: given up before it ended ({self.handle.error})", phase="write")

    def _failed(self, error: CheckpointError) -> CheckpointError:
        """Remove the written files unless possibly committed; return the handle's error."""
        self._committing = False
        in_doubt = isinstance(error, SaveError | CoordinationError) and error.in_doubt
        if isinstance(error, DivergenceError):
            self._context.diverged()
        if self._channel.is_coordinator and self._opened and not in_doubt:
            self._heartbeat("removing the written files")
            _abandon(self._storage, self._prepared.working, self._terms)
        raised = error
        if isinstance(error, CoordinationError):
            phase = "open" if self._silence else _phase_of(error, "open" if self._refusal else "commit")
            error = self._silence or error
            raised = save_error(self._storage.url, self._prepared.request.step, phase, error)
            raised.__cause__ = error
        _logger.error("%s", error)
        return raised


def _abandon(storage: Storage, working: str, terms: Terms) -> None:
    try:
        terms.check()
    except (OSError, CheckpointError) as error:
        # On an object store the job that owns the root now may be writing under the very same name.
        _logger.warning("the files written to %s/%s were not removed: %s", storage.url, working, error)
    else:
        abandon(storage, working)


def _small_files(prepared: PreparedSave, reference: bytes) -> Mapping[str, bytes]:
    """Return this rank's small files, with its rank-local buffers where necessary."""
    rank, local = prepared.rank, prepared.local
    match prepared.keeping:
        case KeepOwn.NEVER:
            return prepared.files
        case KeepOwn.ALWAYS:
            return {**prepared.files, **local.encode(rank)}
        case KeepOwn.IF_DIFFERENT:
            return {**prepared.files, **local.encode(rank, local.differing(reference))}


def _decoded(answer: bytes) -> CheckpointInfo:
    fields = json.loads(answer)
    lineage = fields.pop("lineage")
    ancestry = tuple((ancestor, step) for ancestor, step in lineage.pop("ancestry"))
    return CheckpointInfo(**fields, lineage=Lineage(**lineage, ancestry=ancestry))


def _phase_of(error: CoordinationError, otherwise: SavePhase) -> SavePhase:
    if isinstance(error, DeadlineError) and error.awaited and not (error.in_doubt or error.failures):
        return "write"  # the missing ranks never reported their writes
    for cause in error.causes.values():
        if cause.phase:
            return cause.phase
    return otherwise
