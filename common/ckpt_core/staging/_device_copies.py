"""Copies of device tensors on a side stream, before the next step of the training."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from ckpt_core.devices import current_stream, side_stream
from ckpt_core.staging._copies import Copy, Versions
from ckpt_core.staging._host_copies import start_thread

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
        self._versions = Versions(copies)
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
        """Block until every copy has ended."""
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
            self.changed = self._versions.changed()
            ended, self._versions = self._versions, Versions(())
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
