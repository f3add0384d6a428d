"""Pass 2: bytes go where they are wanted."""

from __future__ import annotations

from ckpt_core.checksums import crc32
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.reading._buffers import Buffers
from ckpt_core.reading._files import Files
from ckpt_core.reading._findings import Findings
from ckpt_core.reading._requests import Order, Request


def deliver(request: Request, files: Files, buffers: Buffers) -> None:
    """Serve one request; called from several threads at once.

    Raises:
        CorruptCheckpointError: the bytes are not what their checksum promises; none of them were delivered.
    """
    file = files.at(request.path)
    if request.direct:
        (order,) = request.orders
        assert order.into is not None
        file.read_into(order.first, order.into)
        return
    with buffers.lend(request.start, request.stop - request.start) as buffer:
        file.read_into(request.start, buffer)
        _compare(request, buffer)
        for order in request.orders:
            _hand_over(order, buffer[order.first - request.start : order.last - request.start])


def _compare(request: Request, buffer: memoryview) -> None:
    findings = Findings()
    for order in request.orders:
        for piece in order.pieces:
            start = piece.file_start - request.start
            found = crc32(buffer[start : start + piece.stop - piece.start])
            if piece.crc32 not in {None, found}:
                findings.add_changed(piece, found)
    if failures := findings.report():
        raise CorruptCheckpointError(
            f"{failures[0]}; it was whole when it was verified a moment ago, so something else writes to "
            "this checkpoint, or the storage is failing",
            failures=failures,
        )


def _hand_over(order: Order, content: memoryview) -> None:
    if order.into is not None:
        order.into[:] = content
    elif order.take is not None:
        order.take(content)
