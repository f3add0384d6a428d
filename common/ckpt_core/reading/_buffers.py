"""Reusable, page-aligned memory to read into, of bounded size."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol, final

from ckpt_core.reading._payloads import MAX_TAKE_BYTES
from ckpt_core.storage import ALIGNMENT

REQUEST_BYTES: Final = 4 << 20
"""Largest request that goes through a buffer, except for a range with `take`."""
NETWORK_REQUEST_BYTES: Final = 8 << 20
"""Largest request to a network that is verified or read directly into place."""

_LARGE_BYTES: Final = MAX_TAKE_BYTES + 2 * REQUEST_BYTES + ALIGNMENT
_LARGE_BUFFERS: Final = 4


class Lender(Protocol):
    """Memory that reading threads borrow."""

    def lend(self, offset: int, size_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend memory for bytes at `offset` in a file."""
        ...


@final
class Buffers:
    """A pool of memory for reading threads.

    One small buffer for each thread, and four large ones for all threads, which wait for a free one: at most
    12 * 8 MiB + 4 * 40 MiB for 12 threads. Pages that were never written take no memory.
    """

    def __init__(self, small_bytes: int = REQUEST_BYTES) -> None:
        self._small_bytes = small_bytes
        self._small: list[memoryview] = []
        self._large: list[memoryview] = []
        self._large_free = threading.BoundedSemaphore(_LARGE_BUFFERS)

    @contextmanager
    def lend(self, offset: int, size_bytes: int) -> Generator[memoryview]:
        """Lend memory for bytes at `offset` in a file, with the same alignment to a page."""
        skew = offset % ALIGNMENT
        if size_bytes <= self._small_bytes:
            with _lent(self._small, self._small_bytes + ALIGNMENT) as buffer:
                yield buffer[skew : skew + size_bytes]
        else:
            with self._large_free, _lent(self._large, _LARGE_BYTES) as buffer:
                yield buffer[skew : skew + size_bytes]


@contextmanager
def _lent(free: list[memoryview], size_bytes: int) -> Generator[memoryview]:
    # The last one returned is the likeliest to be in a cache. `pop` and `append` are atomic.
    try:
        buffer = free.pop()
    except IndexError:
        buffer = allocate(size_bytes)
    try:
        yield buffer
    finally:
        free.append(buffer)


def allocate(size_bytes: int) -> memoryview:
    """Return new page-aligned memory, in large pages where the system has them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
