"""One save from staged to committed, on the background thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
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
from ckpt_core.lifecycle._background import Background
from ckpt_core.lifecycle._finite import refuse_non_finite
from ckpt_core.lifecycle._handle import SaveHandle, fulfil, reject
from ckpt_core.lifecycle._memory import WriteMemory
from ckpt_core.lifecycle._plans import Keeping
from ckpt_core.lifecycle._prepare import PreparedSave, failed_in, save_error
from ckpt_core.lifecycle._write import Terms, commit_all, write_rank
from ckpt_core.options import SignManifest
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContext:
    """What all saves of a manager have in common.

    Attributes:
        storage: where checkpoints go.
        telemetry: receives spans.
        memory: what writing keeps from save to save.
        background: told whenever a save gets on.
        terms: what a commit depends on; `check` is also called before anything is written.
        make_room: called on the coordinator before anything is written; raises if the save does not fit.
        committed: called on the coordinator after the commit.
        reject_non_finite: whether NaN and infinities in staged weights make the save fail.
        diverged: called on every rank when that was found to differ, and refused.
    """

    storage: Storage
    telemetry: Telemetry
    memory: WriteMemory
    background: Background
    terms: Terms
    make_room: Callable[[PreparedSave], None]
    committed: Callable[[CheckpointInfo], None]
    diverged: Callable[[], None]
    reject_non_finite: bool = False


@final
class SaveRun:
    """One save on one rank, from staged to committed.

    Concurrency: `run` is called once, on the background thread; it uses no collective. `give_up` may
    be called on another thread meanwhile: from then on this rank brings its error and commits nothing.
    """

    def __init__(
        self, prepared: PreparedSave, handle: SaveHandle, context: SaveContext, channel: CommitChannel
    ) -> None:
        self._prepared = prepared
        self._handle = handle
        self._storage = context.storage
        self._channel = channel
        self._telemetry = context.telemetry
        self._memory = context.memory
        self._context = context
        sign = context.terms.sign
        self._terms = replace(context.terms, sign=None if sign is None else partial(self._sign, sign))
        self._beat = context.background.beat
        self._deadline_seconds = context.background.deadline_seconds
        # Exchanges with other ranks have deadlines of their own; after this even they count as hanging.
        self._patience_seconds = 3 * self._deadline_seconds + 10
        self._refusal: CheckpointError | None = None
        self._opened = False
        self._silence: DeadlineError | None = None
        # What is left to do for as long as an earlier save keeps this one from beginning.
        self._phase: SavePhase = "open"
        self._committing = False
        self._giving_up = threading.Lock()

    def run(self) -> None:
        """Go through with the save; its outcome goes to the handle, nothing is raised.

        A rank that failed still goes to the meeting: it brings its error, so that every rank learns of it.
        """
        payload = self._write_and_report(self._stage())
        self._prepared.staged.release()
        try:
            info = self._meet(payload)
        except CheckpointError as error:
            reject(self._handle.committed, self._failed(error))
            return
        self._memory.committed()
        fulfil(self._handle.committed, info)
        if self._channel.is_coordinator:
            self._beat("pruning")
            self._context.committed(info)

    def give_up(self, told: str) -> None:
        """The background thread hangs: this save has failed on this rank, and in the end on all."""
        request, rank = self._prepared.request, self._channel.rank
        with self._giving_up:
            # Whenever it wakes up it goes on, and a commit cannot be called back.
            error = DeadlineError(f"rank {rank}: {told}", failures={rank: told}, in_doubt=self._committing)
            failed = save_error(self._storage.url, request.step, self._phase, error)
            reject(self._handle.staged, failed)
            told_in_time = reject(self._handle.committed, failed)
        if not told_in_time:
            _logger.error("after the commit of step %d: %s", request.step, error)

    def _get_on(self, doing: str) -> None:
        """Tell that the writing gets on; of a save that was given up meanwhile nothing more is written."""
        if (late := self._given_up()) is not None:
            raise late
        self._beat(doing)

    def _given_up(self) -> SaveError | None:
        if not self._handle.done():
            return None
        error = self._handle.committed.exception()
        return SaveError(f"while writing: given up before it ended ({error})", phase="write")

    def _stage(self) -> BaseException | None:
        """Have the handle told when the copies are made; what kept this rank from making them."""
        error, deferred = self._prepared.error or self._given_up(), self._prepared.staged.deferred
        if deferred is None or error is not None:
            self._tell_staged(error)
            return error
        try:
            # Writing begins while the rest is being copied, and tells in the end whether all of it was.
            deferred.when_done(self._tell_staged)
        except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
            return failed_in("stage", caught)
        return None

    def _tell_staged(self, error: BaseException | None) -> None:
        if error is None:
            fulfil(self._handle.staged, None)
        else:
            reject(self._handle.staged, failed_in("stage", error))

    def _write_and_report(self, error: BaseException | None) -> bytes | BaseException:
        """Write this rank's files once the coordinator has opened the save; the report, or what went wrong.

        Nobody writes before it has. If it cannot, it says so to all at once.
        """
        if error is not None and not self._channel.is_coordinator:
            return error
        try:
            reference = self._open(error)
        except DeadlineError as silence:
            self._silence = silence
            return SaveError(f"while opening: {silence}", phase="open")
        except CheckpointError as refusal:
            self._refusal = refusal
            return b""
        self._opened = True
        try:
            report = self._write(reference)
        except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
            return failed_in("write", caught)
        return self._given_up() or report

    def _open(self, error: BaseException | None) -> bytes:
        """Prepare the place, or wait to be told that it is; how the coordinator's own values look."""
        self._beat("opening", None if self._channel.is_coordinator else self._patience_seconds)
        topic = f"open/{self._prepared.request.name}/{self._prepared.assignment.save_id}"
        return self._channel.broadcast(
            topic, lambda: self._make_place(error), deadline_seconds=self._deadline_seconds
        )

    def _make_place(self, error: BaseException | None) -> bytes:
        """On the coordinator: prepare the place; what it gives to all ranks is how its own values look."""
        if error is not None:
            found = Failure.of(error)
            raise CoordinationError(
                f"rank 0: {found.text}", failures={0: found.text}, causes={0: found}
            ) from error
        request, assignment = self._prepared.request, self._prepared.assignment
        self._terms.check()
        self._context.make_room(self._prepared)
        begin(self._storage, request.name, assignment.save_id, replace=request.replace)
        return self._prepared.local.digests()

    def _write(self, reference: bytes) -> bytes:
        prepared = self._prepared
        attributes = {"step": prepared.request.step, "rank": self._channel.rank}
        self._phase = "write"
        self._beat("writing the tensors")
        own = _own_files(prepared, reference)
        with self._telemetry.span("save.write", size_bytes=prepared.staged.size_bytes, **attributes):
            report = write_rank(self._storage, prepared, own, self._memory, beat=self._get_on)
        if self._context.reject_non_finite:
            refuse_non_finite(prepared.staged.images, prepared.buffers)
        return report

    def _meet(self, payload: bytes | BaseException) -> CheckpointInfo:
        request, assignment = self._prepared.request, self._prepared.assignment

        def commit(reports: list[bytes]) -> bytes:
            if self._refusal is not None:
                raise self._refusal
            return json.dumps(asdict(self._commit(reports))).encode()  # see `_decoded`

        name = f"save/{request.name}/{assignment.save_id}"
        attributes = {"step": request.step, "rank": self._channel.rank}
        self._phase = "commit"
        self._beat("waiting for the other ranks", self._patience_seconds)
        # The error is left for a coordinator that wakes up; to wait for it as long again is no use.
        deadline = self._deadline_seconds if self._silence is None else 0.0
        with closing(self._channel), self._telemetry.span("save.commit", **attributes) as details:
            info = _decoded(self._channel.commit_barrier(name, payload, commit, deadline_seconds=deadline))
            details["size_bytes"] = info.size_bytes
        return info

    def _commit(self, reports: list[bytes]) -> CheckpointInfo:
        self._begin_committing()
        try:
            self._terms.check()
            return commit_all(self._storage, self._prepared, reports, self._memory, terms=self._terms)
        finally:
            # Only to be told yet, for which a store may take its time.
            self._beat("telling the other ranks", self._patience_seconds)

    def _begin_committing(self) -> None:
        """From now on it is in doubt whether a save that is given up is committed."""
        with self._giving_up:
            if (late := self._given_up()) is not None:
                raise late
            self._committing = True
        self._beat("committing")

    def _sign(self, sign: SignManifest, name: str, manifest: bytes) -> bytes:
        """Sign, unless that takes so long that the save was given up: then it is not committed any more."""
        self._committing = False
        self._beat("signing the manifest")
        signature = sign(name, manifest)
        self._begin_committing()
        return signature

    def _failed(self, error: CheckpointError) -> CheckpointError:
        """Clear up, unless it may be committed all the same; what to tell whoever waits."""
        self._committing = False
        in_doubt = isinstance(error, SaveError | CoordinationError) and error.in_doubt
        if isinstance(error, DivergenceError):
            self._context.diverged()
        if self._channel.is_coordinator and self._opened and not in_doubt:
            self._beat("removing what was written")
            _abandon(self._storage, self._prepared.assignment.working, self._terms)
        told = error
        if isinstance(error, CoordinationError):
            phase = "open" if self._silence else _phase_of(error, "open" if self._refusal else "commit")
            error = self._silence or error
            told = save_error(self._storage.url, self._prepared.request.step, phase, error)
            told.__cause__ = error
        _logger.error("%s", error)
        return told


