"""The reading engine: a verify pass, then a fetch pass."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Self, final

from ckpt_core.crew import run_all
from ckpt_core.errors import FileFailure
from ckpt_core.reading._buffers import Buffers, Lender
from ckpt_core.reading._findings import VerifyReport
from ckpt_core.reading._open_files import OpenFiles
from ckpt_core.reading._passes import VerifyPass, deliver
from ckpt_core.reading._payloads import Payload, RangeRead
from ckpt_core.reading._placing import VerifiedPlan, check_destinations, plan_unverified
from ckpt_core.reading._requests import (
    MEMORY_LIMITS,
    NETWORK_LIMITS,
    Piece,
    Request,
    is_comparable_alone,
)
from ckpt_core.storage import Storage

_LOCAL_THREADS: Final = 4
_REMOTE_THREADS: Final = 12
_KEEP_BYTES: Final = 256 << 20


@final
class Engine:
    """Reader of one checkpoint: `verify` changes only buffers, then `fetch` delivers.

    Where the storage rereads from memory, the second pass finds the bytes there. Elsewhere the first pass
    keeps up to `keep_bytes`. Bytes that must be read twice are verified twice; so are those of files beyond
    the limit of open files, on any storage. A `fetch` without a `verify` delivers bytes unverified, one after
    a `verify` with `on_arrival` compares them where they belong.

    Extra memory: 4 MiB for each thread, up to 160 MiB while longer ranges with `take` are read, and where the
    storage does not reread from memory 8 MiB for each thread and `keep_bytes`.

    Concurrency: one pass at a time; a pass reads on its own threads, which have ended when it returns.
    """

    def __init__(
        self, storage: Storage, directory: str, *, threads: int | None = None, keep_bytes: int = _KEEP_BYTES
    ) -> None:
        """Open nothing yet.

        Args:
            storage: the root.
            directory: the checkpoint's directory in it; "" for the root itself.
            threads: how many read in parallel; None for the fastest number: up to 4 where bytes come from a
                page cache, 12 where every request waits for a network.
            keep_bytes: how many bytes of the first pass may be kept in memory for the second.
        """
        self._rereads = storage.rereads_from_memory
        self._reads_in_place = storage.reads_in_place and not self._rereads
        self._threads = threads or (min(_LOCAL_THREADS, _cpus()) if self._rereads else _REMOTE_THREADS)
        self._limits = MEMORY_LIMITS if self._rereads else NETWORK_LIMITS
        self._files = OpenFiles(storage, directory, keep_bytes)
        self._buffers = Buffers(self._limits.verified_bytes)
        # Checksums from pass 1 of the steps of pieces that are too large for a buffer.
        self._steps: dict[tuple[str, int, int], int] = {}
        self._has_verified = False
        self._on_arrival = False
        # Payloads that are damaged where they belong, and the whole ones to be read instead.
        self._instead: dict[tuple[str, int], Payload] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def bytes_read(self) -> int:
        """Bytes requested from storage in both passes, without those served from memory."""
        return self._files.bytes_read

    def verify(
        self,
        ranges: Iterable[RangeRead],
        *,
        twin_of: Callable[[str], str | None] | None = None,
        on_arrival: bool = False,
    ) -> list[FileFailure]:
        """Read every checksummed piece that a range touches, once, and compare it.

        Args:
            ranges: to be read.
            twin_of: returns the path of a file of the same bytes, None if there is none. A damaged payload is
                verified and fetched there.
            on_arrival: leave to `fetch` what it can compare piece by piece, so that every byte is read once;
                ignored where storage rereads from memory.

        Returns:
            The failures, by path and position in the file; empty if there are none. Those with a `twin` are
            of no consequence.

        Raises:
            OSError: storage failed; that says nothing about the checkpoint.
        """
        if on_arrival and not self._rereads:
            self._on_arrival = True
            ranges = list(ranges)
            self._probe(ranges)
            ranges = (each for each in ranges if not is_comparable_alone(each.payload))
        ranges = ranges if twin_of is None else list(ranges)
        verify_pass, requests = self._plan_verify(ranges)
        run_all(self._registered(requests, verify_pass.serve), requests, self._threads)
        report = verify_pass.report()
        failures = report.report()
        if twin_of is None or not failures:
            return failures
        return self._verify_twins([each for each in ranges if report.concerns(each.payload)], report, twin_of)

    def fetch(self, ranges: Iterable[RangeRead], lender: Lender | None = None) -> None:
        """Read every range to its destination.

        Args:
            ranges: each with one destination.
            lender: of memory for bytes that are not read directly into place; None for buffers of our own.

        Raises:
            ValueError: a range has not exactly one destination, or is too long for `take`; nothing was read.
            CorruptCheckpointError: bytes differ from their checksums; read twice, or verified before.
            EOFError: a file has become shorter; the message names it.
            OSError: storage failed; the error names the file.
        """
        ranges = [self._whole(each) for each in ranges] if self._instead else list(ranges)
        check_destinations(ranges)
        for each in ranges:
            if each.take is not None and each.start == each.stop:
                each.take(memoryview(bytearray()))
        if self._reads_in_place:
            self._limits = self._limits.shared_by(self._threads, sum(each.size_bytes for each in ranges))
        requests = self._plan_fetch(ranges)
        serve = partial(deliver, files=self._files, buffers=lender or self._buffers)
        run_all(self._registered(requests, serve), requests, self._threads)

    def close(self) -> None:
        """Close all files and drop kept bytes; harmless when repeated."""
        self._files.close()

    def _probe(self, ranges: Sequence[RangeRead]) -> None:
        """Read a byte of every file, so that what is archived or denied fails first."""
        paths = {each.payload.path: 1 for each in ranges if each.payload.size_bytes}
        self._files.begin(paths)

        def read(path: str) -> None:
            try:
                self._files.at(path).read_into(0, memoryview(bytearray(1)))
            finally:
                self._files.done(path)

        run_all(read, list(paths), self._threads)

    def _plan_verify(self, ranges: Iterable[RangeRead]) -> tuple[VerifyPass, Sequence[Request]]:
        self._has_verified = True
        verify_pass = VerifyPass(self._files, self._buffers, self._steps)
        return verify_pass, verify_pass.plan(ranges, self._limits)

    def _verify_twins(
        self, damaged: Sequence[RangeRead], report: VerifyReport, twin_of: Callable[[str], str | None]
    ) -> list[FileFailure]:
        """Compare damaged payloads in the twins of their files; see `verify`."""
        failures = report.report()
        twins = {path: twin_of(path) for path in {each.payload.path for each in damaged}}
        moved = [
            replace(each, payload=replace(each.payload, path=twin))
            for each in damaged
            if (twin := twins[each.payload.path]) is not None
        ]
        verify_pass, requests = self._plan_verify(moved)
        run_all(self._registered(requests, verify_pass.serve), requests, self._threads)
        second = verify_pass.report()
        without = report.has_unverifiable or None in twins.values()
        if without or any(second.concerns(each.payload) for each in moved):
            return failures + second.report()
        for each, instead in zip(damaged, moved, strict=True):
            self._instead[each.payload.path, each.payload.offset] = instead.payload
        return [replace(failure, twin=str(twins[failure.path])) for failure in failures]

    def _whole(self, read: RangeRead) -> RangeRead:
        """Return a read with its payload where it is whole."""
        instead = self._instead.get((read.payload.path, read.payload.offset))
        return read if instead is None else replace(read, payload=instead)

    def _plan_fetch(self, ranges: Sequence[RangeRead]) -> list[Request]:
        # A file that stayed open is the verified one, even if its name was reused.
        if not self._has_verified or (self._rereads and not self._files.reopens):
            return plan_unverified(ranges, self._limits)
        self._files.begin({each.payload.path: 0 for each in ranges})
        plan = VerifiedPlan(
            files=self._files, crcs=self._crc32, limits=self._limits, in_place=self._on_arrival
        )
        return plan.requests(ranges)

    def _crc32(self, piece: Piece) -> int | None:
        return self._steps.get(piece.identity) if piece.crc32 is None else piece.crc32

    def _registered(
        self, requests: Sequence[Request], serve: Callable[[Request], None]
    ) -> Callable[[Request], None]:
        """Register the requests of a pass; return `serve` with closing of finished files."""
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
