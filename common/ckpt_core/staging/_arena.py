"""One run of host memory per rank that holds the image of its data files while they are written."""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Any, final

import torch

from ckpt_core.errors import CheckpointError

_logger = logging.getLogger(__name__)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python does not name it
_SLACK = 1.25


@final
class Arena:
    """Page-aligned, prefaulted host memory, kept from save to save; pinned as a whole for CUDA.

    First touch of fresh pages costs several times the copy itself, so pages are touched once, when the arena
    is made, and never given back while it fits.

    Concurrency: `reserve` on the main thread; the memory is read by one background thread until `release`.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._in_flight = False

    @property
    def size_bytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """At least `size_bytes` of memory as a uint8 tensor that starts on a page boundary.

        Its content is what the last user left there.

        Raises:
            CheckpointError: the save before is still being written from it.
            MemoryError: the memory is not to be had.
        """
        if self._in_flight:
            raise CheckpointError(
                "the staging arena is still being written; wait for the save in flight first"
            )
        fits = size_bytes <= self.size_bytes <= max(_SLACK * size_bytes, mmap.PAGESIZE)
        if not fits or (pinned and not self._pinned):
            self._allocate(max(size_bytes, 1), pinned=pinned)
        self._in_flight = True
        return self._tensor[:size_bytes]

    def release(self) -> None:
        """The memory is no longer read."""
        self._in_flight = False

    def close(self) -> None:
        """Give the memory back to the system."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._tensor.data_ptr())
        # The mapping ends with the last tensor that views it.
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._memory, self._pinned = None, False

    def _allocate(self, size_bytes: int, *, pinned: bool) -> None:
        self.close()
        memory = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self._tensor = memory, torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            # One registration for all; it faults the pages in as well.
            error = _cuda_runtime().cudaHostRegister(self._tensor.data_ptr(), len(memory), 0)
            self._pinned = int(error) == 0
            if not self._pinned:
                _logger.warning("could not pin %d bytes of host memory (CUDA error %s)", len(memory), error)
        if not self._pinned and not _populate(self._tensor):
            self._tensor[:: mmap.PAGESIZE] = 0


def _populate(tensor: torch.Tensor) -> bool:
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(tensor.data_ptr(), tensor.numel(), _POPULATE_WRITE) == 0)


def _cuda_runtime() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()
