"""The limits: nothing that reads, or copies, or verifies the same bytes can be quicker than these."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, final

import torch
from isal.isal_zlib import crc32
from typing_extensions import override

from benchmarks.contenders import Kind, Tensors
from benchmarks.loading.loader import POISON, Loader, WrongValuesError
from benchmarks.pieces import PIECE_BYTES, each_piece, packed, pages

# A piece that is checked right after it was copied should still be in a cache; also the size of our blocks.
_BLOCK_BYTES = 1 << 20
_FILE = "raw"


class _Limit(Loader):
    """Works on host memory that exists already: `source` holds the state, `target` is for what arrives."""

    kind: ClassVar[Kind] = "limit"
    format: ClassVar[str] = ""
    threads: ClassVar[int]
    piece_bytes: ClassVar[int] = PIECE_BYTES

    @override
    def prepare(self) -> None:
        super().prepare()
        shared = self.task.shared
        if "source" not in shared:
            shared["source"] = packed(self.task.tensors.values())
            shared["target"] = pages(self.task.size_bytes)
        self._source, self._target = memoryview(shared["source"]), memoryview(shared["target"])
        self._from, self._to = _address(shared["source"]), _address(shared["target"])

    @override
    def poison(self) -> None:
        _as_tensor(self.task.shared["target"]).fill_(POISON)

    @override
    def check(self) -> None:
        source, target = (_as_tensor(self.task.shared[name]) for name in ("source", "target"))
        if not torch.equal(source, target):
            raise WrongValuesError("the memory does not hold what it should")

    def pieces(self, work: Callable[[slice], None]) -> None:
        """Do `work` for every piece of the state."""
        each_piece(len(self._source), work, threads=self.threads, piece_bytes=self.piece_bytes)

    def copy(self, piece: slice) -> None:
        """From `source` to `target`, without the interpreter lock."""
        ctypes.memmove(self._to + piece.start, self._from + piece.start, piece.stop - piece.start)


class _RawRead(_Limit):
    """As many bytes from a file on the same disk, two threads."""

    format = "raw"
    threads = 2
    flags: ClassVar[int]

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        memory = memoryview(packed(tensors.values()))
        directory.mkdir()
        file = os.open(directory / _FILE, os.O_WRONLY | os.O_CREAT)
        try:
            each_piece(len(memory), lambda piece: _write(file, memory[piece], piece.start), threads=1)
            os.fsync(file)
        finally:
            os.close(file)

    @override
    def load(self) -> None:
        file = os.open(self.directory / _FILE, os.O_RDONLY | self.flags)
        try:
            self.pieces(lambda piece: _read(file, self._target[piece], piece.start))
        finally:
            os.close(file)


@final
class RawBuffered(_RawRead):
    """Through the page cache."""

    key = "raw"
    name = "limit: buffered read, 2 threads"
    copies = 2
    flags = 0


@final
class RawDirect(_RawRead):
    """Past the page cache."""

    key = "raw-direct"
    name = "limit: O_DIRECT read, 2 threads"
    cached = False
    flags = os.O_DIRECT


class _Memcpy(_Limit):
    @override
    def load(self) -> None:
        self.pieces(self.copy)


@final
class MemcpyOneThread(_Memcpy):
    """The bytes copied from memory to memory."""

    key = "memcpy"
    name = "limit: memcpy, 1 thread"
    threads = 1


@final
class MemcpyTwoThreads(_Memcpy):
    """On two threads."""

    key = "memcpy-2"
    name = "limit: memcpy, 2 threads"
    threads = 2


class _Checksum(_Limit):
    """The bytes read where they lie; nothing is copied."""

    piece_bytes = _BLOCK_BYTES

    @override
    def load(self) -> None:
        self._found = bytearray(-(-len(self._source) // self.piece_bytes) * 4)
        self.pieces(self._sum)

    def _sum(self, piece: slice) -> None:
        number = piece.start // self.piece_bytes
        self._found[number * 4 : number * 4 + 4] = crc32(self._source[piece]).to_bytes(4, "little")

    @override
    def check(self) -> None:
        found, self._found = self._found, bytearray(len(self._found))
        each_piece(len(self._source), self._sum, threads=1, piece_bytes=self.piece_bytes)
        if found != self._found:
            raise WrongValuesError("the checksums differ")


@final
class ChecksumOneThread(_Checksum):
    """CRC-32 of every 1 MiB."""

    key = "crc"
    name = "limit: CRC-32, 1 thread"
    threads = 1


@final
class ChecksumTwoThreads(_Checksum):
    """On two threads."""

    key = "crc-2"
    name = "limit: CRC-32, 2 threads"
    threads = 2


class _MemcpyChecksum(_Limit):
    """Every 1 MiB is copied, and its CRC-32 taken while it is still in a cache."""

    piece_bytes = _BLOCK_BYTES

    @override
    def load(self) -> None:
        self.pieces(self._copy_and_sum)

    def _copy_and_sum(self, piece: slice) -> None:
        self.copy(piece)
        crc32(self._target[piece])


@final
class MemcpyChecksumOneThread(_MemcpyChecksum):
    """The least that a verified load from the page cache costs one thread."""

    key = "memcpy-crc"
    name = "limit: memcpy + CRC-32, 1 thread"
    threads = 1


@final
class MemcpyChecksumTwoThreads(_MemcpyChecksum):
    """The same for two threads."""

    key = "memcpy-crc-2"
    name = "limit: memcpy + CRC-32, 2 threads"
    threads = 2


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _address(memory: mmap.mmap) -> int:
    return _as_tensor(memory).data_ptr()


def _read(file: int, into: memoryview, offset: int) -> None:
    if os.preadv(file, [into], offset) != len(into):
        raise OSError(f"less than {len(into)} bytes at {offset}")


def _write(file: int, content: memoryview, offset: int) -> None:
    if os.pwrite(file, content, offset) != len(content):
        raise OSError(f"less than {len(content)} bytes written at {offset}")
