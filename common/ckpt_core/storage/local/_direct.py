"""Direct writes of large files to the device, past the page cache.

Buffered writes of gigabytes are several times slower than the disk, evict the training data from the page
cache, and make fsync wait for all of it. Direct writes need aligned memory, offsets and lengths. Where a
filesystem refuses them, which only a real write shows, the same bytes go through the page cache.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from queue import Queue
from typing import Self, final

from ckpt_core.storage._base import ALIGNMENT
from ckpt_core.storage.local._paths import PathAt

_THREADS = 2
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def write_direct(target: PathAt, pieces: Iterable[memoryview]) -> None:
    """Create a file from aligned pieces and fsync it; an error leaves a partial file.

    Raises:
        FileExistsError: it exists already.
        OSError: a write or the fsync failed.
    """
    with target.create_stream(buffering=0) as file, _DirectFile(target, file.fileno()) as direct:
        with _Writers(direct) as crew:
            offset = 0
            for piece in pieces:
                crew.take(piece, offset)
                offset += len(piece)
        crew.raise_first()
        os.fsync(file.fileno())


@final
class _Writers:
    """Threads that each write a piece while the next one is being prepared.

    Plain threads, because an executor takes no work while the interpreter ends, when a last save may still
    run. Where no thread can be started then (Python 3.12), the calling thread writes.
    """

    def __init__(self, direct: _DirectFile) -> None:
        self._direct = direct
        self._work: Queue[tuple[memoryview, int] | None] = Queue(maxsize=_THREADS)
        self._failures: list[BaseException] = []
        # Daemons: a write that hangs must not keep the process from ending.
        self._threads: list[threading.Thread] = []
        for number in range(_THREADS):
            thread = threading.Thread(target=self._run, name=f"ckpt-write-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait until all pieces are written or one has failed."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def take(self, piece: memoryview, offset: int) -> None:
        """Queue `piece` for writing; raise the failure of an earlier piece."""
        self.raise_first()
        if self._threads:
            self._work.put((piece, offset))
        else:
            self._direct.write(piece, offset)

    def raise_first(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failures:
            raise self._failures[0]

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            try:
                if not self._failures:
                    self._direct.write(*task)
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
                self._failures.append(error)


@final
class _DirectFile:
    """A file opened twice: directly, and through the page cache for unaligned bytes."""

    def __init__(self, target: PathAt, buffered: int) -> None:
        self._buffered = buffered
        self._direct = self._open(target, buffered)

    def __enter__(self) -> _DirectFile:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def write(self, piece: memoryview, offset: int) -> None:
        """Write all of `piece` at `offset`; called from several threads at the same time."""
        while len(piece):
            direct = self._direct
            whole = len(piece) - len(piece) % ALIGNMENT
            # The end of the file is rarely a whole block; after a short write nothing may be aligned.
            if direct is None or offset % ALIGNMENT or not whole:
                written = os.pwrite(self._buffered, piece, offset)
            else:
                try:
                    written = os.pwrite(direct, piece[:whole], offset)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    written = os.pwrite(self._buffered, piece, offset)
            piece = piece[written:]
            offset += written

    @staticmethod
    def _open(target: PathAt, buffered: int) -> int | None:
        flag = getattr(os, "O_DIRECT", 0)  # Linux only
        if not flag:
            return None
        try:
            direct = target.open_existing(os.O_WRONLY | flag)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return None
        if os.path.samestat(os.fstat(direct), os.fstat(buffered)):
            return direct
        # Another process has replaced the file: ours is the one that was created.
        os.close(direct)
        return None
