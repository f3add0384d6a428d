"""Copies made while training computes; the next optimizer step waits for them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from ckpt_core.devices import current_stream, has_streams, side_stream
from ckpt_core.errors import CheckpointError
from ckpt_core.staging._copies import Copy, CopyPiece, HostCopies, changes_of, start_thread

GROUP_BYTES: Final = 64 << 20
"""Copies of one group have one event, for which the writer waits.

That is four pieces of the writer, which has three in its hands: two being written, one being prepared. A bus
of 25 GB/s takes 3 ms for it. Larger groups would delay the first write, smaller ones gain nothing.
"""


@final
@dataclass(frozen=True, slots=True)
class _CopyGroups:
    """The copies of one device: the first slot of each group, and the event after it."""

    slots: Sequence[int]
    events: Sequence[torch.Event]


@final
class DeviceCopies:
    """Copies with ascending slots, enqueued after all work that training has enqueued.

    An optimizer step is only *enqueued* after them: the host waits in `wait_for` and `finish` alone.

    Concurrency: construction and `let_pass` on the main thread, the others on any.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.changed: Sequence[str] = ()
        self._changes = changes_of(copies)
        self._guard = threading.Lock()
        self._checked = False
        by_device: dict[torch.device, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        self._groups = {device: _enqueue(device, of_device) for device, of_device in by_device.items()}

    @property
    def done(self) -> bool:
        """Whether every copy has ended; changes from then on are allowed."""
        ended = all(groups.events[-1].query() for groups in self._groups.values())
        if ended:
            self._check()
        return ended

    def let_pass(self) -> None:
        """Order the copies before the next work enqueued on the current streams."""
        self._check()
        for device, groups in self._groups.items():
            current_stream(device).wait_event(groups.events[-1])

    def wait_for(self, slot: int) -> None:
        """Block until the copies into slots 0 to `slot` have ended."""
        for groups in self._groups.values():
            begun = bisect_right(groups.slots, slot)
            if begun:
                groups.events[begun - 1].synchronize()

    def when_done(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, on a thread that may wait for the copies in `finish`."""
        if self.done or not start_thread(listener):
            listener()

    def finish(self) -> None:
        try:
            for groups in self._groups.values():
                groups.events[-1].synchronize()
        finally:
            self._check()

    def _check(self) -> None:
        """Compare versions once: after the copies, but before a step enqueued after them."""
        with self._guard:
            if self._checked:
                return
            self._checked = True
            self.changed = self._changes()
            ended, self._changes = self._changes, changes_of(())
        del ended  # outside the lock: the end of a tensor takes locks of its allocator


def _enqueue(device: torch.device, copies: Sequence[Copy]) -> _CopyGroups:
    side = side_stream(device)
    side.wait_stream(current_stream(device))
    slots: list[int] = []
    events: list[torch.Event] = []
    with side, torch.no_grad():
        for group in _in_groups(copies):
            for copy in group:
                copy.target.copy_(copy.source, non_blocking=True)
                # If training drops the tensor, the allocator must not reuse its memory before the copy.
                copy.source.record_stream(side)
            slots.append(group[0].slot)
            events.append(side.record_event())
    return _CopyGroups(slots, events)


def _in_groups(copies: Sequence[Copy]) -> Generator[Sequence[Copy]]:
    """Yield runs of copies of at least `GROUP_BYTES`, and the rest."""
    begin = size_bytes = 0
    for end, copy in enumerate(copies, start=1):
        size_bytes += copy.source.nbytes
        if size_bytes >= GROUP_BYTES or end == len(copies):
            yield copies[begin:end]
            begin, size_bytes = end, 0


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
