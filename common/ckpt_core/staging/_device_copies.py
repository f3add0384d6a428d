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
    """Enqueued at construction, behind everything that the training has enqueued so far.

    An optimizer step is only *enqueued* behind them: the host never waits, but in `finish`.

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
        """Whether every copy is made."""
        return all(event.query() for event in self._events.values())

    def let_pass(self) -> None:
        """Let what is enqueued next on the current streams come after the copies."""
        self._check()
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Return when every copy is made."""
        try:
            for event in self._events.values():
                event.synchronize()
        finally:
            self._check()

    def _check(self) -> None:
        """Compare versions once: after the copies, but before a step that is enqueued behind them."""
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
            # Should the training drop the tensor, its memory must not be given away before.
            copy.source.record_stream(side)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(side)
    return done


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all saves: the allocator keeps memory apart by stream."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
