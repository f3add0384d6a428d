"""All saves of one manager: ownership of the root, back-pressure, staging, and the flight to the commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, SaveError
from ckpt_core.lifecycle._background import Background, within
from ckpt_core.lifecycle._finite import refuse_non_finite_loss
from ckpt_core.lifecycle._flight import Flight
from ckpt_core.lifecycle._guard import StepGuard
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.lifecycle._loadable import LoadNotes
from ckpt_core.lifecycle._memory import WriteMemory
from ckpt_core.lifecycle._ownership import Ownership
from ckpt_core.lifecycle._plans import AgreedPlans
from ckpt_core.lifecycle._prepare import PreparedSave, Workshop, prepare, warm_up
from ckpt_core.lifecycle._prune import Pruner
from ckpt_core.lifecycle._replicas import Judge
from ckpt_core.lifecycle._request import SaveRequest
from ckpt_core.lifecycle._room import Room
from ckpt_core.lifecycle._save import SaveContext, SaveRun
from ckpt_core.lifecycle._stage import Stager
from ckpt_core.lifecycle._throttle import Throttle
from ckpt_core.lifecycle._write import Terms
from ckpt_core.options import CheckpointOptions
from ckpt_core.staging import Arenas
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CapturedState, CheckpointInfo

_logger = logger_of(__name__)


@final
class Saver:
    """Saves one checkpoint after another into one root.

    Attributes:
        ownership: of the root.
        pruner: applies the retention policy; on the coordinator only.

    Concurrency: methods on the main thread; `save` and `own_root` are collective.
    """

    def __init__(
        self, storage: Storage, coordinator: Coordinator, options: CheckpointOptions, telemetry: Telemetry
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._options = options
        self._telemetry = telemetry
        self._workshop = Workshop(
            plans=AgreedPlans(options.on_divergence),
            stager=Stager(Arenas(options.arenas, options.staging_memory_bytes)),
            notes=LoadNotes(allow_pickle=options.allow_pickle),
            overlapped=options.staging == "overlapped",
        )
        self._guard = StepGuard()
        self._asked = ""
        self._entered = threading.Lock()
        self._background = background = Background(options.deadline_seconds)
        self.ownership = Ownership(
            storage, coordinator, job_name=options.job_name, until_idle=background.until_idle
        )
        self._room = Room(storage, options, ownership=self.ownership, telemetry=telemetry)
        self.pruner = Pruner(storage, options, ownership=self.ownership, telemetry=telemetry)
        rate = options.write_bytes_per_second
        self._context = SaveContext(
            storage=storage,
            telemetry=telemetry,
            memory=WriteMemory(pace=None if rate is None else Throttle(rate), algorithm=options.checksum),
            background=background,
            terms=Terms(
                check=self.ownership.check,
                judge=Judge(options.on_divergence),
                sign=options.manifest_signer,
            ),
            make_room=self._room.make,
            reject_non_finite=options.reject_non_finite,
            committed=self._committed,
            diverged=self._workshop.plans.distrust,
        )
        self._flight = Flight(
            coordinator,
            background=background,
            back_pressure=options.back_pressure,
            on_error=options.on_error,
            limit=options.arenas,
        )

    def save(self, request: SaveRequest, capture: Callable[[], CapturedState]) -> SaveHandle | None:
        """Stage now, commit later; None if the policy is to skip it: a save in flight, or an error.

        Raises:
            SaveError: it could not start, or the save before has failed.
            CheckpointError: see `prepare`.
            ConfigError: another thread is saving.
        """
        if not self._entered.acquire(blocking=False):
            raise ConfigError(
                f"step {request.step} was not saved to {self._storage.url}: another thread of this process "
                "is in save() of the same CheckpointManager; call its methods on the thread that trains"
            )
        try:
            return self._save(request, capture)
        finally:
            self._entered.release()

    def _save(self, request: SaveRequest, capture: Callable[[], CapturedState]) -> SaveHandle | None:
        if not self._flight.ready():
            self._telemetry.point("save.skipped", step=request.step, rank=self._coordinator.rank)
            return None
        latest = self._flight.latest
        if latest is not None and not request.replace and self._asked == request.name:
            return latest  # asked for twice: by the cadence, and at the end of the run
        try:
            with self._telemetry.span("save.stall", step=request.step, rank=self._coordinator.rank):
                self.ownership.take()
                prepared = prepare(
                    request,
                    lambda: self._captured(request, capture),
                    storage=self._storage,
                    coordinator=self._coordinator,
                    workshop=self._workshop,
                    ownership=self.ownership,
                )
        except SaveError:
            if self._options.on_error == "raise":
                raise
            _logger.exception("training goes on without the checkpoint of step %d", request.step)
            return None
        self._asked = request.name
        return self._launch(prepared)

    def prewarm(self, capture: Callable[[], CapturedState]) -> int:
        """Plan and make the arenas ahead of the first save; see `warm_up`."""
        self._flight.wait()
        return warm_up(capture, coordinator=self._coordinator, workshop=self._workshop, url=self._storage.url)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the arenas take."""
        return self._workshop.stager.arenas.size_bytes

    def overdue(self) -> bool:
        """Whether a save that had to be left out can be made up for now; see `Flight.overdue`."""
        return self._flight.overdue()

    def wait_staged(self) -> None:
        """Let what this thread does next come after the copies of saves in flight; see `StepGuard.wait`."""
        self._guard.wait()

    def own_root(self) -> None:
        """Wait for the save in flight and claim the root; see `Ownership.take` and `check`."""
        self._flight.wait()
        self.ownership.take()
        self._coordinator.run_on_coordinator(self.ownership.check, what="taking the root")

    def wait(self) -> None:
        """Wait for the saves in flight and deliver a failure; see `Flight.wait`."""
        self._flight.wait()

    def settle(self) -> None:
        """Wait for the saves in flight, whatever becomes of them; see `Flight.settle`."""
        self._flight.settle()

    def rewound(self) -> None:
        """A checkpoint is being loaded: what was saved before it says nothing about steps to come."""
        self._flight.wait()
        self._flight.forget()

    def close(self) -> None:
        """Wait for the save in flight and give the root back; same errors as `wait`."""
        try:
            self._flight.close()
        finally:
            self._guard.close()
            self._workshop.stager.close()
            if self._flight.stuck():
                # Storage may hang for this thread just as well; the lock goes with the process at the latest.
                within(self._options.deadline_seconds, self.ownership.release)
            else:
                self.ownership.release()

    def _launch(self, prepared: PreparedSave) -> SaveHandle:
        request = prepared.request
        handle = SaveHandle(request.step, request.name, prepared.assignment.created)
        deferred = prepared.staged.deferred
        if deferred is not None:
            self._guard.watch(deferred, prepared.optimizers)
        run = SaveRun(prepared, handle, self._context, self._coordinator.commit_channel())
        self._flight.start(handle, run.run, run.give_up)
        return handle

    def _captured(self, request: SaveRequest, capture: Callable[[], CapturedState]) -> CapturedState:
        """The state, if this rank can save it; every rank is told if it cannot."""
        if self._options.reject_non_finite:
            refuse_non_finite_loss(request.metrics)
        if hung := self._flight.stuck():
            raise SaveError(f"a save before this one was given up and still hangs here: {hung}")
        return capture()

    def _committed(self, info: CheckpointInfo) -> None:
        self.ownership.note_committed(info)
        if self._options.verification == "off":
            self.ownership.soundness.vouch(info)
        if self._options.keep is not None:
            self._prune(info)
        try:
            self._room.look_ahead(info)
        except (OSError, CheckpointError) as error:
            _logger.warning("the room left in %s is not known: %s", self._storage.url, error)

    def _prune(self, info: CheckpointInfo) -> None:
        deadline = time.monotonic() + self._options.deadline_seconds / 2

        def go_on() -> bool:
            self._background.beat("verifying what is relied on before older checkpoints are removed")
            return not self._background.waiting and time.monotonic() < deadline

        try:
            self.pruner.apply(newest=info.step, go_on=go_on)
        except (OSError, CheckpointError) as error:
            # The checkpoint is committed all the same; what was not removed is removed after the next commit.
            self._telemetry.point("prune.failed", error=str(error))
            _logger.warning("old checkpoints in %s were not all removed: %s", self._storage.url, error)
