"""Arenas: host memory for images of a rank's data files, from copy to write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import torch

from ckpt_core.errors import CheckpointError, StagingMemoryError
from ckpt_core.staging._available import FreeMemory, free_memory
from ckpt_core.staging._host_pages import HostMemory

_MIB = 1 << 20


@final
class Arena:
    """The right to use one arena's memory until `release`.

    Concurrency: `release` on any thread, any number of times; the others on the thread that reserved it.

    Attributes:
        memory: uint8, one-dimensional, of the requested size, on a page boundary. It still has the content
            of its last use.
    """

    def __init__(self, ring: Arenas, slot: _ArenaSlot, size_bytes: int) -> None:
        self.memory: torch.Tensor = slot.memory.tensor[:size_bytes]
        self._ring = ring
        self._slot = slot

    @property
    def attached(self) -> Any:
        """The value attached by this memory's last user; None if its content is lost."""
        return self._slot.attached

    def attach(self, value: Any) -> None:
        """Attach a value, e.g. views, for the next user; it is dropped before the memory."""
        self._slot.attached = value

    def release(self) -> None:
        """Return the memory to the ring."""
        self._ring._released(self)


@final
class _ArenaSlot:
    """One slot of the ring, without memory until it is needed."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.attached: Any = None
        self.lease: Arena | None = None
        self.taken = False
        self.doomed = False

    def empty(self) -> None:
        self.attached = None
        self.memory.release()
        self.doomed = False


@final
class Arenas:
    """Up to `count` arenas, each kept from save to save, as large as its last state.

    First touch of fresh pages costs several times the copy itself, so they are touched when an arena is made,
    and kept while it fits: an arena that is more than 2 % too large for a smaller state releases the rest.
    Arenas that were never needed cost nothing.

    Concurrency: `reserve`, `prewarm` and `close` on the main thread, `Arena.release` on any. An arena in
    flight is never reserved again.

    Args:
        count: the most saves in flight.
        budget_bytes: the most bytes of all arenas of this rank together; None for the free memory when an
            arena is made, less a headroom (`FreeMemory.usable_bytes`).
        probe: returns the free memory; None if unknown.
    """

    def __init__(
        self,
        count: int = 1,
        budget_bytes: int | None = None,
        *,
        probe: Callable[[], FreeMemory | None] = free_memory,
    ) -> None:
        self._slots = [_ArenaSlot() for _ in range(count)]
        self._budget_bytes = budget_bytes
        self._probe = probe
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory that all arenas take now."""
        return sum(slot.memory.resident_bytes for slot in self._slots)

    @property
    def free(self) -> int:
        """Number of arenas that are not in flight."""
        return sum(not slot.taken for slot in self._slots)

    def reserve(self, size_bytes: int, *, pinned: bool) -> Arena:
        """Reserve an arena of `size_bytes` until its release.

        Raises:
            CheckpointError: every arena is still being written.
            StagingMemoryError: there is too little memory; nothing was allocated.
        """
        slot = self._take(size_bytes, pinned=pinned)
        try:
            self._fit(slot, size_bytes, pinned=pinned)
            arena = slot.lease = Arena(self, slot, size_bytes)
        except BaseException:
            slot.taken = False
            raise
        return arena

    def prewarm(self, size_bytes: int, *, pinned: bool) -> int:
        """Allocate and fault in every arena not in flight, ahead of the next saves.

        Returns:
            Bytes that all arenas take now.

        Raises:
            StagingMemoryError: there is too little memory.
        """
        reserved = [self.reserve(size_bytes, pinned=pinned) for _ in range(self.free)]
        for arena in reserved:
            arena.release()
        return self.size_bytes

    def close(self) -> None:
        """Return the memory to the system; that of an arena in flight on its release."""
        with self._lock:
            for slot in self._slots:
                slot.doomed = slot.taken
                if not slot.taken:
                    slot.empty()

    def _released(self, arena: Arena) -> None:
        slot = arena._slot
        with self._lock:
            if slot.lease is not arena:
                return  # released before; another save may have it now
            slot.lease = None
            arena.memory = torch.empty(0, dtype=torch.uint8)
            if slot.doomed:
                slot.empty()
            slot.taken = False

    def _take(self, size_bytes: int, *, pinned: bool) -> _ArenaSlot:
        with self._lock:
            free = [slot for slot in self._slots if not slot.taken]
            if not free:
                raise CheckpointError(
                    f"all staging arenas ({len(self._slots)}) are still being written; "
                    "wait for the save in flight first"
                )
            # Memory that fits, else any memory: a second arena is made only while the first is in flight.
            slot = max(
                free,
                key=lambda each: (each.memory.serves(size_bytes, pinned=pinned), each.memory.resident_bytes),
            )
            slot.taken = True
            return slot

    def _fit(self, slot: _ArenaSlot, size_bytes: int, *, pinned: bool) -> None:
        if slot.memory.serves(size_bytes, pinned=pinned):
            return
        self._afford(slot.memory.extra_bytes(size_bytes, pinned=pinned))
        slot.attached = None  # views keep the old memory, which must go before new is taken
        try:
            slot.memory.resize(size_bytes, pinned=pinned)
        except OSError as error:
            slot.empty()
            raise self._refusal(size_bytes, 0, f"the system refuses: {error}") from error

    def _afford(self, extra_bytes: int) -> None:
        if extra_bytes == 0:
            return
        if self._budget_bytes is not None:
            remaining = self._budget_bytes - self.size_bytes
            if extra_bytes > remaining:
                known = f"of staging_memory={self._budget_bytes / _MIB:,.0f} MiB"
                raise self._refusal(extra_bytes, max(0, remaining), known)
            return
        free = self._probe()
        if free is not None and extra_bytes > free.usable_bytes:
            known = f"of {free.available_bytes / _MIB:,.0f} MiB free, less a headroom for everything else"
            raise self._refusal(extra_bytes, free.usable_bytes, known)

    def _refusal(self, needed_bytes: int, available_bytes: int, known: str) -> StagingMemoryError:
        fewer = "use arenas=1, " if len(self._slots) > 1 else ""
        return StagingMemoryError(
            f"the copy of this rank's share of the state needs {needed_bytes / _MIB:,.1f} MiB more of host "
            f"memory, but it may take only {available_bytes / _MIB:,.1f} MiB ({known}; all arenas hold "
            f"{self.size_bytes / _MIB:,.1f} MiB now); nothing was allocated. To continue, {fewer}shard the "
            "state over more ranks, run fewer ranks or data-loader workers per machine, or set "
            "staging_memory= if you know that the memory is there",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )
