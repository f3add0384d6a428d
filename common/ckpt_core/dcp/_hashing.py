"""Data files hashed while they are written, without holding the disk up.

A hash such as SHA-256 takes bytes in their order, so that threads which write a file together cannot share
it. Each data file is hashed by a thread of its own, from the memory that is being written and in the order of
the file, at its own pace: the disk never waits for it, and files of one rank are hashed side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Self, TypeAlias, final

from ckpt_core.checksums import CRC32, Checksum

_Progress: TypeAlias = BaseException | int
"""Why a file cannot be hashed; 1 for each piece that is done, and 0 in the end."""


@final
class Hashing:
    """Hashes the data files of one rank in one save.

    Concurrency: used by one thread. Pieces must be left alone until `checksums` has returned or the context
    has ended.

    Args:
        algorithm: of the checksums; of CRC-32, which whoever writes takes anyway, nothing is computed here.
    """

    def __init__(self, algorithm: str = CRC32) -> None:
        self.algorithm = algorithm
        self._files: dict[str, _File] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.stop()

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Pass the pieces of a file on, and hash them behind whoever takes them."""
        if self.algorithm == CRC32:
            return pieces
        self._files[path] = file = _File(self.algorithm, path)
        return file.follow(pieces)

    def checksums(self, beat: Callable[[str], None]) -> dict[str, str]:
        """Wait for the checksum of every file that was followed, by path.

        Args:
            beat: told whenever a piece is done.
        """
        return {path: file.checksum(beat) for path, file in self._files.items()}


@final
class _File:
    """One file, and the thread that hashes it."""

    def __init__(self, algorithm: str, path: str) -> None:
        self._path = path
        self._running = Checksum(algorithm)
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._progress: SimpleQueue[_Progress] = SimpleQueue()
        self._stopped = False
        # A daemon: what it computes is of no use to a process that ends.
        self._thread = threading.Thread(target=self._run, name="ckpt-hash", daemon=True)

    def follow(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending: whoever writes hashes, too
            for piece in pieces:
                self._running.update(piece)
                yield piece
            self._progress.put(0)
            return
        for piece in pieces:
            self._pieces.put(piece)
            yield piece
        self._pieces.put(None)

    def checksum(self, beat: Callable[[str], None]) -> str:
        while more := self._progress.get():
            if isinstance(more, BaseException):
                raise more
            beat(f"hashing {self._path}")
        return str(self._running)

    def stop(self) -> None:
        self._stopped = True
        self._pieces.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (piece := self._pieces.get()) is not None and not self._stopped:
                self._running.update(piece)
                self._progress.put(1)
        except BaseException as error:  # noqa: BLE001 - raised on the thread that waits for the checksum
            self._progress.put(error)
        else:
            self._progress.put(0)
