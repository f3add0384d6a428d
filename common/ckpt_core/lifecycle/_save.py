"""Executes the commands of the save reducer on the background thread."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import assert_never, final

from ckpt_core.commit import abandon, begin
from ckpt_core.coordination import Coordinator
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
from ckpt_core.lifecycle._reducer import (
    Command,
    Committed,
    Event,
    Failed,
    Fulfil,
    Meet,
    Open,
    Opened,
    Phase,
    Prune,
    Refused,
    Reject,
    Release,
    Staged,
    Write,
    Written,
    reduce,
)
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
        coordinator: the ranks of the job.
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
    coordinator: Coordinator
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

    def __init__(self, prepared: PreparedSave, handle: SaveHandle, context: SaveContext) -> None:
        self._prepared = prepared
        self._handle = handle
        self._storage = context.storage
        self._coordinator = context.coordinator.as_of_now()
        self._telemetry = context.telemetry
        self._memory = context.memory
        self._context = context
        sign = context.terms.sign
        self._terms = replace(context.terms, sign=None if sign is None else partial(self._sign, sign))
        self._beat = context.background.beat
        self._deadline_seconds = context.background.deadline_seconds
        # Exchanges with other ranks have deadlines of their own; after this even they count as hanging.
        self._patience_seconds = 3 * self._deadline_seconds + 10
        self._events: deque[Event] = deque()
        self._refusal: CheckpointError | None = None
        self._opened = False
        self._reference = b""
        self._silence: DeadlineError | None = None
        # What is left to do for as long as an earlier save keeps this one from beginning.
        self._phase: SavePhase = "open"
        self._committing = False
        self._giving_up = threading.Lock()

    def run(self) -> None:
        """Go through with the save; its outcome goes to the handle, nothing is raised."""
        self._events.append(self._staged())
        phase = Phase.PLANNED
        while self._events:
            phase, commands = reduce(phase, self._events.popleft())
            for command in commands:
                self._execute(command)

    def give_up(self, told: str) -> None:
        """The background thread hangs: this save has failed on this rank, and in the end on all."""
        request, rank = self._prepared.request, self._coordinator.rank
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

    def _execute(self, command: Command) -> None:
        match command:
            case Open(error):
                self._open(error)
            case Write():
                self._write()
            case Meet(payload):
                self._meet(payload)
            case Release():
                self._prepared.staged.release()
            case Fulfil() | Reject():
                self._tell(command)
            case Prune(info):
                if self._coordinator.is_coordinator:
                    self._beat("pruning")
                    self._context.committed(info)
            case _:
                assert_never(command)

    def _tell(self, verdict: Fulfil | Reject) -> None:
        if isinstance(verdict, Fulfil):
            fulfil(self._handle.committed, verdict.info)
        else:
            reject(self._handle.committed, verdict.error)

    def _staged(self) -> Event:
        error, deferred = self._prepared.error or self._given_up(), self._prepared.staged.deferred
        if deferred is None or error is not None:
            self._tell_staged(error)
            return Staged() if error is None else Failed(error)
        try:
            # Writing begins while the rest is being copied, and tells in the end whether all of it was.
            deferred.when_done(self._tell_staged)
        except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
            return Failed(failed_in("stage", caught))
        return Staged()

    def _tell_staged(self, error: BaseException | None) -> None:
        if error is None:
            fulfil(self._handle.staged, None)
        else:
            reject(self._handle.staged, failed_in("stage", error))

    def _open(self, error: BaseException | None) -> None:
        if error is not None and not self._coordinator.is_coordinator:
            self._events.append(Failed(error))
            return
        self._beat("opening", None if self._coordinator.is_coordinator else self._patience_seconds)
        topic = f"open/{self._prepared.request.name}/{self._prepared.assignment.save_id}"
        try:
            reference = self._coordinator.announce(
                topic, lambda: self._make_place(error), deadline_seconds=self._deadline_seconds
            )
        except DeadlineError as silence:
            self._silence = silence
            self._events.append(Failed(SaveError(f"while opening: {silence}", phase="open")))
        except CheckpointError as refusal:
            self._refusal = refusal
            self._events.append(Refused())
        else:
            self._reference = reference
            self._opened = True
            self._events.append(Opened())

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

    def _write(self) -> None:
        prepared = self._prepared
        attributes = {"step": prepared.request.step, "rank": self._coordinator.rank}
        self._phase = "write"
        self._beat("writing the tensors")
        try:
            own = _own_files(prepared, self._reference)
            with self._telemetry.span("save.write", size_bytes=prepared.staged.size_bytes, **attributes):
                report = write_rank(self._storage, prepared, own, self._memory, beat=self._get_on)
            if self._context.reject_non_finite:
                refuse_non_finite(prepared.staged.images, prepared.buffers)
        except Exception as error:  # noqa: BLE001 - the meeting carries it to every rank
            self._events.append(Failed(failed_in("write", error)))
        else:
            late = self._given_up()
            self._events.append(Written(report) if late is None else Failed(late))

    def _meet(self, payload: bytes | BaseException) -> None:
        request, assignment = self._prepared.request, self._prepared.assignment

        def commit(reports: list[bytes]) -> bytes:
            if self._refusal is not None:
                raise self._refusal
            return json.dumps(asdict(self._commit(reports))).encode()  # see `_decoded`

        name = f"save/{request.name}/{assignment.save_id}"
        attributes = {"step": request.step, "rank": self._coordinator.rank}
        self._phase = "commit"
        self._beat("waiting for the other ranks", self._patience_seconds)
        # The error is left for a coordinator that wakes up; to wait for it as long again is no use.
        deadline = self._deadline_seconds if self._silence is None else 0.0
        try:
            with self._telemetry.span("save.commit", **attributes) as details:
                answer = self._coordinator.meet(name, payload, commit, deadline_seconds=deadline)
                info = _decoded(answer)
                details["size_bytes"] = info.size_bytes
        except CheckpointError as error:
            self._fail(error)
        else:
            self._memory.committed()
            self._events.append(Committed(info))

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

    def _fail(self, error: CheckpointError) -> None:
        self._committing = False
        in_doubt = isinstance(error, SaveError | CoordinationError) and error.in_doubt
        if isinstance(error, DivergenceError):
            self._context.diverged()
        if self._coordinator.is_coordinator and self._opened and not in_doubt:
            self._beat("removing what was written")
            self._abandon()
        if isinstance(error, CoordinationError):
            phase = "open" if self._silence else _phase_of(error, "open" if self._refusal else "commit")
            error = self._silence or error
            failed = save_error(self._storage.url, self._prepared.request.step, phase, error)
            failed.__cause__ = error
            self._events.append(Failed(failed))
        else:
            self._events.append(Failed(error))
        _logger.error("%s", error)

    def _abandon(self) -> None:
        working = self._prepared.assignment.working
        try:
            self._terms.check()
        except (OSError, CheckpointError) as error:
            # On an object store the job that owns the root now may be writing under the very same name.
            _logger.warning("what was written to %s/%s is left: %s", self._storage.url, working, error)
        else:
            abandon(self._storage, working)


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
