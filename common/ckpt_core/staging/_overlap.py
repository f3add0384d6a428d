"""Copies made while training computes; the next optimizer step waits for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import final

from ckpt_core.devices import has_streams
from ckpt_core.errors import CheckpointError
from ckpt_core.staging._copies import Copy, CopyPiece
from ckpt_core.staging._device_copies import DeviceCopies
from ckpt_core.staging._host_copies import HostCopies


@final
class DeferredCopies:
    """Copies of tensors that change only in an optimizer step.

    Order of calls: 1. (main thread) construct, at the moment of the save; the copies begin. 2. (background
    thread) `wait_for`, to write filled slots while others are being copied; `finish` before the commit.
    3. (main thread) `wait`, from a step pre-hook of every optimizer that changes the tensors; on the host it
    takes part in the remaining copies.

    Tensors' version counters show whether other code has changed a source during its copy; `finish` then
    fails, so that a mixture of two moments never becomes a checkpoint. Changes that bypass the counter
    (`tensor.data`) are not detected: call `wait` before such a change. `priority` is that of the copying
    thread.
    """

    def __init__(
        self, copies: Sequence[Copy], pieces: Generator[CopyPiece] | None = None, *, priority: int = 0
    ) -> None:
        """Begin copies, or prepare `pieces`, which `wait` makes, and nobody else."""
        # First those that are only enqueued.
        self._device = DeviceCopies([copy for copy in copies if has_streams(copy.source)])
        own = [copy for copy in copies if not has_streams(copy.source)]
        self._host = HostCopies(own, pieces, priority=priority)

    @property
    def done(self) -> bool:
        """Whether the copies have ended."""
        return self._host.done and self._device.done

    def wait_for(self, slot: int) -> None:
        """Block until slots 0 to `slot` are filled; errors are raised by `finish` alone."""
        self._device.wait_for(slot)
        self._host.wait_for(slot)

    def when_done(self, listener: Callable[[BaseException | None], None]) -> None:
        """Call `listener` once the copies have ended, with the error of `finish` or None.

        Any thread; `listener` may be called on another.
        """
        self._device.when_done(lambda: self._host.when_done(lambda: listener(self.settle())))

    def settle(self) -> BaseException | None:
        """Block until the copies have ended; return the error of `finish` or None.

        An interruption of a thread that copied is such an error: only that thread itself is interrupted.
        """
        try:
            self.finish()
        except BaseException as error:
            if isinstance(error, Exception) or self.done:
                return error
            raise
        return None

    def finish(self) -> None:
        """Block until every copy is made.

        Raises:
            CheckpointError: a source was changed meanwhile, other than by a step that waited.
        """
        try:
            self._host.finish()
        finally:
            self._device.finish()
        changed = [*self._host.changed, *self._device.changed]
        if changed:
            raise CheckpointError(
                f"{len(changed)} tensor(s) changed while they were being copied, first {changed[0]}, and not "
                "in a step of the optimizers given: call wait_staged() of the manager before changing "
                "weights by other means, or use staging='blocking'"
            )

    def wait(self) -> None:
        """Order the copies before this thread's next work; errors are raised by `finish`."""
        self._host.help()
        self._device.let_pass()
