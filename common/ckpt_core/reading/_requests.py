"""Requests: neighbouring ranges of a file in one read, at most a buffer long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from ckpt_core.reading._buffers import NETWORK_REQUEST_BYTES, REQUEST_BYTES
from ckpt_core.reading._payloads import Payload, RangeRead


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


def is_verifiable(payload: Payload) -> bool:
    """Return whether the payload has a checksum."""
    return payload.crc32 is not None or bool(payload.block_crcs)


def is_comparable_alone(payload: Payload) -> bool:
    """Return whether every request of the payload can be compared by itself."""
    return bool(payload.block_crcs) or (payload.crc32 is not None and payload.size_bytes <= REQUEST_BYTES)


def pieces_around(payload: Payload, ranges: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the checksummed pieces that some of the ranges touch, once each, in order."""
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
    """Yield the piece, or its steps if it is larger than a request."""
    if piece.stop - piece.start <= REQUEST_BYTES:
        yield piece
        return
    for start in range(piece.start, piece.stop, REQUEST_BYTES):
        yield Piece(piece.payload, start, min(start + REQUEST_BYTES, piece.stop), None)


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


class Request(NamedTuple):
    """Bytes `start` to `stop` of a file, read in one call.

    `direct`: into the places of its orders.
    """

    path: str
    start: int
    stop: int
    orders: Sequence[Order]
    direct: bool = False


class VerifyPlan(NamedTuple):
    """The plan of pass 1; `large` lists the pieces that are read in steps."""

    requests: Sequence[Request]
    large: Sequence[Piece]
    unverifiable: Sequence[Payload]


def plan_verify(ranges: Iterable[RangeRead], limits: Limits) -> VerifyPlan:
    """Plan to read every piece that a range touches, once."""
    requests: list[Request] = []
    large: list[Piece] = []
    unverifiable: list[Payload] = []
    for path, in_file in by_path(ranges):
        orders: list[Order] = []
        for payload, spans in _by_payload(in_file):
            if not is_verifiable(payload):
                unverifiable.append(payload)
                continue
            for piece in pieces_around(payload, spans):
                if piece.stop - piece.start > REQUEST_BYTES:
                    large.append(piece)
                orders.extend(Order(step.file_start, step.file_stop, (step,)) for step in steps_of(piece))
        requests.extend(joined(path, orders, limits.gap_bytes, limits.verified_bytes))
    return VerifyPlan(requests, large, unverifiable)


def by_path(ranges: Iterable[RangeRead]) -> list[tuple[str, list[RangeRead]]]:
    """Group non-empty ranges by file, sorted by path and position."""
    files: dict[str, list[RangeRead]] = {}
    for each in ranges:
        if each.start < each.stop:
            files.setdefault(each.payload.path, []).append(each)
    for in_file in files.values():
        in_file.sort(key=lambda each: each.payload.offset + each.start)
    return sorted(files.items())


def joined(
    path: str, orders: Iterable[Order], gap_bytes: int, most_bytes: int | None = None
) -> Iterator[Request]:
    """Yield the requests for the orders of one file.

    Each is of at most `most_bytes`; None for `REQUEST_BYTES`.
    """
    most_bytes = most_bytes or REQUEST_BYTES
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


def _by_payload(ranges: Iterable[RangeRead]) -> list[tuple[Payload, list[tuple[int, int]]]]:
    """Group the ranges of one file by payload, sorted by position."""
    payloads: dict[tuple[int, int, int], tuple[Payload, list[tuple[int, int]]]] = {}
    for each in ranges:
        payload = each.payload
        # The payload itself is no key: all its block checksums would be hashed.
        crc32 = -1 if payload.crc32 is None else payload.crc32
        identity = payload.offset, payload.size_bytes, crc32
        payloads.setdefault(identity, (payload, []))[1].append((each.start, each.stop))
    return [payloads[identity] for identity in sorted(payloads)]
