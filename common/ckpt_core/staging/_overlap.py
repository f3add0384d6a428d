"""Copies that go on while the training computes, and that the next optimizer step waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from ckpt_core.errors import CheckpointError
from ckpt_core.staging._copies import Copy
from ckpt_core.staging._device_copies import DeviceCopies
from ckpt_core.staging._host_copies import HostCopies


@final
class DeferredCopies:
    """Copies of tensors that change only in an optimizer step.

    Who calls what: 1. (main thread) construct, at the moment of the save; the copies begin. 2. (background
    thread) `wait_for`, to write what is copied while the rest still is; `finish` before any of it counts.
    3. (main thread) `wait`, from a step pre-hook of every optimizer that changes the tensors; on the host it
    takes its share of what is left to copy.

    Tensors' version counters tell whether something else has changed a source while it was being copied;
    `finish` then fails, so that a mixture of two moments never becomes a checkpoint. Changes that bypass the
    counter (`tensor.data`) cannot be seen: call `wait` before such a change.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        # First those that return at once.
        self._device = DeviceCopies([copy for copy in copies if copy.source.is_cuda])
        self._host = HostCopies([copy for copy in copies if not copy.source.is_cuda])

    @property
    def done(self) -> bool:
        """Whether nothing is copied any more."""
        return self._host.done and self._device.done

    def wait_for(self, slot: int) -> None:
        """Return when every slot up to this one is filled; if something went wrong, only `finish` tells."""
        self._device.finish()
        self._host.wait_for(slot)

    def when_done(self, tell: Callable[[BaseException | None], None]) -> None:
        """Call `tell` once when nothing is copied any more, with what `finish` would raise.

        Background thread; `tell` may be called on any.
        """
        try:
            self._device.finish()
        finally:
            self._host.when_done(lambda: tell(self.settle()))

    def settle(self) -> BaseException | None:
        """Return when nothing is copied any more, with what `finish` would raise."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - for whoever is told
            return error
        return None

    def finish(self) -> None:
        """Return when every copy is made.

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
        """Let what the calling thread does next come after the copies; never raises what made one fail."""
        self._host.help()
        self._device.let_pass()
