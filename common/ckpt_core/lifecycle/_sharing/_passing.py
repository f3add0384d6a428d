"""Pass 2 of what is shared: owners read their buckets, and every member gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, final

import torch

from ckpt_core.coordination import Coordinator
from ckpt_core.errors import CoordinationError, failure_text
from ckpt_core.lifecycle._sharing._schedule import Bucket, Schedule
from ckpt_core.lifecycle._sharing._units import Cell

Read: TypeAlias = Callable[[Sequence[tuple[Cell, memoryview]]], None]
"""Fills each memory with its cell, which is exactly as long; called on a thread of its own."""

Deliver: TypeAlias = Callable[[Cell, memoryview], None]
"""Takes what it needs of a cell; the memory is valid during the call only. Called on the calling thread."""

_FOOTER_BYTES: Final = 256
_OK: Final = 1
_FAILED: Final = 2


def relay_shared(schedule: Schedule, coordinator: Coordinator, *, read: Read, deliver: Deliver) -> None:
    """Read what this rank owns, pass it on, and deliver every shared cell that this rank needs, exactly once.

    Main thread only, on every rank, with schedules whose consistencies add up to 0. Besides what `read` and
    `deliver` take, it needs three buffers as large as the largest buckets. A rank that cannot read goes on
    passing buckets that say so, and all others go on, so that nobody waits for what never comes; whoever is
    concerned raises at the end.

    Raises:
        CoordinationError: an owner could not read (`failures` says which and why), or a rank was lost.
        Exception: whatever `read` or `deliver` raised on this rank.
    """
    inbox = _buffer(bucket for bucket in schedule.buckets if bucket.owner != schedule.rank)
    arrivals = _Arrivals(deliver)
    with _ReadAhead(schedule.own_buckets(), read) as ahead:
        for bucket in schedule.buckets:
            own = bucket.owner == schedule.rank
            buffer = ahead.next() if own else inbox[: bucket.num_bytes + _FOOTER_BYTES]
            coordinator.broadcast_tensor(buffer, bucket.route())
            arrivals.take(bucket, buffer)
    error = ahead.error or arrivals.error
    if error is not None:
        raise error
    if arrivals.failures:
        what = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(arrivals.failures.items()))
        raise CoordinationError(
            f"rank {schedule.rank}: what other ranks were to read for it did not come: {what}",
            failures=arrivals.failures,
        )


def _buffer(buckets: Any) -> torch.Tensor:
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    return torch.empty(largest + _FOOTER_BYTES, dtype=torch.uint8)


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # numpy 1 does not say that it is a buffer
    return memoryview(array)


@final
class _Arrivals:
    """Delivers what has arrived, and remembers what went wrong."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self.error: Exception | None = None
        self.failures: dict[int, str] = {}

    def take(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        memory = _memory(buffer)
        failure = _read_footer(memory[bucket.num_bytes :])
        if failure is not None:
            self.failures.setdefault(bucket.owner, failure)
        if self.failures or self.error is not None:
            return
        try:
            for cell, start, stop in bucket.places():
                self._deliver(cell, memory[start:stop])
        except Exception as error:  # noqa: BLE001 - raised at the end; the others must not be left waiting
            self.error = error


@final
class _ReadAhead:
    """Reads this rank's buckets on a thread of its own, one ahead of the one that is being passed on."""

    def __init__(self, buckets: Sequence[Bucket], read: Read) -> None:
        self._buckets = buckets
        self._read = read
        self._buffers = [_buffer(buckets), _buffer(buckets[1:])] if buckets else []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-read-ahead")
        self._started = 0
        self._reading: Future[torch.Tensor]
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def next(self) -> torch.Tensor:
        """The next bucket of this rank, with its footer; valid until the next call."""
        read = self._reading.result()
        self._start()
        return read

    def _start(self) -> None:
        if self._started < len(self._buckets):
            bucket, buffer = self._buckets[self._started], self._buffers[self._started % 2]
            self._reading = self._thread.submit(self._fill, bucket, buffer)
            self._started += 1

    def _fill(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        buffer = buffer[: bucket.num_bytes + _FOOTER_BYTES]
        memory = _memory(buffer)
        if self.error is None:
            try:
                self._read([(cell, memory[start:stop]) for cell, start, stop in bucket.places()])
            except Exception as error:  # noqa: BLE001 - told to all members by the footer, raised at the end
                self.error = error
        _write_footer(memory[bucket.num_bytes :], self.error)
        return buffer


def _write_footer(footer: memoryview, error: Exception | None) -> None:
    text = b"" if error is None else failure_text(error).encode(errors="replace")[: _FOOTER_BYTES - 1]
    footer[:] = bytes([_OK if error is None else _FAILED]) + text.ljust(_FOOTER_BYTES - 1, b"\0")


def _read_footer(footer: memoryview) -> str | None:
    """What the owner says went wrong, or None."""
    if footer[0] == _OK:
        return None
    return bytes(footer[1:]).rstrip(b"\0").decode(errors="ignore")
