"""Executes the commands of the save reducer on the background thread."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import assert_never, final

from ckpt_core.commit import abandon
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import CheckpointError, CoordinationError, SaveError
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.lifecycle._memory import WriteMemory
from ckpt_core.lifecycle._prepare import PreparedSave, save_error
from ckpt_core.lifecycle._reducer import (
    Command,
    Committed,
    Event,
    Failed,
    Fulfil,
    Meet,
    Phase,
    Prune,
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
_VERBS = {"stage": "staging", "write": "writing"}


@final
class SaveRun:
    """One save on one rank, from staged to committed.

    Concurrency: `run` is called once, on a background thread; it uses no collective.
    """

    def __init__(  # noqa: PLR0913 - one of each thing that a save needs
        self,
        prepared: PreparedSave,
        handle: SaveHandle,
        *,
        storage: Storage,
        coordinator: Coordinator,
        telemetry: Telemetry,
        memory: WriteMemory,
        deadline_seconds: float,
    ) -> None:
        self._prepared = prepared
        self._handle = handle
        self._storage = storage
        self._coordinator = coordinator
        self._telemetry = telemetry
        self._memory = memory
        self._deadline_seconds = deadline_seconds
        self._events: deque[Event] = deque()

    def run(self, *, check: Callable[[], None], prune: Callable[[], None]) -> None:
        """Go through with the save; its outcome goes to the handle, nothing is raised.

        Args:
            check: called on the coordinator right before the commit; raises to refuse it.
            prune: called on the coordinator after the commit.
        """
        self._events.append(self._staged())
        phase = Phase.PLANNED
        while self._events:
            phase, commands = reduce(phase, self._events.popleft())
            for command in commands:
                self._execute(command, check, prune)

    def _execute(self, command: Command, check: Callable[[], None], prune: Callable[[], None]) -> None:
        match command:
            case Write():
                self._write()
            case Meet(payload):
                self._meet(payload, check)
            case Release():
                self._prepared.staged.release()
            case Fulfil(info):
                self._handle.committed.set_result(info)
            case Reject(error):
                self._handle.committed.set_exception(error)
            case Prune():
                if self._coordinator.is_coordinator:
                    prune()
            case _:
                assert_never(command)

    def _staged(self) -> Event:
        error, deferred = self._prepared.error, self._prepared.staged.deferred
        if error is None and deferred is not None:
            step, rank = self._prepared.request.step, self._coordinator.rank
            try:
                with self._telemetry.span("save.copy", step=step, rank=rank):
                    deferred.finish()
            except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
                error = SaveError(f"while staging: {type(caught).__name__}: {caught}")
        if error is not None:
            self._handle.staged.set_exception(error)
            return Failed(error)
        self._handle.staged.set_result(None)
        return Staged()

    def _write(self) -> None:
        prepared = self._prepared
        attributes = {"step": prepared.request.step, "rank": self._coordinator.rank}
        try:
            with self._telemetry.span("save.write", size_bytes=prepared.staged.size_bytes, **attributes):
                report = write_rank(self._storage, prepared, self._coordinator.rank, self._memory)
        except Exception as error:  # noqa: BLE001 - the meeting carries it to every rank
            self._events.append(Failed(SaveError(f"while writing: {type(error).__name__}: {error}")))
        else:
            self._events.append(Written(report))

    def _meet(self, payload: bytes | BaseException, check: Callable[[], None]) -> None:
        request, assignment = self._prepared.request, self._prepared.assignment

        def commit(reports: list[bytes]) -> bytes:
            check()
            info = commit_all(self._storage, self._prepared, reports, self._memory)
            return json.dumps(asdict(info)).encode()

        name = f"save/{request.name}/{assignment.save_id}"
        attributes = {"step": request.step, "rank": self._coordinator.rank}
        try:
            with self._telemetry.span("save.commit", **attributes) as details:
                answer = self._coordinator.meet(
                    name, payload, commit, deadline_seconds=self._deadline_seconds
                )
                info = CheckpointInfo(**json.loads(answer))
                details["size_bytes"] = info.size_bytes
        except CheckpointError as error:
            self._fail(error, check)
        else:
            self._memory.committed()
            self._events.append(Committed(info))

    def _fail(self, error: CheckpointError, check: Callable[[], None]) -> None:
        if self._coordinator.is_coordinator:
            self._abandon(check)
        if isinstance(error, CoordinationError):
            phase = _phase_of(error)
            failed = save_error(self._storage.url, self._prepared.request.step, phase, error)
            failed.__cause__ = error
            self._events.append(Failed(failed))
        else:
            self._events.append(Failed(error))
        _logger.error("%s", error)

    def _abandon(self, check: Callable[[], None]) -> None:
        working = self._prepared.assignment.working
        try:
            check()
        except (OSError, CheckpointError) as error:
            # On an object store the job that owns the root now may be writing under the very same name.
            _logger.warning("what was written to %s/%s is left: %s", self._storage.url, working, error)
        else:
            abandon(self._storage, working)


def _phase_of(error: CoordinationError) -> str:
    """Only the text of an error travels between ranks; it begins with what the rank was doing."""
    told = " ".join(error.failures.values())
    return next((phase for phase, verb in _VERBS.items() if f"while {verb}" in told), "commit")
