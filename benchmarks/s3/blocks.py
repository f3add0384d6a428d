"""Reused memory for the bodies of objects, so that a measurement pays for no page faults of the server."""

from __future__ import annotations

import mmap
import threading
from typing import final

_GRAIN = 64 << 10


@final
class Pool:
    """Free memory by size; what a `Block` returns is given to the next of about its size."""

    def __init__(self, most_free_bytes: int) -> None:
        self._most_free_bytes = most_free_bytes
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self._guard = threading.Lock()

    def take(self, size_bytes: int) -> Block:
        """Lend memory of at least that size."""
        capacity = max(_GRAIN, -(-size_bytes // _GRAIN) * _GRAIN)
        with self._guard:
            fitting = [size for size, free in self._free.items() if free and capacity <= size <= 2 * capacity]
            if fitting:
                memory = self._free[min(fitting)].pop()
                self._free_bytes -= len(memory)
                return Block(self, memory, size_bytes)
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return Block(self, memory, size_bytes)

    def give_back(self, memory: mmap.mmap) -> None:
        """Keep memory for the next block, unless enough is kept."""
        with self._guard:
            if self._free_bytes + len(memory) <= self._most_free_bytes:
                self._free.setdefault(len(memory), []).append(memory)
                self._free_bytes += len(memory)


@final
class Block:
    """Memory of one body; it goes back to its pool with the last reference to the block."""

    def __init__(self, pool: Pool, memory: mmap.mmap, size_bytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.size_bytes = size_bytes

    def __del__(self) -> None:
        self._pool.give_back(self._memory)

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes from `start` to `stop`; hold the block while the view is in use."""
        return memoryview(self._memory)[start : self.size_bytes if stop is None else stop]
