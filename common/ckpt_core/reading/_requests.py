"""Requests: neighbouring ranges of a file in one read, at most a buffer long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from ckpt_core.reading._buffers import NETWORK_REQUEST_BYTES, REQUEST_BYTES
from ckpt_core.reading._payloads import MAX_TAKE_BYTES, Payload, RangeRead

_ROUNDS: Final = 2
_MOST_IN_PLACE_BYTES: Final = 64 << 20


class Limits(NamedTuple):
    """Limits for reading ranges together, in bytes."""

    gap_bytes: int
    """Ranges at most this far apart are one request; the bytes between are read and dropped."""
    copied_bytes: int
    """Ranges up to this length share a request and are copied; longer ones are read directly into place."""
    verified_bytes: int
    """Largest request of the verify pass."""
    direct_bytes: int
    """Longest range that is read directly into place by one request."""
    spread_bytes: int
    """Largest request that is read directly into several places; 0 for none."""

    def shared_by(self, threads: int, total_bytes: int) -> Limits:
        """Return the limits for few requests into place, with work for every thread."""
        most = min(max(total_bytes // (_ROUNDS * threads), self.spread_bytes), _MOST_IN_PLACE_BYTES)
        return self._replace(direct_bytes=most, spread_bytes=most)


MEMORY_LIMITS: Final = Limits(
    gap_bytes=16 << 10,
    copied_bytes=64 << 10,
    verified_bytes=REQUEST_BYTES,
    direct_bytes=16 << 20,
    spread_bytes=0,
)
"""Where a request costs microseconds. The gap covers a zip header, not a small tensor of another rank."""
NETWORK_LIMITS: Final = Limits(
    gap_bytes=64 << 10,
    copied_bytes=1 << 20,
    verified_bytes=NETWORK_REQUEST_BYTES,
    direct_bytes=NETWORK_REQUEST_BYTES,
    spread_bytes=16 << 20,
)
"""Where a request costs milliseconds, and its client may need as much memory as it asks for."""


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a payload, with their checksum.

    `crc32` is None for a step of a larger piece, which is compared after all its steps are read.
    """

    payload: Payload
    start: int
    stop: int
    crc32: int | None

    @property
    def file_start(self) -> int:
        """Its first byte in the file."""
        return self.payload.offset + self.start

    @property
    def file_stop(self) -> int:
        """The byte in the file after its last."""
        return self.payload.offset + self.stop

    @property
    def identity(self) -> tuple[str, int, int]:
        """The identity of the piece within the checkpoint."""
        return self.payload.path, self.payload.offset, self.start

    @property
    def steps(self) -> Sequence[Piece]:
        """The piece itself, or its steps if it is larger than a request."""
        if self.stop - self.start <= REQUEST_BYTES:
            return [self]
        starts = range(self.start, self.stop, REQUEST_BYTES)
        return [Piece(self.payload, at, min(at + REQUEST_BYTES, self.stop), None) for at in starts]


