"""The two passes of a read: verify all pieces, then deliver the bytes."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, final

from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.formats.checksums import combine_crc32, crc32
from ckpt_core.reading._buffers import Buffers, Lender
from ckpt_core.reading._findings import VerifyReport
from ckpt_core.reading._open_files import OpenFiles
from ckpt_core.reading._payloads import RangeRead
from ckpt_core.reading._requests import Limits, Order, Piece, Request, plan_verify, steps_of
from ckpt_core.storage import ForeignFileError, SpreadReader

_TRIES: Final = 2


def deliver(request: Request, files: OpenFiles, buffers: Lender) -> None:
    """Serve one request; called from several threads.

    Raises:
        CorruptCheckpointError: the bytes differ from their checksum, also when read again; none of them were
            delivered, unless the request is direct.
    """
    file = files.at(request.path)
    if request.direct:
        _read_intact(request, file, _places(request))
        return
    with buffers.lend(request.start, request.stop - request.start) as buffer:
        _read_intact(request, file, [buffer])
        for order in request.orders:
            _deliver(order, buffer[order.first - request.start : order.last - request.start])


def _places(request: Request) -> list[memoryview]:
    """Return the places of a direct request, and memory for the bytes between them."""
    found: list[memoryview] = []
    position = request.start
    for order in request.orders:
        assert order.into is not None
        if order.first > position:
            found.append(memoryview(bytearray(order.first - position)))
        found.append(order.into)
        position = order.last
    return found


def _read_intact(request: Request, file: SpreadReader, buffers: Sequence[memoryview]) -> None:
    """Read a request, and once more if the bytes differ: a transfer may have failed."""
    failures: list[FileFailure] = []
    for _ in range(_TRIES):
        file.read_spread(request.start, buffers)
        failures = _compare(request, buffers)
        if not failures:
            return
    raise CorruptCheckpointError(
        f"{failures[0]}; it was read {_TRIES} times. The storage is failing, or another program writes to "
        "this checkpoint",
        failures=failures,
    )


def _compare(request: Request, buffers: Sequence[memoryview]) -> list[FileFailure]:
    report = VerifyReport()
    for order in request.orders:
        memory, at = (order.into, order.start) if request.direct else (buffers[0], request.start)
        assert memory is not None
        for piece in order.pieces:
            start = piece.file_start - at
            found = crc32(memory[start : start + piece.stop - piece.start])
            if piece.crc32 not in {None, found}:
                report.add_changed(piece, found)
    return report.report()


def _deliver(order: Order, content: memoryview) -> None:
    if order.into is not None:
        order.into[:] = content
    elif order.take is not None:
        order.take(content)


@final
class VerifyPass:
    """One verification: `plan`, `serve` for every request, then `report`.

    Concurrency: `serve` may be called from several threads.
    """

    def __init__(self, files: OpenFiles, buffers: Buffers, steps: dict[tuple[str, int, int], int]) -> None:
        """Store in `steps` the checksums of the steps of pieces too large for a buffer."""
        self._files = files
        self._buffers = buffers
        self._steps = steps
        self._report = VerifyReport()
        self._large: Sequence[Piece] = ()

    def plan(self, ranges: Iterable[RangeRead], limits: Limits) -> Sequence[Request]:
        """Plan the requests of the pass."""
        requests, self._large, unverifiable = plan_verify(ranges, limits)
        for payload in unverifiable:
            self._report.add_unverifiable(payload)
        for piece in self._large:
            for step in steps_of(piece):
                self._steps.pop(step.identity, None)
        return requests

    def serve(self, request: Request) -> None:
        """Read and compare; record damage, raise any other error."""
        if self._report.is_missing(request.path):
            return
        try:
            self._compare(request)
        except FileNotFoundError:
            self._report.add_missing(request.path)
        except ForeignFileError as error:
            self._report.add_missing(request.path, str(error.strerror))
        except (EOFError, OSError) as error:
            # A block that the device cannot read is lost; any other error may be temporary.
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            self._narrow_down(request, error)

    def report(self) -> VerifyReport:
        """Return the report, once every request has been served."""
        for piece in self._large:
            self._compare_steps(piece)
        return self._report

    def _compare(self, request: Request) -> None:
        kept = self._files.kept(request.path)
        room = None if kept is None else kept.room(request.start, request.stop - request.start)
        with self._memory(request, room) as buffer:
            changed: list[tuple[Piece, int]] = []
            for _ in range(_TRIES):
                self._files.at(request.path).read_into(request.start, buffer)
                changed = self._changed(request, buffer)
                if not changed:
                    break
            for piece, found in changed:
                self._report.add_changed(piece, found)
            if kept is not None and room is not None and not changed:
                kept.keep(request.start, room)

    def _memory(self, request: Request, room: memoryview | None) -> AbstractContextManager[memoryview]:
        """Return where to read a request: where its bytes are kept, or in a buffer."""
        if room is not None:
            return nullcontext(room)
        return self._buffers.lend(request.start, request.stop - request.start)

    def _changed(self, request: Request, content: memoryview) -> list[tuple[Piece, int]]:
        """Return the pieces that differ, each with the checksum of its bytes.

        Whether a step is intact is known only later.
        """
        changed: list[tuple[Piece, int]] = []
        for order in request.orders:
            found = crc32(content[order.start - request.start : order.stop - request.start])
            for piece in order.pieces:
                if piece.crc32 is None:
                    self._steps[piece.identity] = found
                elif found != piece.crc32:
                    changed.append((piece, found))
        return changed

    def _narrow_down(self, request: Request, error: EOFError | OSError) -> None:
        """Read each piece by itself, so that readable ones are not reported."""
        if len(request.orders) > 1:
            for order in request.orders:
                self.serve(Request(request.path, order.start, order.stop, [order]))
            return
        (piece,) = request.orders[0].pieces
        if isinstance(error, OSError):
            self._report.add_unreadable(piece, error)
        else:
            self._report.add_cut(piece, self._files.at(request.path).size_bytes)

    def _compare_steps(self, piece: Piece) -> None:
        """Combine the checksums of the steps; if one is missing, its failure is recorded."""
        found = 0
        for step in steps_of(piece):
            crc = self._steps.get(step.identity)
            if crc is None:
                return
            found = combine_crc32(found, crc, step.stop - step.start)
        if found != piece.crc32:
            self._report.add_changed(piece, found)
