"""The save in flight: one at a time, on one background thread, its outcome never lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.options import BackPressure, OnError

_logger = logging.getLogger(__name__)


@final
class Flight:
    """Runs saves one after another and delivers their failures to the main thread, once.

    Concurrency: all methods on the main thread; `ready` is collective.
    """

    def __init__(self, coordinator: Coordinator, *, back_pressure: BackPressure, on_error: OnError) -> None:
        self._coordinator = coordinator
        self._back_pressure = back_pressure
        self._on_error = on_error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._undelivered: SaveHandle | None = None
        self._run: Future[None] | None = None
        self.latest: SaveHandle | None = None
        """The last save started, unless it is known to have failed."""

    def ready(self) -> bool:
        """Whether a new save may start; waits for the one in flight unless the policy is to skip.

        Raises:
            SaveError: the save before failed, and errors are to be raised.
        """
        if self._back_pressure == "skip":
            flying = int(self._undelivered is not None and not self._undelivered.done())
            # Ranks finish at different moments, but they must all skip or all save.
            if self._coordinator.combine([flying])[0]:
                return False
        self._deliver()
        return True

    def start(self, handle: SaveHandle, run: Callable[[], None]) -> None:
        """Run a save in the background; it resolves `handle`."""
        self.latest = self._undelivered = handle

        def ended(future: Future[None]) -> None:
            error = future.exception()
            if error is None:
                return
            if handle.done():
                _logger.error("after the commit of step %d: %s", handle.step, error, exc_info=error)
            else:
                handle.committed.set_exception(error)

        self._run = self._pool.submit(run)
        self._run.add_done_callback(ended)

    def wait(self) -> None:
        """Wait for the save in flight, and for the prune behind it, and deliver its failure.

        Raises:
            SaveError: it failed, and errors are to be raised.
        """
        if self._run is not None:
            futures.wait((self._run,))
        self._deliver()

    def _deliver(self) -> None:
        handle = self._undelivered
        if handle is None:
            return
        error = handle.committed.exception()
        self._undelivered = None
        if error is None:
            return
        self.latest = None  # a save of the same name from now on is another try
        if self._on_error == "raise":
            raise error
        _logger.error("training goes on without the checkpoint of step %d: %s", handle.step, error)

    def forget(self) -> None:
        """The training has moved to another step: a save of a name seen before is not the same save again."""
        self.latest = None

    def close(self) -> None:
        """Wait for the save in flight and stop the thread; same errors as `wait`."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=True)
