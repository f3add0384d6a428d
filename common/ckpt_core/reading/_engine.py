"""The reading engine: a verify pass, then a fetch pass."""

from __future__ import annotations

import errno
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final, Self, final

from ckpt_core.crew import cpus, run_all
from ckpt_core.errors import CorruptCheckpointError, FileFailure, first_of
from ckpt_core.formats.checksums import combine_crc32, crc32
from ckpt_core.formats.codec import damage
from ckpt_core.reading._data_files import Buffers, DataFile, DataFiles, Lender
from ckpt_core.reading._requests import (
    MEMORY_LIMITS,
    NETWORK_LIMITS,
    Payload,
    Piece,
    RangeRead,
    Request,
    is_comparable_alone,
    pieces_of,
    plan_fetch,
    plan_verify,
)
from ckpt_core.storage import ForeignFileError, Storage

_LOCAL_THREADS: Final = 4  # where bytes come from a page cache
_REMOTE_THREADS: Final = 12  # where every request waits for a network
_ROUNDS: Final = 2
"""How many of the largest requests into place each thread gets at least."""
_MOST_IN_PLACE_BYTES: Final = 64 << 20
_NONE: Final[Mapping[tuple[str, int, int], int]] = {}
_KEEP_BYTES: Final = 256 << 20
_TRIES: Final = 2
_MAX_NAMED: Final = 3
"""The most ranges or tensors that one problem lists; a lost file has thousands."""