class Order(NamedTuple):
    """Bytes `start` to `stop` of a file: compare with `pieces`, then deliver.

    Bytes `first` to `last` of the file are delivered, to `into` of the same length, or to `take`.
    """

    start: int
    stop: int
    pieces: Sequence[Piece] = ()
    first: int = 0
    last: int = 0
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing but what has a place in memory is read."""
        return self.into is not None and (self.first, self.last) == (self.start, self.stop)


class Request(NamedTuple):
    """Bytes `start` to `stop` of a file, read in one call.

    `direct`: into the places of its orders.
    """

    path: str
    start: int
    stop: int
    orders: Sequence[Order]
    direct: bool = False

    @property
    def places(self) -> list[memoryview]:
        """The places of a direct request, and memory for the bytes between them."""
        found: list[memoryview] = []
        position = self.start
        for order in self.orders:
            assert order.into is not None
            if order.first > position:
                found.append(memoryview(bytearray(order.first - position)))
            found.append(order.into)
            position = order.last
        return found


def is_comparable_alone(payload: Payload) -> bool:
    """Return whether every request of the payload can be compared by itself."""
    return bool(payload.block_crcs) or (payload.crc32 is not None and payload.size_bytes <= REQUEST_BYTES)


def pieces_of(ranges: Iterable[RangeRead]) -> tuple[list[Piece], list[Payload]]:
    """Return every checksummed piece that a range touches, once; and payloads without."""
    payloads: dict[tuple[str, int, int, int], tuple[Payload, list[tuple[int, int]]]] = {}
    for each in ranges:
        payload = each.payload
        # The payload itself is no key: all its block checksums would be hashed.
        crc32 = -1 if payload.crc32 is None else payload.crc32
        identity = payload.path, payload.offset, payload.size_bytes, crc32
        if each.start < each.stop:
            payloads.setdefault(identity, (payload, []))[1].append((each.start, each.stop))
    found: list[Piece] = []
    bare: list[Payload] = []
    for payload, spans in payloads.values():
        if payload.block_crcs or payload.crc32 is not None:
            found.extend(_around(payload, spans))
        else:
            bare.append(payload)
    return found, bare


def _around(payload: Payload, spans: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the pieces of a payload that some of the spans touch, once each, in order."""
    if not payload.block_crcs:
        yield Piece(payload, 0, payload.size_bytes, payload.crc32)
        return
    size, end = payload.block_bytes, payload.size_bytes
    next_block = 0
    for start, stop in sorted(spans):
        last = -(-stop // size)
        for block in range(max(next_block, start // size), last):
            yield Piece(payload, block * size, min((block + 1) * size, end), payload.block_crcs[block])
        next_block = max(next_block, last)


def plan_verify(pieces: Iterable[Piece], limits: Limits) -> list[Request]:
    """Plan to read every piece once."""
    files: dict[str, list[Order]] = {}
    for piece in pieces:
        orders = (Order(step.file_start, step.file_stop, (step,)) for step in piece.steps)
        files.setdefault(piece.payload.path, []).extend(orders)
    return [
        request
        for path, orders in sorted(files.items())
        for request in _joined(path, orders, limits.gap_bytes, limits.verified_bytes)
    ]


def plan_fetch(
    ranges: Iterable[RangeRead],
    limits: Limits,
    *,
    compared: bool,
    in_place: bool,
    is_held: Callable[[str, int, int], bool],
) -> list[Request]:
    """Plan to read every range to its destination.

    Args:
        ranges: each with one destination.
        limits: see there.
        compared: whether the ranges are read and compared in whole pieces, else exactly they are read.
        in_place: whether they are compared where they belong, which saves a copy, and not before.
        is_held: whether bytes of a file are in memory, and known to be intact.
    """
    requests: list[Request] = []
    for path, in_file in _by_path(ranges):
        copied: list[Order] = []
        spread: list[Order] = []
        for order in (order for each in in_file for order in _orders(each, limits, compared, in_place)):
            if order.pieces and is_held(path, order.first, order.last):
                alone = order._replace(start=order.first, stop=order.last, pieces=())
                requests.append(_direct_if_alone(Request(path, alone.start, alone.stop, [alone])))
            elif not order.is_whole or (order.pieces and not in_place):
                copied.append(order)
            elif limits.spread_bytes:
                spread.append(order)
            elif order.stop - order.start > limits.copied_bytes:
                requests.append(Request(path, order.start, order.stop, [order], direct=True))
            else:
                copied.append(order)
        requests.extend(map(_direct_if_alone, _joined(path, copied, limits.gap_bytes, REQUEST_BYTES)))
        requests.extend(_spread(path, spread, limits))
    # All kinds in file order, which is fastest on disks.
    return sorted(requests, key=itemgetter(0, 1))


def check_destinations(ranges: Iterable[RangeRead]) -> None:
    """Check that every range has exactly one destination."""
    for each in ranges:
        where = f"bytes {each.start} to {each.stop} of {each.payload.key!r}"
        if (each.into is None) == (each.take is None):
            raise ValueError(f"{where}: give either `into` or `take` as their destination")
        if each.take is not None and each.size_bytes > MAX_TAKE_BYTES:
            raise ValueError(
                f"{where} are too many for one `take`; take them in parts of {MAX_TAKE_BYTES} bytes"
            )


def _by_path(ranges: Iterable[RangeRead]) -> list[tuple[str, list[RangeRead]]]:
    """Group non-empty ranges by file, sorted by path."""
    files: dict[str, list[RangeRead]] = {}
    for each in ranges:
        if each.start < each.stop:
            files.setdefault(each.payload.path, []).append(each)
    return sorted(files.items())


def _orders(read: RangeRead, limits: Limits, compared: bool, in_place: bool) -> Iterator[Order]:  # noqa: FBT001
    """Yield the orders for one range, cut to the size of requests."""
    first = read.payload.offset + read.start
    last = first + read.size_bytes
    steps = [step for piece in (pieces_of([read])[0] if compared else ()) for step in piece.steps]
    pieces = [step for step in steps if step.start < read.stop and read.start < step.stop]
    if read.into is None:
        start, stop = (pieces[0].file_start, pieces[-1].file_stop) if pieces else (first, last)
        yield Order(start, stop, pieces, first, last, None, read.take)
        return
    into = read.into if read.into.ndim == 1 and read.into.format == "B" else read.into.cast("B")
    most = limits.direct_bytes
    runs: Iterable[tuple[int, int, Sequence[Piece]]]
    if pieces:
        runs = _runs(pieces, first, last, most if in_place else 0)
    else:
        runs = ((start, min(start + most, last), ()) for start in range(first, last, most))
    for start, stop, of_run in runs:
        begin, end = max(first, start), min(last, stop)
        yield Order(start, stop, of_run, begin, end, into[begin - first : end - first])


def _runs(
    pieces: Sequence[Piece], first: int, last: int, most: int
) -> Iterator[tuple[int, int, Sequence[Piece]]]:
    """Yield pieces one by one, or those inside the range in runs of `most` bytes."""
    run: list[Piece] = []
    for piece in pieces:
        inside = first <= piece.file_start and piece.file_stop <= last
        if run and not (inside and piece.file_stop - run[0].file_start <= most):
            yield run[0].file_start, run[-1].file_stop, run
            run = []
        run.append(piece)
        if not inside:
            yield piece.file_start, piece.file_stop, run
            run = []
    if run:
        yield run[0].file_start, run[-1].file_stop, run


def _joined(path: str, orders: Iterable[Order], gap_bytes: int, most_bytes: int) -> Iterator[Request]:
    """Yield the requests for the orders of one file, through buffers."""
    pending: list[Order] = []
    start = stop = 0
    for order in sorted(orders, key=itemgetter(0)):
        if pending and (order.start - stop > gap_bytes or order.stop - start > most_bytes):
            yield Request(path, start, stop, pending)
            pending = []
        if not pending:
            start = stop = order.start
        stop = max(stop, order.stop)
        pending.append(order)
    if pending:
        yield Request(path, start, stop, pending)


def _spread(path: str, orders: Sequence[Order], limits: Limits) -> Iterator[Request]:
    """Yield requests that read neighbours directly into place, each into its own."""
    run: list[Order] = []
    for order in sorted(orders, key=itemgetter(0)):
        gap = order.start - run[-1].stop if run else 0
        if run and not (0 <= gap <= limits.gap_bytes and order.stop - run[0].start <= limits.spread_bytes):
            yield Request(path, run[0].start, run[-1].stop, run, direct=True)
            run = []
        run.append(order)
    if run:
        yield Request(path, run[0].start, run[-1].stop, run, direct=True)


def _direct_if_alone(request: Request) -> Request:
    """Read directly into place, if nothing else is to be filled or compared."""
    alone = len(request.orders) == 1 and request.orders[0].is_whole and not request.orders[0].pieces
    return request._replace(direct=True) if alone else request
