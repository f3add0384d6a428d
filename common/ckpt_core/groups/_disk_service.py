"""The disk of this rank, for the ranks that do not see it."""

from __future__ import annotations

import errno
import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from ckpt_core import messages
from ckpt_core.coordination import Talk, Talks
from ckpt_core.errors import failure_text
from ckpt_core.formats.checksums import crc32
from ckpt_core.storage import ForeignFileError, Lock, Storage

PIECE_BYTES: Final = 16 << 20
"""The most bytes of one piece."""

_OPERATIONS: Final = frozenset(
    {
        *("list", "directories", "entry", "size", "crc32", "space", "other_owner", "lock_holder"),
        *("check_root", "delete", "make_directory", "sync_directory", "rename", "exchange"),
    }
)

messages.register(EOFError, str, EOFError)
messages.register(ValueError, str, ValueError)
messages.register(
    ForeignFileError,
    lambda error: (error.errno, error.strerror, error.filename),
    lambda said: ForeignFileError(*said),
)


def serve_disk(storage: Storage, talks: Talks) -> None:
    """Carry out on this disk what other ranks ask for, from now on."""
    if not talks.is_answering:
        service = DiskService(storage, talks.rank)
        talks.answer_with(service.answer, ended=service.close)


@final
class DiskService:
    """Carries out on one disk what other ranks ask for.

    A talk is one request: an operation of `Storage` and its arguments. The answer is its value or its error.

    Concurrency: `answer` on a thread for each talk.
    """

    def __init__(self, storage: Storage, rank: int) -> None:
        self._storage = storage
        self._place = f"on the node of rank {rank}"
        self._locks: dict[str, Lock] = {}
        self._memory = PieceMemory()

    def close(self) -> None:
        """Release the locks that the coordinator has left."""
        for key in list(self._locks):
            self._unlock(key)

    def answer(self, talk: Talk) -> None:
        """Answer one request."""
        operation, *arguments = talk.hear()
        special = {
            "lock": self._lock,
            "unlock": self._unlock,
            "read": lambda *place: self._read(talk, *place),
            "write": lambda key: self._write(talk, key),
            "replace": lambda key: self._storage.replace(key, b"".join(self._pieces(talk))),
        }
        if operation not in special and operation not in _OPERATIONS:
            raise LookupError(operation)
        act = special.get(operation) or getattr(self._storage, operation)
        try:
            talk.tell(_plain(act(*arguments)))
        except Exception as error:  # noqa: BLE001 - raised on the rank that asked
            talk.tell(self._sendable(error))

    def _read(self, talk: Talk, key: str) -> None:
        """Answer with ranges of a file, for as long as the other rank asks for them."""
        with self._storage.open_ranges(key) as reader:
            talk.tell(reader.size_bytes)
            while (place := talk.hear()) is not None:
                offset, size = place
                view = self._memory.take(size)
                reader.read_into(offset, view)
                talk.give([view])

    def _write(self, talk: Talk, key: str) -> int:
        """Write a file of the pieces that come, durably; return its CRC-32."""
        running = 0

        def summed() -> Iterator[memoryview]:
            nonlocal running
            for piece in self._pieces(talk):
                running = crc32(piece, running)
                yield piece

        self._storage.write_pieces(key, summed())
        return running

    def _pieces(self, talk: Talk) -> Iterator[memoryview]:
        while pieces := talk.take(self._memory.take):
            yield from pieces

    def _lock(self, key: str) -> bool:
        lock = None if key in self._locks else self._storage.try_lock(key)
        if lock is not None:
            self._locks[key] = lock
        return lock is not None

    def _unlock(self, key: str) -> None:
        with suppress(KeyError):
            self._locks.pop(key).release()

    def _sendable(self, error: Exception) -> Exception:
        """Return the error as another rank raises it, with the place of its file."""
        if type(error) in {EOFError, ValueError}:
            return error
        if not isinstance(error, OSError) or error.errno is None:
            return OSError(errno.EREMOTEIO, failure_text(error), self._place)
        kind = ForeignFileError if isinstance(error, ForeignFileError) else OSError
        where = f"{error.filename} {self._place}" if isinstance(error.filename, str) else self._place
        return kind(error.errno, str(error.strerror or error), where)


def _plain(value: Any) -> Any:
    """Convert what a storage returns to plain values."""
    match value:
        case set():
            return sorted(value)
        case tuple():
            return tuple(value)
        case list():
            return [tuple(each) for each in value]
        case _:
            return value


@final
class PieceMemory:
    """Memory for pieces, used again once nothing refers to a piece.

    It is on page boundaries. A storage may keep pieces until a file is written: as many are made as it keeps.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """Return memory for one piece."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, PIECE_BYTES)
        # A view of its own for each use: its end is the end of all that was made of it.
        view: Any = np.frombuffer(memory, dtype=np.uint8, count=size)
        weakref.finalize(view, self._free.append, memory).atexit = False
        return memoryview(view)
