"""What is read, in requests: neighbouring ranges of a file in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple, final

REQUEST_BYTES: Final = 4 << 20
"""Largest request that goes through a buffer, and longest range that `take` can get."""
_NETWORK_REQUEST_BYTES: Final = 8 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The raw bytes of one tensor chunk in a data file.

    Attributes:
        crc32: CRC-32 of the whole payload; None if it cannot be verified as a whole.
        block_bytes: size of the blocks with a checksum each; the last may be shorter.
        block_crcs: CRC-32s of the blocks, so that a part can be verified; empty if there are none.
    """

    path: str
    key: str
    offset: int
    size_bytes: int
    crc32: int | None
    block_bytes: int = 1 << 20
    block_crcs: Sequence[int] = ()

    @property
    def has_checksum(self) -> bool:
        return self.crc32 is not None or bool(self.block_crcs)

    def __post_init__(self) -> None:
        if self.block_crcs and len(self.block_crcs) != -(-self.size_bytes // self.block_bytes):
            raise ValueError(
                f"{self.path}: {self.key!r} has {len(self.block_crcs)} block checksums, which does not fit "
                f"{self.size_bytes} bytes in blocks of {self.block_bytes}"
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRead:
    """Bytes `start` to `stop` of a payload, with a destination unless verified.

    Attributes:
        into: writable contiguous memory of exactly `stop - start` bytes, which is read into directly.
        take: without `into`, called with the bytes, on a reading thread, once for each `RangeRead`. The bytes
            are valid during the call only. At most `REQUEST_BYTES`.
    """

    payload: Payload
    start: int
    stop: int
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.payload.size_bytes:
            raise ValueError(
                f"bytes {self.start} to {self.stop} of {self.payload.key!r} are not inside its payload of "
                f"{self.payload.size_bytes} bytes"
            )
        into = self.into
        if into is not None and (into.readonly or not into.c_contiguous or into.nbytes != self.size_bytes):
            raise ValueError(
                f"the memory for bytes {self.start} to {self.stop} of {self.payload.key!r} must be writable, "
                f"contiguous and {self.size_bytes} bytes long; it has {into.nbytes}"
            )

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def check_destination(self) -> None:
        """Check that the range has exactly one destination."""
        if (self.into is None) == (self.take is None):
            problem = "give either `into` or `take` as their destination"
        elif self.take is not None and self.size_bytes > REQUEST_BYTES:
            problem = f"too many for one `take`; take them in parts of {REQUEST_BYTES} bytes"
        else:
            return
        raise ValueError(f"bytes {self.start} to {self.stop} of {self.payload.key!r}: {problem}")


class Limits(NamedTuple):
    """Limits for reading ranges together, in bytes."""

    gap_bytes: int
    """Ranges at most this far apart are one request; the bytes between are read and dropped."""
    copied_bytes: int
    """Ranges up to this length share a request and are copied; longer ones are read directly into place."""
    verified_bytes: int
    """Largest request of the verify pass that is read."""
    direct_bytes: int
    """Longest range that is looked at where it lies, or read directly into place, by one request."""
    spread_bytes: int
    """Largest request that is read directly into several places; 0 for none."""


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
    copied_bytes=0,
    verified_bytes=_NETWORK_REQUEST_BYTES,
    direct_bytes=_NETWORK_REQUEST_BYTES,
    spread_bytes=16 << 20,
)
"""Where a request costs milliseconds, and its client may need as much memory as it asks for."""


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file, a part of a payload, with their checksum.

    `crc32` is None for a step of a larger piece, which is compared after all its steps are read.
    """

    payload: Payload
    start: int
    stop: int
    crc32: int | None

    @property
    def identity(self) -> tuple[str, int, int]:
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
    """Bytes `start` to `stop` of a file, read in one call; if `direct`, into place."""

    path: str
    start: int
    stop: int
    orders: Sequence[Order]
    direct: bool = False

    def parts(self, most_bytes: int) -> Iterable[Request]:
        """Cut it between orders, to at most so many bytes."""
        fits = self.stop - self.start <= most_bytes
        return [self] if fits else _joined(self.path, self.orders, self.stop, most_bytes)

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
    payloads: dict[tuple[str, int, int, int | None], tuple[Payload, list[tuple[int, int]]]] = {}
    for each in ranges:
        payload = each.payload
        # The payload itself is no key: all its block checksums would be hashed.
        identity = payload.path, payload.offset, payload.size_bytes, payload.crc32
        if each.start < each.stop:
            payloads.setdefault(identity, (payload, []))[1].append((each.start, each.stop))
    found: list[Piece] = []
    bare: list[Payload] = []
    for payload, spans in payloads.values():
        size, begin, next_block = payload.block_bytes, payload.offset, 0
        end = begin + payload.size_bytes
        if not payload.block_crcs:
            if payload.crc32 is None:
                bare.append(payload)
            else:
                found.append(Piece(payload, begin, end, payload.crc32))
            continue
        for start, stop in sorted(spans):
            last = -(-stop // size)
            found += [
                Piece(payload, begin + at * size, min(begin + (at + 1) * size, end), payload.block_crcs[at])
                for at in range(max(next_block, start // size), last)
            ]
            next_block = max(next_block, last)
    return found, bare


def plan_verify(pieces: Iterable[Piece], limits: Limits) -> list[Request]:
    """Plan to read every piece once."""
    files: defaultdict[str, list[Order]] = defaultdict(list)
    for piece in pieces:
        files[piece.payload.path] += [Order(step.start, step.stop, (step,)) for step in piece.steps]
    return [
        request
        for path, orders in sorted(files.items())
        for request in _joined(path, orders, limits.gap_bytes, limits.direct_bytes)
    ]


def plan_fetch(
    ranges: Iterable[RangeRead],
    limits: Limits,
    *,
    compared: bool,
    in_place: bool,
    is_held: Callable[[str, int, int], bool],
) -> list[Request]:
    """Plan to read every range to its one destination.

    If `compared`, they are read and compared in whole pieces, else exactly they are read; `in_place` where
    they belong, which saves a copy, and not before. `is_held` tells which bytes of a file are in memory, and
    known to be intact.
    """
    requests: list[Request] = []
    copied: defaultdict[str, list[Order]] = defaultdict(list)
    direct: defaultdict[str, list[Order]] = defaultdict(list)
    for each in ranges:
        path = each.payload.path
        for order in _orders(each, limits, compared, in_place) if each.start < each.stop else ():
            if order.pieces and is_held(path, order.first, order.last):
                alone = order._replace(start=order.first, stop=order.last, pieces=())
                requests += _joined(path, [alone], 0, 0)
            elif (
                order.is_whole
                and (in_place or not order.pieces)
                and (order.stop - order.start > limits.copied_bytes)
            ):
                direct[path].append(order)
            else:
                copied[path].append(order)
    for path, orders in copied.items():
        requests += _joined(path, orders, limits.gap_bytes, REQUEST_BYTES)
    for path, orders in direct.items():
        requests += _joined(path, orders, limits.gap_bytes, limits.spread_bytes, direct=True)
    # All kinds in file order, which is fastest on disks.
    return sorted(requests, key=itemgetter(0, 1))


def _orders(read: RangeRead, limits: Limits, compared: bool, in_place: bool) -> Iterator[Order]:  # noqa: FBT001
    """Yield the orders for one range, cut to the size of requests."""
    first = read.payload.offset + read.start
    last = first + read.size_bytes
    steps = [step for piece in (pieces_of([read])[0] if compared else ()) for step in piece.steps]
    pieces = [step for step in steps if step.start < last and first < step.stop]
    into, most = read.into, limits.direct_bytes
    if into is not None and not (into.ndim == 1 and into.format == "B"):
        into = into.cast("B")
    if into is None or (not pieces and last - first <= most):
        start, stop = (pieces[0].start, pieces[-1].stop) if pieces else (first, last)
        yield Order(start, stop, pieces, first, last, into, read.take)
        return
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
        inside = first <= piece.start and piece.stop <= last
        if run and not (inside and piece.stop - run[0].start <= most):
            yield run[0].start, run[-1].stop, run
            run = []
        if inside:
            run.append(piece)
        else:
            yield piece.start, piece.stop, [piece]
    if run:
        yield run[0].start, run[-1].stop, run


def _joined(
    path: str, orders: Iterable[Order], gap_bytes: int, most_bytes: int, *, direct: bool = False
) -> Iterator[Request]:
    """Yield the requests for the orders of one file, through buffers or into place."""

    def request() -> Request:
        alone = len(run) == 1 and run[0].is_whole and not run[0].pieces
        return Request(path, run[0].start, stop, run, direct or alone)

    run: list[Order] = []
    stop = 0
    for order in sorted(orders, key=itemgetter(0)):
        gap = order.start - stop
        if run and (gap > gap_bytes or order.stop - run[0].start > most_bytes or (direct and gap < 0)):
            yield request()
            run = []
        stop = max(stop, order.stop) if run else order.stop
        run.append(order)
    if run:
        yield request()
