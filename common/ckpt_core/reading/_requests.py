"""Which ranges of files are read in one go: neighbours together, nothing larger than a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from ckpt_core.reading._buffers import REQUEST_BYTES
from ckpt_core.reading._payloads import Payload, RangeRead


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a payload.

    `crc32` is None in a step of a larger piece: only when all steps are read can they be compared.
    """

    payload: Payload
    start: int
    stop: int
    crc32: int | None

    @property
    def file_start(self) -> int:
        """Where it starts in the file."""
        return self.payload.offset + self.start

    @property
    def file_stop(self) -> int:
        """Where it ends in the file."""
        return self.payload.offset + self.stop

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells it from other pieces of the checkpoint."""
        return self.payload.path, self.payload.offset, self.start


def is_verifiable(payload: Payload) -> bool:
    """Whether there is any checksum to go by."""
    return payload.crc32 is not None or bool(payload.block_crcs)


def pieces_around(payload: Payload, ranges: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """The pieces with a checksum that some of the ranges touch, each once, in order."""
    if not payload.block_crcs:
        yield Piece(payload, 0, payload.size_bytes, payload.crc32)
        return
    size, end = payload.block_bytes, payload.size_bytes
    next_block = 0
    for start, stop in sorted(ranges):
        last = -(-stop // size)
        for block in range(max(next_block, start // size), last):
            yield Piece(payload, block * size, min((block + 1) * size, end), payload.block_crcs[block])
        next_block = max(next_block, last)


def steps_of(piece: Piece) -> Iterator[Piece]:
    """The piece itself, or what it is read by if it is larger than a request."""
    if piece.stop - piece.start <= REQUEST_BYTES:
        yield piece
        return
    for start in range(piece.start, piece.stop, REQUEST_BYTES):
        yield Piece(piece.payload, start, min(start + REQUEST_BYTES, piece.stop), None)


class Limits(NamedTuple):
    """What to read together, in bytes."""

    gap_bytes: int
    """Neighbours this close are one request; what lies between is read in vain."""
    copied_bytes: int
    """Up to this length a range shares a request, and is copied; longer ones are read straight into place."""


MEMORY_LIMITS: Final = Limits(gap_bytes=16 << 10, copied_bytes=64 << 10)
"""Where a request costs microseconds. The gap bridges a zip header, not a small tensor that others read."""
NETWORK_LIMITS: Final = Limits(gap_bytes=64 << 10, copied_bytes=1 << 20)
"""Where a request costs milliseconds."""


class Order(NamedTuple):
    """Bytes `start` to `stop` of a file, to be compared with the checksums of `pieces`, then delivered.

    What is delivered are bytes `first` to `last` of the file: to `into`, which is as long, or to `take`.
    """

    start: int
    stop: int
    pieces: Sequence[Piece] = ()
    first: int = 0
    last: int = 0
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None


class Request(NamedTuple):
    """Bytes `start` to `stop` of a file, read in one go; straight to where they are wanted if `direct`."""

    path: str
    start: int
    stop: int
    orders: Sequence[Order]
    direct: bool = False


class VerifyPlan(NamedTuple):
    """What pass 1 reads; `large` are the pieces of which only steps are read at a time."""

    requests: Sequence[Request]
    large: Sequence[Piece]
    unverifiable: Sequence[Payload]


def plan_verify(wanted: Iterable[RangeRead], limits: Limits) -> VerifyPlan:
    """Read every piece that is touched by a range once."""
    requests: list[Request] = []
    large: list[Piece] = []
    unverifiable: list[Payload] = []
    for path, ranges in by_path(wanted):
        orders: list[Order] = []
        for payload, spans in _by_payload(ranges):
            if not is_verifiable(payload):
                unverifiable.append(payload)
                continue
            for piece in pieces_around(payload, spans):
                if piece.stop - piece.start > REQUEST_BYTES:
                    large.append(piece)
                orders.extend(Order(step.file_start, step.file_stop, (step,)) for step in steps_of(piece))
        requests.extend(joined(path, orders, limits.gap_bytes))
    return VerifyPlan(requests, large, unverifiable)


def by_path(wanted: Iterable[RangeRead]) -> list[tuple[str, list[RangeRead]]]:
    """The ranges of each file, without empty ones; paths and ranges in order."""
    files: dict[str, list[RangeRead]] = {}
    for each in wanted:
        if each.start < each.stop:
            files.setdefault(each.payload.path, []).append(each)
    for ranges in files.values():
        ranges.sort(key=lambda each: each.payload.offset + each.start)
    return sorted(files.items())


def joined(path: str, orders: Iterable[Order], gap_bytes: int) -> Iterator[Request]:
    """Requests for orders of one file."""
    pending: list[Order] = []
    start = stop = 0
    for order in sorted(orders, key=itemgetter(0)):
        if pending and (order.start - stop > gap_bytes or order.stop - start > REQUEST_BYTES):
            yield Request(path, start, stop, pending)
            pending = []
        if not pending:
            start = stop = order.start
        stop = max(stop, order.stop)
        pending.append(order)
    if pending:
        yield Request(path, start, stop, pending)


def _by_payload(ranges: Iterable[RangeRead]) -> list[tuple[Payload, list[tuple[int, int]]]]:
    """The ranges of each payload of one file; payloads in order."""
    payloads: dict[tuple[int, int, int], tuple[Payload, list[tuple[int, int]]]] = {}
    for each in ranges:
        payload = each.payload
        # Not the payload itself, whose block checksums would all be hashed.
        crc32 = -1 if payload.crc32 is None else payload.crc32
        place = payload.offset, payload.size_bytes, crc32
        payloads.setdefault(place, (payload, []))[1].append((each.start, each.stop))
    return [payloads[place] for place in sorted(payloads)]
