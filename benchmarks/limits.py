"""The floors: nothing that copies, or writes, or both, can be quicker than these."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar, final

import torch
from isal.isal_zlib import crc32

from benchmarks.contenders import Contender, InFlight, Kind, Task, ended
from benchmarks.others import in_background
from benchmarks.pieces import each_piece, packed


class _Limit(Contender):
    kind: ClassVar[Kind] = "limit"
    copies: ClassVar[int] = 1
    fsync: ClassVar[str] = "the benchmark's"


@final
class Memcpy(_Limit):
    """The floor of a blocking stall: every tensor copied to memory that exists already, on CUDA pinned."""

    key = "memcpy"
    name = "limit: memcpy"
    has_durable = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._buffers: dict[str, torch.Tensor] = {}

    def prewarm(self) -> None:
        """Allocate the memory, and touch it."""
        pinned = self.task.device.type == "cuda"
        for name, tensor in self.task.tensors.items():
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[name] = buffer.copy_(tensor)

    def start(self, number: int) -> InFlight:  # noqa: ARG002 - it has no file
        """Copy; nothing becomes durable."""
        if not self._buffers:
            self.prewarm()
        for name, tensor in self.task.tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        if self.task.device.type == "cuda":
            torch.cuda.current_stream(self.task.device).synchronize()
        return InFlight(durable=ended())


class _RawDirect(_Limit):
    """The floor of a durable save: as many bytes by O_DIRECT from memory that exists already, then fsync."""

    has_stall = False
    threads: ClassVar[int]
    checksums: ClassVar[bool] = False

    def prewarm(self) -> None:
        """Fill memory as large as the state with its bytes, which compress as badly."""
        if "raw" not in self.task.shared:
            self.task.shared["raw"] = packed(self.task.tensors.values())

    def start(self, number: int) -> InFlight:
        """Write in the background."""
        self.prewarm()
        memory = memoryview(self.task.shared["raw"])
        self.directory(number).mkdir()
        path = self.directory(number) / "raw"
        return InFlight(durable=in_background(lambda: _write(path, memory, self.threads, self.checksums)))


def _write(path: Path, memory: memoryview, threads: int, checksums: bool) -> None:  # noqa: FBT001
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def write(piece: slice) -> None:
        if checksums:
            crc32(memory[piece])
        os.pwrite(file, memory[piece], piece.start)

    try:
        each_piece(len(memory), write, threads=threads)
        os.fsync(file)
    finally:
        os.close(file)


@final
class RawDirect(_RawDirect):
    """Two threads: what a virtual disk needs to be kept busy."""

    key = "o-direct"
    name = "limit: O_DIRECT + fsync, 2 threads"
    threads = 2


@final
class RawDirectOneThread(_RawDirect):
    """One thread: the least that a write in the background can disturb."""

    copies = 0
    key = "o-direct-1"
    name = "limit: O_DIRECT + fsync, 1 thread"
    threads = 1


@final
class RawDirectChecksums(_RawDirect):
    """One thread that also computes a CRC-32 of every byte."""

    copies = 0
    key = "o-direct-crc"
    name = "limit: CRC-32 + O_DIRECT + fsync"
    threads = 1
    checksums = True


_inherited: list[mmap.mmap] = []


def _write_inherited(path: Path) -> None:
    _write(path, memoryview(_inherited[0]), 1, True)  # noqa: FBT003


@final
class RawDirectProcess(_RawDirect):
    """The same work in a process of its own, which shares the memory: no thread of it needs the GIL."""

    copies = 0
    key = "o-direct-crc-process"
    name = "limit: CRC-32 + O_DIRECT + fsync, a process"
    threads = 1
    _pool: ProcessPoolExecutor | None = None

    def prewarm(self) -> None:
        """Fork the process, with which such memory is shared."""
        super().prewarm()
        if self._pool is None:
            shared, forked = self.task.shared["raw"], get_context("fork")
            self._pool = ProcessPoolExecutor(1, forked, initializer=_inherited.append, initargs=(shared,))

    def start(self, number: int) -> InFlight:
        """Tell the process where to write."""
        self.prewarm()
        assert self._pool is not None
        self.directory(number).mkdir()
        return InFlight(durable=self._pool.submit(_write_inherited, self.directory(number) / "raw"))

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
