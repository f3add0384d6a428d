"""Reads what is wanted of a checkpoint: once to verify it, once more to deliver it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Self, final

from ckpt_core.crew import run_all
from ckpt_core.errors import FileFailure
from ckpt_core.reading._buffers import Buffers
from ckpt_core.reading._open_files import OpenFiles
from ckpt_core.reading._passes import VerifyPass, deliver
from ckpt_core.reading._payloads import RangeRead
from ckpt_core.reading._placing import VerifiedPlan, plan_plainly, refuse_unplaced
from ckpt_core.reading._requests import MEMORY_LIMITS, NETWORK_LIMITS, Piece, Request
from ckpt_core.storage import Storage

_LOCAL_THREADS: Final = 4
_REMOTE_THREADS: Final = 16
_KEEP_BYTES: Final = 256 << 20


@final
class Engine:
    """Reads one checkpoint, in two passes: `verify`, which changes nothing but buffers, then `fetch`.

    Where the storage rereads from memory the second pass finds the bytes there. Elsewhere the first pass
    keeps what it read, as far as `keep_bytes` go; what is read again is compared again before it is
    delivered, and so is, everywhere, what is in more files than can be kept open from pass to pass.
    A `fetch` without a `verify` before delivers bytes as they are.

    Extra memory: 4 MiB for each thread, up to 160 MiB while ranges larger than that are taken at once, and
    `keep_bytes` where the storage does not reread from memory.

    Concurrency: one pass at a time; a pass reads on threads of its own, which have ended when it returns.
    """

    def __init__(
        self, storage: Storage, directory: str, *, threads: int | None = None, keep_bytes: int = _KEEP_BYTES
    ) -> None:
        """Open nothing yet.

        Args:
            storage: the root.
            directory: the checkpoint's directory in it; "" for the root itself.
            threads: how many read at once; None for as many as pay: up to 4 where bytes come from a page
                cache, 16 where every request waits for a network.
            keep_bytes: how much of the first pass may be kept in memory for the second.
        """
        self._rereads = storage.rereads_from_memory
        self._threads = threads or (min(_LOCAL_THREADS, _cpus()) if self._rereads else _REMOTE_THREADS)
        self._limits = MEMORY_LIMITS if self._rereads else NETWORK_LIMITS
        self._files = OpenFiles(storage, directory, keep_bytes)
        self._buffers = Buffers()
        # Checksums that pass 1 found of steps of pieces that are too large for a buffer.
        self._steps: dict[tuple[str, int, int], int] = {}
        self._has_verified = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def bytes_read(self) -> int:
        """Bytes asked of storage so far, in both passes; what was served from memory does not count."""
        return self._files.bytes_read

    def verify(self, wanted: Iterable[RangeRead]) -> list[FileFailure]:
        """Read every checksummed piece that a range touches, once, and compare it.

        Returns:
            What is wrong, by path and place in the file; empty if nothing is.

        Raises:
            OSError: storage is unwell; that says nothing about the checkpoint.
        """
        self._has_verified = True
        examination = VerifyPass(self._files, self._buffers, self._steps)
        requests = examination.plan(wanted, self._limits)
        run_all(self._announced(requests, examination.serve), requests, self._threads)
        return examination.report()

    def fetch(self, wanted: Iterable[RangeRead]) -> None:
        """Read every range to where it goes.

        Raises:
            ValueError: a range has not exactly one place to go to, or is too long to be taken at once;
                nothing has been read.
            CorruptCheckpointError: what had to be read a second time is not what it was the first time.
            EOFError: a file has become shorter; the message names it.
            OSError: storage is unwell; the error names the file.
        """
        ranges = list(wanted)
        refuse_unplaced(ranges)
        for each in ranges:
            if each.take is not None and each.start == each.stop:
                each.take(memoryview(bytearray()))
        requests = self._plan_fetch(ranges)
        serve = partial(deliver, files=self._files, buffers=self._buffers)
        run_all(self._announced(requests, serve), requests, self._threads)

    def close(self) -> None:
        """Close all files and forget what was kept; harmless when repeated."""
        self._files.close()

    def _plan_fetch(self, wanted: Sequence[RangeRead]) -> list[Request]:
        # A file that stays open is the one that was verified, whatever has its name by now.
        if not self._has_verified or (self._rereads and not self._files.reopens):
            return plan_plainly(wanted, self._limits)
        self._files.begin({each.payload.path: 0 for each in wanted})
        return VerifiedPlan(files=self._files, crcs=self._crc32, limits=self._limits).requests(wanted)

    def _crc32(self, piece: Piece) -> int | None:
        return self._steps.get(piece.place) if piece.crc32 is None else piece.crc32

    def _announced(
        self, requests: Sequence[Request], serve: Callable[[Request], None]
    ) -> Callable[[Request], None]:
        """Announce the requests of a pass; return `serve`, which then closes files as soon as it may."""
        self._files.begin(Counter(request.path for request in requests))

        def work(request: Request) -> None:
            try:
                serve(request)
            finally:
                self._files.done(request.path)

        return work


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
