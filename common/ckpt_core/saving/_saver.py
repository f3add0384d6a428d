"""All saves of one manager: back-pressure, preparation, and the background run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from ckpt_core.crew import run_with_timeout
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, SaveError
from ckpt_core.root import Job
from ckpt_core.saving._checks import refuse_non_finite_loss
from ckpt_core.saving._handle import SaveHandle, SaveRequest
from ckpt_core.saving._in_flight import InFlightSaves
from ckpt_core.saving._prepare import Preparer
from ckpt_core.saving._save import Means
from ckpt_core.saving._stager import StepGuard
from ckpt_core.state import State
from ckpt_core.types import CapturedState

_logger = logger_of(__name__)


@final
class Saver:
    """The saves of one manager, into one root.

    Attributes:
        in_flight: the saves that have not ended.
        copies: makes optimizer steps wait for copies that are still being made.
        skipped: whether back-pressure left the last save out.
        optimizers: of the last state saved.

    Concurrency: methods on the main thread; `save` and `prewarm` are collective.
    """

    def __init__(
        self,
        job: Job,
        means: Means,
    ) -> None:
        self._job, self._means = job, means
        self._ownership, self._thread, self._options = means.ownership, means.thread, means.options
        self._preparer = Preparer(job.coordinator, means)
        self._asked = ""
        self._warned = False
        self._entered = threading.Lock()
        self.in_flight = InFlightSaves(job.coordinator, means.thread, means.options)
        self.copies = StepGuard()
        self.skipped = False
        self.optimizers: Sequence[Any] = ()

    def save(self, request: SaveRequest, state: State | CapturedState) -> SaveHandle | None:
        """Stage a save now and commit it in the background; None if it is skipped.

        A save is skipped while others are in flight, or after an error, if the options say so.

        Raises:
            SaveError: the save could not start, or the one before has failed.
            CheckpointError: see `Preparer.prepare`.
            ConfigError: another thread is saving.
        """
        if not self._entered.acquire(blocking=False):
            raise ConfigError(
                f"step {request.step} was not saved to {self._job.storage.url}: another thread of this "
                "process is in save() of the same CheckpointManager; call its methods on the thread that "
                "trains"
            )
        rank, telemetry = self._job.coordinator.rank, self._job.telemetry
        try:
            self.skipped = not self.in_flight.ready()
            if self.skipped:
                telemetry.point("save.skipped", step=request.step, rank=rank)
                return None
            latest = self.in_flight.latest
            if latest is not None and not request.replace and self._asked == request.name:
                return latest  # requested twice: by the cadence, and at the end of the run
            with telemetry.span("save.stall", step=request.step, rank=rank):
                self._ownership.take()
                self._warn_of_lost_nodes()
                save = self._preparer.prepare(self._checked(request), state)
            self._asked = request.name
            self.optimizers = save.optimizers
            self.copies.watch(save.staged.deferred, save.optimizers)
            self.in_flight.start(save)
        except SaveError:
            if self._options.on_error == "raise":
                raise
            _logger.exception("training continues without the checkpoint of step %d", request.step)
            return None
        else:
            return save.handle
        finally:
            self._entered.release()

    def prewarm(self, state: State | CapturedState) -> int:
        """Plan and allocate the arenas ahead of the first save; see `Preparer.prewarm`."""
        self.in_flight.wait(together=True)
        return self._preparer.prewarm(state)

    @property
    def idle(self) -> bool:
        """Whether nothing of any save is being done in the background, prunes included."""
        return self._thread.idle

    @property
    def waited_seconds(self) -> float:
        """How long optimizer steps have waited for copies, in all."""
        return self.copies.waited_seconds

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the arenas take."""
        return self._preparer.stager.arenas.size_bytes

    def close(self) -> None:
        """Wait for the saves in flight, and free the arenas; `release` follows.

        Raises:
            SaveError: see `InFlightSaves.wait`.
        """
        try:
            self.in_flight.close()
        finally:
            self.copies.close()
            self._preparer.stager.close()

    def release(self, *, leave: bool = False) -> None:
        """Remove what only uploads had kept, and release the root, after `close`.

        Unless it is to `leave` it, what retention makes weights of is waited for.
        """
        if self.in_flight.stuck():
            # Storage may hang on this thread, too; at the latest, the lock ends with the process.
            run_with_timeout(self._options.deadline_seconds, self._ownership.release)
            return
        means, half = self._means, self._options.deadline_seconds / 2
        if means.pruner.behind and not leave:
            means.apply_retention(None, lambda: True, until=time.monotonic() + half)
        elif means.held_back is not None:
            # A job that ends may have little time: of a large checkpoint at most a part is read back for it.
            means.apply_retention(means.held_back, lambda: False)
        self._ownership.release()

    def _checked(self, request: SaveRequest) -> SaveRequest:
        """Return the request, with this rank's refusal, if any, which every rank learns."""
        if request.refusal is not None:
            return request
        try:
            if self._options.reject_non_finite:
                refuse_non_finite_loss(request.metrics)
            if hung := self.in_flight.stuck():
                raise SaveError(f"a save before this one was given up and still hangs here: {hung}")
        except CheckpointError as error:
            return replace(request, refusal=error)
        return request

    def _warn_of_lost_nodes(self) -> None:
        """Warn once, on the coordinator, if a lost node takes all checkpoints with it."""
        options, disks = self._options, self._job.storage.num_disks
        survives = options.uploads or options.replicas > 1
        if self._warned or disks == 1 or survives or not self._job.coordinator.is_coordinator:
            return
        self._warned = True
        _logger.warning(
            "%s is on a disk of its own on each of %d nodes, and every checkpoint is spread over all of "
            "them: when one node is lost, no checkpoint there can be loaded any more. Give upload= a place "
            "that outlives the nodes, or replicas=2 against the loss of one, or a root that all nodes share",
            self._job.storage.url,
            disks,
        )
