"""Host memory of one arena: page-aligned, faulted in, and as large as the state."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, final

import torch

from ckpt_core.disclosure import logger_of

_logger = logger_of(__name__)
# Linux names that Python's mmap does not know.
_POPULATE_WRITE = 23  # since 5.14
_WIPE_ON_FORK = 18  # since 4.14
_TOLERATED_EXCESS = 1.02
"""How much larger than requested memory may be before the rest is released."""


@final
class HostMemory:
    """Private anonymous memory on a page boundary, which CUDA can register as a whole.

    Other devices copy to it as it is: torch's generic pinned memory is rounded up to a power of two, and it
    has no generic name to pin memory of ours.

    - Private, because huge pages are usually off for shared mappings: 2 GiB are faulted in in 0.2 s, not in
      0.6 to 3 s.
    - A forked child, such as a worker of a data loader, sees it empty. If it were shared copy-on-write with a
      child, the next save would copy every page once more.

    Concurrency: one thread at a time.
    """

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.resident_bytes = 0
        self._mapping: mmap.mmap | None = None
        self._pinned = self._cannot_pin = False

    def serves(self, size_bytes: int, *, pinned: bool) -> bool:
        """Return whether it fits: large enough, not too large, and pinned if required."""
        if pinned and not (self._pinned or self._cannot_pin):
            return False
        return (
            size_bytes
            <= self.resident_bytes
            <= _whole_pages(max(int(size_bytes * _TOLERATED_EXCESS), size_bytes))
        )

    def extra_bytes(self, size_bytes: int, *, pinned: bool) -> int:
        """Return the additional bytes of a `resize`; 0 if none."""
        if self.serves(size_bytes, pinned=pinned):
            return 0
        return max(0, _whole_pages(size_bytes) - self.resident_bytes)

    def resize(self, size_bytes: int, *, pinned: bool) -> None:
        """Resize it to `size_bytes`, with every page faulted in. The content is lost.

        Raises:
            OSError: the system has no address space left.
        """
        target = _whole_pages(size_bytes)
        mapped = 0 if self._mapping is None else len(self._mapping)
        if pinned or self._pinned or not target <= mapped:
            self.release()
            self._map(target)
            self._pin(pinned=pinned)
        elif target < self.resident_bytes:
            self._trim(target)
        self._fault_in(target)

    def release(self) -> None:
        """Return the memory to the system; no view of it may exist."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping, self.resident_bytes = None, 0
        self._pinned = self._cannot_pin = False

    def _map(self, size_bytes: int) -> None:
        if size_bytes == 0:
            return
        self._mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        _advise(self.tensor, _WIPE_ON_FORK)

    def _pin(self, *, pinned: bool) -> None:
        size_bytes = self.tensor.numel()
        if not pinned or size_bytes == 0:
            return
        # One registration for all pages, which also faults them in.
        error = int(_cuda_runtime().cudaHostRegister(self.tensor.data_ptr(), size_bytes, 0))
        self._pinned, self._cannot_pin = error == 0, error != 0
        if self._pinned:
            self.resident_bytes = size_bytes
        else:
            _logger.warning("could not pin %d bytes of host memory (CUDA error %d)", size_bytes, error)

    def _trim(self, size_bytes: int) -> None:
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, size_bytes, len(self._mapping) - size_bytes)
            self.resident_bytes = size_bytes
        else:
            self.release()
            self._map(size_bytes)

    def _fault_in(self, size_bytes: int) -> None:
        fresh = self.tensor[self.resident_bytes : size_bytes]
        if fresh.numel() and not _advise(fresh, _POPULATE_WRITE):
            fresh[:: mmap.PAGESIZE] = 0
        self.resident_bytes = max(self.resident_bytes, size_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _advise(tensor: torch.Tensor, advice: int) -> bool:
    """Call madvise without the GIL, which faulting in would hold for long."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(tensor.data_ptr(), tensor.numel(), advice) == 0)


def _cuda_runtime() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()
