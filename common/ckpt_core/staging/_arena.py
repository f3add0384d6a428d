"""Arenas: host memory for images of a rank's data files, from copy to write."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, StagingMemoryError

_HEADROOM_BYTES = 512 << 20
_PART_OF_TOTAL = 20
_PART_OF_AVAILABLE = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Host memory in bytes: available without swapping, and total."""

    available_bytes: int
    total_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes for staging; a headroom stays for data loaders and the page cache.

        It is 5 % of the total, at least 512 MiB; but where little is available, a quarter of that, so that a
        small state can be saved on a machine that others have filled.
        """
        headroom = max(_HEADROOM_BYTES, self.total_bytes // _PART_OF_TOTAL)
        return self.available_bytes - min(headroom, self.available_bytes // _PART_OF_AVAILABLE)

    @property
    def share_bytes(self) -> int:
        """Bytes of that for one of the ranks that a launcher has started on this machine."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or "1")
        return self.usable_bytes // max(1, ranks)


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """Return the free memory, the machine's or the cgroup's; None if unknown.

    `proc` and `cgroups`, of version 1 or 2, are where these filesystems are mounted.
    """
    found = [_of_machine(proc), *_of_cgroups(proc, cgroups)]
    known = [each for each in found if each is not None]
    return min(known, key=lambda each: each.usable_bytes, default=None)


def _of_machine(proc: Path) -> FreeMemory | None:
    fields = _table(proc / "meminfo")
    if "MemAvailable:" not in fields or "MemTotal:" not in fields:
        return None
    return FreeMemory(available_bytes=fields["MemAvailable:"] << 10, total_bytes=fields["MemTotal:"] << 10)


def _of_cgroups(proc: Path, cgroups: Path) -> Generator[FreeMemory | None]:
    """Yield the limits of this process's groups, of which containers may see one only."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for folder in _upwards(cgroups, path):
                yield _of_group(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroups / "memory", path):
                yield _of_group(
                    folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _upwards(mount: Path, path: str) -> Generator[Path]:
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _of_group(folder: Path, limit: str, usage: str, reclaimable: str) -> FreeMemory | None:
    allowed, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not allowed.isdecimal() or not used.isdecimal():
        return None  # no such group, or "max"
    # The page cache counts as used but is evicted on demand.
    cached = _table(folder / "memory.stat").get(reclaimable, 0)
    return FreeMemory(available_bytes=max(0, int(allowed) - int(used) + cached), total_bytes=int(allowed))


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


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
            <= whole_pages(max(int(size_bytes * _TOLERATED_EXCESS), size_bytes))
        )

    def extra_bytes(self, size_bytes: int, *, pinned: bool) -> int:
        """Return the additional bytes of a `resize`; 0 if none."""
        if self.serves(size_bytes, pinned=pinned):
            return 0
        return max(0, whole_pages(size_bytes) - self.resident_bytes)

    def resize(self, size_bytes: int, *, pinned: bool) -> None:
        """Resize it to `size_bytes`, with every page faulted in. The content is lost.

        Raises:
            OSError: the system has no address space left.
        """
        target = whole_pages(size_bytes)
        mapped = 0 if self._mapping is None else len(self._mapping)
        if pinned or self._pinned or not target <= mapped:
            self.release()
            self._map(target)
            self._pin(pinned=pinned)
        elif target < self.resident_bytes:
            self._trim(target)
        fresh = self.tensor[self.resident_bytes : target]
        if fresh.numel() and not _advise(fresh, _POPULATE_WRITE):
            fresh[:: mmap.PAGESIZE] = 0
        self.resident_bytes = max(self.resident_bytes, target)

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


def whole_pages(size_bytes: int) -> int:
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

    def reserve_most(self, least_bytes: int, refusal: StagingMemoryError, *, pinned: bool) -> Arena:
        """Reserve what memory there is, where `reserve` has given a refusal.

        No arena is in flight, unless its writer hangs. Free memory is shared by the ranks of a machine.

        Raises:
            StagingMemoryError: that is less than `least_bytes`.
        """
        kept = max((slot.memory.resident_bytes for slot in self._slots if not slot.taken), default=0)
        if kept < max(least_bytes, (self.size_bytes + self._room()) // 2):
            self.close()  # of several arenas one is made
            kept = self._room() // mmap.PAGESIZE * mmap.PAGESIZE
        if kept < least_bytes:
            raise refusal.retold(
                f"{refusal}. In parts it can be saved with {-(-least_bytes // _MIB)} MiB at least"
            )
        return self.reserve(kept, pinned=pinned)

    def prewarm(self, size_bytes: int, *, pinned: bool) -> int:
        """Allocate and fault in every arena not in flight; return the bytes of all.

        Raises:
            StagingMemoryError: there is too little memory.
        """
        reserved: list[Arena] = []
        try:
            while self.free:
                reserved.append(self.reserve(size_bytes, pinned=pinned))
        finally:
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

    def _room(self) -> int:
        if self._budget_bytes is not None:
            return max(0, self._budget_bytes - self.size_bytes)
        free = self._probe()
        return 0 if free is None else free.share_bytes

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
