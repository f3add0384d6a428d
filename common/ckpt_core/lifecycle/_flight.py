"""The saves in flight: one after another on one background thread, their outcomes never lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import SaveError
from ckpt_core.lifecycle._background import Background, Run
from ckpt_core.lifecycle._handle import SaveHandle, reject
from ckpt_core.options import BackPressure, OnError

_logger = logger_of(__name__)


@final
class Flight:
    """Runs saves in the order in which they were started and delivers each failure to the main thread, once.

    Up to `limit` saves are in flight, as many as there are arenas. One that has ended counts until its
    outcome is delivered, which happens at the same calls on every rank.

    A save whose thread does not get on for longer than the deadline has failed; see `Background`. So nothing
    here waits without end.

    Concurrency: all methods on the main thread; `ready` and `overdue` are collective.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        background: Background,
        back_pressure: BackPressure,
        on_error: OnError,
        limit: int = 1,
    ) -> None:
        self._coordinator = coordinator
        self._back_pressure = back_pressure
        self._on_error = on_error
        self._limit = limit
        self._background = background
        self._undelivered: deque[SaveHandle] = deque()
        self._run: Run | None = None
        self._pending = self._closed = False
        self.latest: SaveHandle | None = None
        """The last save started, unless it is known to have failed."""

    def ready(self) -> bool:
        """Whether a new save may start; waits for the oldest in flight unless the policy is to skip.

        Raises:
            SaveError: the oldest save has failed, and errors are to be raised.
        """
        if self._back_pressure != "wait" and self._full():
            self._pending = self._back_pressure == "coalesce"
            return False
        # How many there are is the same on every rank, so that all of them raise at the same call.
        while len(self._undelivered) >= self._limit:
            self._deliver()
        return True

    def overdue(self) -> bool:
        """Whether a save that back-pressure kept from starting can be made up for now.

        Communicates only while there is one.
        """
        return self._pending and not self._full()

    def start(self, handle: SaveHandle, run: Callable[[], None], give_up: Callable[[str], None]) -> None:
        """Run a save in the background.

        Args:
            handle: of the save.
            run: resolves the handle.
            give_up: resolves it, if it is not yet, when the save hangs; see `Background.submit`.
        """
        if self._closed:
            raise RuntimeError("cannot start a save after shutdown")
        self.latest = handle
        self._undelivered.append(handle)
        self._pending = False

        def work() -> None:
            try:
                run()
            except BaseException as error:  # whoever waits for the save is told
                if not reject(handle.committed, error):
                    _logger.exception("after the commit of step %d: %s", handle.step, error)  # noqa: TRY401

        self._run = self._background.submit(work, give_up)

    def stuck(self) -> str:
        """In what a save hangs that has been given up; "" if none does."""
        return self._background.stuck()

    def wait(self) -> None:
        """Wait for every save in flight, and for the prune behind it, and deliver the first failure.

        Raises:
            SaveError: one failed, and errors are to be raised. Failures behind it come with the next call.
        """
        if self._run is not None:
            self._run.over.wait()
        while self._undelivered:
            self._deliver()

    def settle(self) -> None:
        """Wait for every save in flight, for one follows that must be made; failures are only logged."""
        if self._run is not None:
            self._run.over.wait()
        while self._undelivered:
            try:
                self._deliver()
            except SaveError as error:
                _logger.error("%s", error)  # noqa: TRY400 - the next save makes up for it

    def forget(self) -> None:
        """The training has moved to another step: a save of a name seen before is not the same save again."""
        self.latest = None
        self._pending = False

    def close(self) -> None:
        """Wait for every save in flight and stop the thread; same errors as `wait`, later ones logged."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._background.close()
            for handle in self._undelivered:
                _log_failure(handle)
            self._undelivered.clear()

    def _full(self) -> bool:
        """Whether every arena is in flight on some rank; ranks finish at different moments."""
        flying = sum(not handle.done() for handle in self._undelivered)
        full = self._coordinator.all_reduce_max([int(flying >= self._limit)], what="deciding whether to save")
        return bool(full[0])

    def _deliver(self) -> None:
        """Wait for the oldest save and tell what became of it."""
        handle = self._undelivered[0]
        error = handle.committed.exception()
        self._undelivered.popleft()
        if error is None:
            return
        if self.latest is handle:
            self.latest = None  # a save of the same name from now on is another try
        # Only a save that failed may be lived with: that the root belongs to another job may not.
        if self._on_error == "raise" or not isinstance(error, SaveError):
            raise error
        _log_failure(handle)


def _log_failure(handle: SaveHandle) -> None:
    error = handle.committed.exception()
    if error is not None:
        _logger.error("training goes on without the checkpoint of step %d: %s", handle.step, error)
