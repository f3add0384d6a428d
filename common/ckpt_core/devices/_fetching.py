"""The second pass of a load into tensors on devices, in two stages.

A reading thread fills a pinned buffer from storage, and enqueues the copies from there to the device; the
next buffer is filled meanwhile. Verification is over by then, or looks at the bytes in the buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ckpt_core.devices._streams import current_stream, side_stream
from ckpt_core.reading import REQUEST_BYTES, Buffers

MOST_BUFFERS: Final = 16
"""One for each thread that reads from a network; four for each that reads from a local disk."""


@final
@dataclass(eq=False, slots=True)
class _PinnedBuffer:
    """Memory from which a device reads until all of `events` have ended."""

    memory: memoryview
    events: list[torch.Event] = field(default_factory=list[torch.Event])


@final
class DeviceFetch:
    """Pinned buffers for the reading threads, and copies from them to devices.

    At most `MOST_BUFFERS` of `REQUEST_BYTES` are pinned: 64 MiB. A buffer is lent again only after the copies
    from it have ended. The copies are enqueued behind all work of the streams that are current on the thread
    that makes this object, on the side streams of the devices.

    Concurrency: `lend` and `place` on any thread; `finish` when no buffer is lent.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._streams: dict[torch.device, torch.Stream] = {device: side_stream(device) for device in devices}
        for device, side in self._streams.items():
            side.wait_stream(current_stream(device))
        self._turns = threading.BoundedSemaphore(MOST_BUFFERS)
        self._guard = threading.Lock()
        self._idle: deque[_PinnedBuffer] = deque()
        self._made = 0
        self._pageable = Buffers()

    @contextmanager
    def lend(self, offset: int, size_bytes: int) -> Generator[memoryview]:
        """Lend memory for bytes of a file, until the copies from it are enqueued."""
        if size_bytes > REQUEST_BYTES:
            # Rare: the blocks of the file are larger than any that a save writes.
            with self._pageable.lend(offset, size_bytes) as memory:
                try:
                    yield memory
                finally:
                    self.finish()
            return
        with self._turns:
            buffer = self._take()
            for event in buffer.events:
                event.synchronize()
            try:
                yield buffer.memory[:size_bytes]
            finally:
                buffer.events = [stream.record_event() for stream in self._streams.values()]
                self._idle.append(buffer)

    def place(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._streams.get(target.device)
        if stream is None:
            target.copy_(source)
            return
        # Of anything else torch makes a copy in host memory first, which is not ours to keep.
        plain = source.dtype == target.dtype and source.is_contiguous()
        with stream:
            target.copy_(source, non_blocking=plain)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _take(self) -> _PinnedBuffer:
        """Return the buffer that has been idle longest, or a new one instead of waiting."""
        with self._guard:
            oldest = self._idle[0] if self._idle else None
            if oldest is None or (
                self._made < MOST_BUFFERS and not all(event.query() for event in oldest.events)
            ):
                self._made += 1
                return _PinnedBuffer(_pinned(REQUEST_BYTES))
            return self._idle.popleft()


def _pinned(size_bytes: int) -> memoryview:
    # Of a power of two, to which torch rounds up.
    array: Any = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(array)


@contextmanager
def fetch_to(devices: Collection[torch.device]) -> Generator[DeviceFetch | None]:
    """Yield a fetch into tensors on devices, ended at the exit; None without devices."""
    if not devices:
        yield None
        return
    fetch = DeviceFetch(devices)
    try:
        yield fetch
    finally:
        # After an error, too: no copy may reach live memory after the return.
        fetch.finish()
