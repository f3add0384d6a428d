"""Executes the commands of the save reducer on the background thread."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import assert_never, final

from ckpt_core.commit import abandon, begin
from ckpt_core.coordination import Coordinator, failure_text
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, SaveError
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.lifecycle._memory import WriteMemory
from ckpt_core.lifecycle._plans import Keeping
from ckpt_core.lifecycle._prepare import PreparedSave, save_error
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
from ckpt_core.lifecycle._write import commit_all, write_rank
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo

_logger = logging.getLogger(__name__)
_VERBS = {"stage": "staging", "open": "opening", "write": "writing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContext:
    """What all saves of a manager have in common.

    Attributes:
        storage: where checkpoints go.
        coordinator: the ranks of the job.
        telemetry: receives spans.
        memory: what writing keeps from save to save.
        deadline_seconds: how long ranks wait for one another.
        check: called on the coordinator before anything is written, and before the commit; raises to refuse.
        make_room: called on the coordinator before anything is written; raises if the save does not fit.
        committed: called on the coordinator after the commit.
    """

    storage: Storage
    coordinator: Coordinator
    telemetry: Telemetry
    memory: WriteMemory
    deadline_seconds: float
    check: Callable[[], None]
    make_room: Callable[[PreparedSave], None]
    committed: Callable[[CheckpointInfo], None]


@final
class SaveRun:
    """One save on one rank, from staged to committed.

    Concurrency: `run` is called once, on a background thread; it uses no collective.
    """

    def __init__(self, prepared: PreparedSave, handle: SaveHandle, context: SaveContext) -> None:
        self._prepared = prepared
        self._handle = handle
        self._storage = context.storage
        self._coordinator = context.coordinator
        self._telemetry = context.telemetry
        self._memory = context.memory
        self._context = context
        self._events: deque[Event] = deque()
        self._refusal: CheckpointError | None = None
        self._opened = False
        self._reference = b""

    def run(self) -> None:
        """Go through with the save; its outcome goes to the handle, nothing is raised."""
        self._events.append(self._staged())
        phase = Phase.PLANNED
        while self._events:
            phase, commands = reduce(phase, self._events.popleft())
            for command in commands:
                self._execute(command)

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
                    self._context.committed(info)
            case _:
                assert_never(command)

    def _tell(self, verdict: Fulfil | Reject) -> None:
        if isinstance(verdict, Fulfil):
            self._handle.committed.set_result(verdict.info)
        else:
            self._handle.committed.set_exception(verdict.error)

    def _staged(self) -> Event:
        error, deferred = self._prepared.error, self._prepared.staged.deferred
        if deferred is None or error is not None:
            self._tell_staged(error)
            return Staged() if error is None else Failed(error)
        try:
            # Writing begins while the rest is being copied, and tells in the end whether all of it was.
            deferred.when_done(self._tell_staged)
        except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
            return Failed(SaveError(f"while staging: {type(caught).__name__}: {caught}"))
        return Staged()

    def _tell_staged(self, error: BaseException | None) -> None:
        if error is None:
            self._handle.staged.set_result(None)
        elif isinstance(error, SaveError):
            self._handle.staged.set_exception(error)
        else:
            told = SaveError(f"while staging: {type(error).__name__}: {error}")
            told.__cause__ = error
            self._handle.staged.set_exception(told)

    def _open(self, error: BaseException | None) -> None:
        if error is not None and not self._coordinator.is_coordinator:
            self._events.append(Failed(error))
            return
        topic = f"open/{self._prepared.request.name}/{self._prepared.assignment.save_id}"
        try:
            reference = self._coordinator.announce(
                topic, lambda: self._make_place(error), deadline_seconds=self._context.deadline_seconds
            )
        except DeadlineError as silence:
            self._events.append(Failed(SaveError(f"while opening: {silence}")))
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
            text = failure_text(error)
            raise CoordinationError(f"rank 0: {text}", failures={0: text}) from error
        request, assignment = self._prepared.request, self._prepared.assignment
        self._context.check()
        self._context.make_room(self._prepared)
        begin(self._storage, request.name, assignment.save_id, replace=request.replace)
        return self._prepared.local.digests()

    def _write(self) -> None:
        prepared = self._prepared
        attributes = {"step": prepared.request.step, "rank": self._coordinator.rank}
        try:
            with self._telemetry.span("save.write", size_bytes=prepared.staged.size_bytes, **attributes):
                report = write_rank(self._storage, prepared, self._own_files(), self._memory)
        except SaveError as error:
            self._events.append(Failed(error))
        except Exception as error:  # noqa: BLE001 - the meeting carries it to every rank
            self._events.append(Failed(SaveError(f"while writing: {type(error).__name__}: {error}")))
        else:
            self._events.append(Written(report))

    def _own_files(self) -> Mapping[str, bytes]:
        """This rank's small files, with those of its values that the checkpoint would not give it back."""
        prepared, rank = self._prepared, self._coordinator.rank
        local = prepared.local
        match prepared.keeping:
            case Keeping.NEVER:
                return prepared.files
            case Keeping.ALWAYS:
                return {**prepared.files, **local.encode(rank)}
            case Keeping.IF_DIFFERENT:
                return {**prepared.files, **local.encode(rank, local.differing(self._reference))}

    def _meet(self, payload: bytes | BaseException) -> None:
        request, assignment = self._prepared.request, self._prepared.assignment

        def commit(reports: list[bytes]) -> bytes:
            if self._refusal is not None:
                raise self._refusal
            self._context.check()
            info = commit_all(self._storage, self._prepared, reports, self._memory)
            return json.dumps(asdict(info)).encode()

        name = f"save/{request.name}/{assignment.save_id}"
        attributes = {"step": request.step, "rank": self._coordinator.rank}
        try:
            with self._telemetry.span("save.commit", **attributes) as details:
                answer = self._coordinator.meet(
                    name, payload, commit, deadline_seconds=self._context.deadline_seconds
                )
                info = CheckpointInfo(**json.loads(answer))
                details["size_bytes"] = info.size_bytes
        except CheckpointError as error:
            self._fail(error)
        else:
            self._memory.committed()
            self._events.append(Committed(info))

    def _fail(self, error: CheckpointError) -> None:
        if self._coordinator.is_coordinator and self._opened:
            self._abandon()
        if isinstance(error, CoordinationError):
            phase = _phase_of(error)
            failed = save_error(self._storage.url, self._prepared.request.step, phase, error)
            failed.__cause__ = error
            self._events.append(Failed(failed))
        else:
            self._events.append(Failed(error))
        _logger.error("%s", error)

    def _abandon(self) -> None:
        working = self._prepared.assignment.working
        try:
            self._context.check()
        except (OSError, CheckpointError) as error:
            # On an object store the job that owns the root now may be writing under the very same name.
            _logger.warning("what was written to %s/%s is left: %s", self._storage.url, working, error)
        else:
            abandon(self._storage, working)


def _phase_of(error: CoordinationError) -> str:
    """Only the text of an error travels between ranks; it begins with what the rank was doing."""
    told = " ".join(error.failures.values())
    return next((phase for phase, verb in _VERBS.items() if f"while {verb}" in told), "commit")