@final
class Engine:
    """Reader of one checkpoint: `verify` changes only buffers, then `fetch` delivers.

    Where the storage rereads from memory, the second pass finds the bytes there. Elsewhere the first pass
    keeps up to `keep_bytes`. Bytes that must be read twice are verified twice; so are those of files beyond
    the limit of open files, on any storage. A `fetch` without a `verify` delivers bytes unverified, one after
    a `verify` with `on_arrival` compares them where they belong.

    Extra memory: 4 MiB for each thread, and where the storage does not reread from memory 8 MiB for each
    thread and `keep_bytes`.

    Concurrency: one pass at a time; a pass reads on its own threads, which have ended when it returns.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        threads: int | None = None,
        keep_bytes: int = _KEEP_BYTES,
        once: bool = False,
    ) -> None:
        is_near = storage.rereads_from_memory
        self._rereads = is_near and not once  # else `on_arrival` is heeded there, too
        self._reads_in_place = storage.reads_in_place and not is_near
        self._threads = threads or (min(_LOCAL_THREADS, cpus()) if is_near else _REMOTE_THREADS)
        self._limits = MEMORY_LIMITS if self._rereads else NETWORK_LIMITS
        self._files = DataFiles(storage, directory, keep_bytes)
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
        self._files.close()

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
        ranges = list(ranges)
        if on_arrival and not self._rereads:
            self._on_arrival = True
            # A byte of every file, so that what is archived or denied fails first.
            paths = {each.payload.path for each in ranges if each.payload.size_bytes}
            probe = [memoryview(bytearray(1))]
            self._run(
                [Request(path, 0, 1, ()) for path in paths],
                lambda request, file: file.read(request.start, probe),
            )
            ranges = [each for each in ranges if not is_comparable_alone(each.payload)]
        report = self._verified(ranges)
        failures = report.failures()
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
        ranges = list(ranges)
        for each in ranges:
            each.check_destination()
        if self._instead:
            ranges = [
                each if whole is None else replace(each, payload=whole)
                for each in ranges
                for whole in [self._instead.get((each.payload.path, each.payload.offset))]
            ]
        for each in ranges:
            if each.take is not None and each.start == each.stop:
                each.take(memoryview(bytearray()))
        if self._reads_in_place:  # few requests, with work for every thread
            share = sum(each.size_bytes for each in ranges) // (_ROUNDS * self._threads)
            most = min(max(share, self._limits.spread_bytes), _MOST_IN_PLACE_BYTES)
            self._limits = self._limits._replace(direct_bytes=most, spread_bytes=most)
        self._files.begin({each.payload.path: 0 for each in ranges})
        requests = plan_fetch(
            ranges,
            self._limits,
            # A file that stayed open is the verified one, even if its name was reused.
            compared=self._has_verified and (not self._rereads or self._files.reopens),
            in_place=self._on_arrival,
            is_held=lambda path, start, stop: self._files.at(path).holds(start, stop),
        )
        self._run(requests, partial(self._deliver, lender or self._buffers))

    def _run(self, requests: Sequence[Request], serve: Callable[[Request, DataFile], None]) -> None:
        """Serve the requests of a pass on several threads, and close finished files."""
        self._files.begin(Counter(request.path for request in requests))

        def work(request: Request) -> None:
            with self._files.served(request.path) as file:
                serve(request, file)

        run_all(work, requests, self._threads)

    def _verified(self, ranges: Iterable[RangeRead]) -> _VerifyReport:
        """Read and compare what ranges touch, in buffers."""
        self._has_verified = True
        report = _VerifyReport()
        pieces, report.unverifiable = pieces_of(ranges)
        large = [piece for piece in pieces if len(piece.steps) > 1]
        for piece in large:
            for step in piece.steps:
                self._steps.pop(step.identity, None)
        self._run(plan_verify(pieces, self._limits), partial(self._check, report))
        for piece in large:
            crcs = [(self._steps.get(step.identity), step.stop - step.start) for step in piece.steps]
            found = 0
            for crc, size in crcs:
                found = combine_crc32(found, crc or 0, size)
            # Of a step that could not be read the failure is recorded.
            if found != piece.crc32 and all(crc is not None for crc, _ in crcs):
                report.add_changed(piece, found)
        return report

    def _check(self, report: _VerifyReport, request: Request, file: DataFile) -> None:
        """Serve one request of the first pass: record damage, raise any other error."""
        with file.mapped(request.start, request.stop - request.start) as view:
            # What differs is read, as what cannot be looked at.
            if view is None or self._changed(request, view):
                for part in request.parts(self._limits.verified_bytes):
                    self._check_read(report, part, file)

    def _check_read(self, report: _VerifyReport, request: Request, file: DataFile) -> None:
        if request.path in report.missing:
            return
        size = request.stop - request.start
        room = file.room(request.start, size)
        lent = self._buffers.lend(request.start, size) if room is None else nullcontext(room)
        try:
            with lent as buffer:
                changed = self._read(request, file, [buffer])
        except (FileNotFoundError, ForeignFileError) as error:
            is_foreign = isinstance(error, ForeignFileError)
            report.missing[request.path] = str(error.strerror) if is_foreign else "missing"
        except (EOFError, OSError) as error:
            # A block that the device cannot read is lost; any other error may be temporary.
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            self._narrow_down(report, request, file, error)
        else:
            for piece, found in changed:
                report.add_changed(piece, found)
            if room is not None and not changed:
                file.keep(request.start, room)

    def _narrow_down(
        self, report: _VerifyReport, request: Request, file: DataFile, error: EOFError | OSError
    ) -> None:
        """Read each piece by itself, so that readable ones are not reported."""
        if len(request.orders) > 1:
            for order in request.orders:
                self._check_read(report, Request(request.path, order.start, order.stop, [order]), file)
        elif isinstance(error, OSError):
            report.add(request.orders[0].pieces[0], "unreadable", f"cannot be read: {error}")
        else:
            report.add_cut(request.orders[0].pieces[0], file.size_bytes)

    def _deliver(self, lender: Lender, request: Request, file: DataFile) -> None:
        """Serve one request of the second pass.

        Raises:
            CorruptCheckpointError: the device has lost them, or they differ from their checksum, also when
                read again; none of them were delivered, unless the request is direct.
        """
        if request.direct:
            self._read_intact(request, file, request.places)
            return
        with lender.lend(request.start, request.stop - request.start) as buffer:
            self._read_intact(request, file, [buffer])
            for order in request.orders:
                content = buffer[order.first - request.start : order.last - request.start]
                if order.into is not None:
                    order.into[:] = content
                elif order.take is not None:
                    order.take(content)

    def _read_intact(self, request: Request, file: DataFile, buffers: Sequence[memoryview]) -> None:
        try:
            changed = self._read(request, file, buffers, self._steps)
        except OSError as error:
            if error.errno != errno.EIO or not self._on_arrival:
                raise
            problem = f"bytes {request.start} to {request.stop} of the file cannot be read: {error}"
            raise damage(request.path, problem) from error
        if changed:
            report = _VerifyReport()
            for piece, found in changed:
                report.add_changed(piece._replace(crc32=self._steps.get(piece.identity, piece.crc32)), found)
            failures = report.failures()
            raise CorruptCheckpointError(
                f"{failures[0]}; it was read {_TRIES} times. The storage is failing, or another program "
                "writes to this checkpoint",
                failures=failures,
            )

    def _read(
        self,
        request: Request,
        file: DataFile,
        buffers: Sequence[memoryview],
        steps: Mapping[tuple[str, int, int], int] = _NONE,
    ) -> list[tuple[Piece, int]]:
        """Read a request, and once more if bytes differ: a transfer may have failed.

        Returns:
            The pieces that differ, each with the checksum of its bytes. Whether a step of the first pass is
            intact is known only later.
        """
        changed: list[tuple[Piece, int]] = []
        for _ in range(_TRIES):
            file.read(request.start, buffers)
            changed = self._changed(request, buffers[0], steps)
            if not changed:
                break
        return changed

    def _changed(
        self, request: Request, content: memoryview, steps: Mapping[tuple[str, int, int], int] = _NONE
    ) -> list[tuple[Piece, int]]:
        """Compare `content`, or where a direct request was read to.

        `steps` are the checksums from pass 1.
        """
        changed: list[tuple[Piece, int]] = []
        for order in request.orders:
            memory, at = (order.into, order.start) if request.direct else (content, request.start)
            for piece in order.pieces:
                assert memory is not None
                _, start, stop, known = piece
                found = crc32(memory[start - at : stop - at])
                if known is None and (known := steps.get(piece.identity)) is None:
                    self._steps[piece.identity] = found
                elif found != known:
                    changed.append((piece, found))
        return changed

    def _verify_twins(
        self, damaged: Sequence[RangeRead], report: _VerifyReport, twin_of: Callable[[str], str | None]
    ) -> list[FileFailure]:
        """Compare damaged payloads in the twins of their files; see `verify`."""
        failures = report.failures()
        twins = {path: twin_of(path) for path in {each.payload.path for each in damaged}}
        moved = [
            replace(each, payload=replace(each.payload, path=twin))
            for each in damaged
            if (twin := twins[each.payload.path]) is not None
        ]
        second = self._verified(moved)
        without = report.unverifiable or None in twins.values()
        if without or any(second.concerns(each.payload) for each in moved):
            return failures + second.failures()
        for each, instead in zip(damaged, moved, strict=True):
            self._instead[each.payload.path, each.payload.offset] = instead.payload
        return [replace(failure, twin=str(twins[failure.path])) for failure in failures]


@final
class _VerifyReport:
    """The problems found by all threads: one per tensor, or per lost or short file."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.missing: dict[str, str] = {}
        self.unverifiable: list[Payload] = []
        self._payloads: set[tuple[str, int]] = set()
        self._sizes: dict[str, int] = {}
        self._cut: defaultdict[str, list[Piece]] = defaultdict(list)
        self._damage: defaultdict[tuple[str, int, str], list[tuple[Piece, str]]] = defaultdict(list)

    def add_cut(self, piece: Piece, file_bytes: int) -> None:
        with self._guard:
            self._payloads.add((piece.payload.path, piece.payload.offset))
            self._sizes[piece.payload.path] = file_bytes
            self._cut[piece.payload.path].append(piece)

    def add_changed(self, piece: Piece, found: int) -> None:
        saved = f"{piece.crc32:08x} was saved"
        self.add(piece, "changed", f"differ from those that were saved: CRC-32 is {found:08x}, {saved}")

    def add(self, piece: Piece, kind: str, text: str) -> None:
        with self._guard:
            self._payloads.add((piece.payload.path, piece.payload.offset))
            self._damage[piece.payload.path, piece.payload.offset, kind].append((piece, text))

    def concerns(self, payload: Payload) -> bool:
        return payload.path in self.missing or (payload.path, payload.offset) in self._payloads

    def failures(self) -> list[FileFailure]:
        found = [(path, -1, problem) for path, problem in self.missing.items()]
        found += [(path, -1, self._cut_text(path)) for path in self._cut if path not in self.missing]
        found += [
            (p.path, p.offset, f"cannot be verified: tensor {p.key!r} has no checksum")
            for p in self.unverifiable
        ]
        for (path, offset, _), damages in self._damage.items():
            if path not in self.missing:
                damages.sort(key=lambda damage: damage[0].start)
                runs: list[tuple[int, int]] = []
                for piece, _ in damages:
                    joins = runs and piece.start <= runs[-1][1]
                    start = runs.pop()[0] if joins else piece.start
                    runs.append((start, piece.stop))
                listed = first_of([f"{start} to {stop}" for start, stop in runs], _MAX_NAMED)
                key, text = damages[0][0].payload.key, damages[0][1]
                found.append((path, offset, f"tensor {key!r}: bytes {listed} of the file {text}"))
        return [FileFailure(path=path, problem=problem) for path, _, problem in sorted(found)]

    def _cut_text(self, path: str) -> str:
        pieces = sorted(self._cut[path], key=lambda piece: piece.start)
        keys = list(dict.fromkeys(piece.payload.key for piece in pieces))
        missing = max(piece.stop for piece in pieces) - self._sizes[path]
        end = f"ends {missing} bytes too early" if missing > 0 else "became shorter while it was read"
        return f"{end}: of {first_of(list(map(repr, keys)), _MAX_NAMED)} not everything is there"