def _abandon(storage: Storage, working: str, terms: Terms) -> None:
    try:
        terms.check()
    except (OSError, CheckpointError) as error:
        # On an object store the job that owns the root now may be writing under the very same name.
        _logger.warning("what was written to %s/%s is left: %s", storage.url, working, error)
    else:
        abandon(storage, working)


def _own_files(prepared: PreparedSave, reference: bytes) -> Mapping[str, bytes]:
    """A rank's small files, with those of its values that the checkpoint would not give it back."""
    rank, local = prepared.rank, prepared.local
    match prepared.keeping:
        case Keeping.NEVER:
            return prepared.files
        case Keeping.ALWAYS:
            return {**prepared.files, **local.encode(rank)}
        case Keeping.IF_DIFFERENT:
            return {**prepared.files, **local.encode(rank, local.differing(reference))}


def _decoded(answer: bytes) -> CheckpointInfo:
    fields = json.loads(answer)
    lineage = fields.pop("lineage")
    ancestry = tuple((ancestor, step) for ancestor, step in lineage.pop("ancestry"))
    return CheckpointInfo(**fields, lineage=Lineage(**lineage, ancestry=ancestry))


def _phase_of(error: CoordinationError, otherwise: SavePhase) -> SavePhase:
    if isinstance(error, DeadlineError) and error.awaited and not (error.in_doubt or error.failures):
        return "write"  # they are awaited with what they were to write
    for cause in error.causes.values():
        if cause.phase:
            return cause.phase
    return otherwise
