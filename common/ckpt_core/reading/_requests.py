"""Which ranges of files are read in one go: neighbours together, nothing larger than a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from ckpt_core.reading._buffers import REQUEST_BYTES
from ckpt_core.reading._pieces import Piece, is_verifiable, pieces_around, steps_of
from ckpt_core.reading._types import Payload, Wanted


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


def plan_verify(wanted: Iterable[Wanted], limits: Limits) -> VerifyPlan:
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


def by_path(wanted: Iterable[Wanted]) -> list[tuple[str, list[Wanted]]]:
    """The ranges of each file, without empty ones; paths and ranges in order."""
    files: dict[str, list[Wanted]] = {}
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


def _by_payload(ranges: Iterable[Wanted]) -> list[tuple[Payload, list[tuple[int, int]]]]:
    """The ranges of each payload of one file; payloads in order."""
    payloads: dict[tuple[int, int, int], tuple[Payload, list[tuple[int, int]]]] = {}
    for each in ranges:
        payload = each.payload
        # Not the payload itself, whose block checksums would all be hashed.
        crc32 = -1 if payload.crc32 is None else payload.crc32
        place = payload.offset, payload.size_bytes, crc32
        payloads.setdefault(place, (payload, []))[1].append((each.start, each.stop))
    return [payloads[place] for place in sorted(payloads)]
