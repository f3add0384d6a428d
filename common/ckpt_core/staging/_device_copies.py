"""Copies of CUDA tensors on a side stream, which the training's stream waits for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, final

import torch

from ckpt_core.staging._copies import Copy, Versions


@final
class DeviceCopies:
    """Copies enqueued on construction, after all work enqueued by training so far.

    An optimizer step is only *enqueued* after them: the host waits in `finish` alone.

    Concurrency: construction and `let_pass` on the main thread, `finish` on any.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.changed: Sequence[str] = ()
        self._versions = Versions(copies)
        self._guard = threading.Lock()
        self._checked = False
        self._events: dict[torch.device, Any] = {}
        for device in {copy.source.device for copy in copies}:
            self._events[device] = _enqueue(device, [each for each in copies if each.source.device == device])

    @property
    def done(self) -> bool:
        """Whether every copy has ended."""
        return all(event.query() for event in self._events.values())

    def let_pass(self) -> None:
        """Order the copies before the next work enqueued on the current streams."""
        self._check()
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Block until every copy has ended."""
        try:
            for event in self._events.values():
                event.synchronize()
        finally:
            self._check()

    def _check(self) -> None:
        """Compare versions once: after the copies, but before a step enqueued after them."""
        with self._guard:
            if not self._checked:
                self._checked = True
                self.changed = self._versions.changed()
                self._versions = Versions(())


def _enqueue(device: torch.device, copies: Sequence[Copy]) -> Any:
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for copy in copies:
            copy.target.copy_(copy.source, non_blocking=True)
            # If training drops the tensor, the allocator must not reuse its memory before the copy.
            copy.source.record_stream(side)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(side)
    return done


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """Return the one stream for all saves: the allocator separates memory by stream."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
