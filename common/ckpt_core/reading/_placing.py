"""The plan of pass 2: its requests and their destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ckpt_core.reading._open_files import OpenFiles
from ckpt_core.reading._payloads import MAX_TAKE_BYTES, RangeRead
from ckpt_core.reading._requests import (
    Limits,
    Order,
    Piece,
    Request,
    by_path,
    is_verifiable,
    joined,
    pieces_around,
    steps_of,
)

Crcs = Callable[[Piece], int | None]
"""The checksum of a piece, if known."""


def plan_unverified(ranges: Sequence[RangeRead], limits: Limits) -> list[Request]:
    """Plan to read exactly the ranges, without comparison."""
    requests: list[Request] = []
    for path, in_file in by_path(ranges):
        orders: list[Order] = []
        placed: list[Order] = []
        for each in in_file:
            if each.into is not None and limits.spread_bytes:
                parts = _directly(path, _order(each), limits.direct_bytes)
                placed.extend(order for part in parts for order in part.orders)
            elif each.into is not None and each.size_bytes > limits.copied_bytes:
                requests.extend(_directly(path, _order(each), limits.direct_bytes))
            else:
                orders.append(_order(each))
        requests.extend(map(_direct_if_alone, joined(path, orders, limits.gap_bytes)))
        requests.extend(_spread(path, placed, limits))
    # Both kinds in file order, which is fastest on disks.
    return sorted(requests, key=lambda request: request[:2])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedPlan:
    """The plan for ranges that are compared as they are read, in whole pieces.

    They are compared before delivery; with `in_place` where they belong, which saves a copy.
    """

    files: OpenFiles
    crcs: Crcs
    limits: Limits
    in_place: bool = False

    def requests(self, ranges: Sequence[RangeRead]) -> list[Request]:
        """Plan the requests; kept ranges are served from memory without comparison."""
        requests: list[Request] = []
        for path, in_file in by_path(ranges):
            orders: list[Order] = []
            placed: list[Order] = []
            for order in (order for each in in_file for order in self._orders(each)):
                if self._is_held(path, order):
                    alone = order._replace(start=order.first, stop=order.last, pieces=())
                    requests.append(_direct_if_alone(Request(path, alone.start, alone.stop, [alone])))
                elif self._fits_in_place(order):
                    placed.append(order)
                else:
                    orders.append(order)
            requests.extend(joined(path, orders, self.limits.gap_bytes))
            requests.extend(_spread(path, placed, self.limits))
        return requests

    def _is_held(self, path: str, order: Order) -> bool:
        kept = self.files.kept(path)
        return kept is not None and kept.holds(order.first, order.last)

    def _orders(self, read: RangeRead) -> Iterator[Order]:
        whole = _order(read)
        pieces = list(self._pieces(read))
        if not pieces:
            yield whole
        elif whole.into is None:
            yield whole._replace(start=pieces[0].file_start, stop=pieces[-1].file_stop, pieces=pieces)
        else:
            yield from (_part(whole, run) for run in self._runs(whole, pieces))

    def _runs(self, whole: Order, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """Yield the pieces one by one, or as many as one request reads into place."""
        run: list[Piece] = []
        for piece in pieces:
            inside = whole.first <= piece.file_start and piece.file_stop <= whole.last
            joins = self.in_place and inside
            if run and not (joins and piece.file_stop - run[0].file_start <= self.limits.direct_bytes):
                yield run
                run = []
            if joins:
                run.append(piece)
            else:
                yield [piece]
        if run:
            yield run

    def _fits_in_place(self, order: Order) -> bool:
        is_whole = order.into is not None and (order.first, order.last) == (order.start, order.stop)
        return self.in_place and is_whole

    def _pieces(self, read: RangeRead) -> Iterator[Piece]:
        """Yield the pieces that a range touches, with their checksums where known."""
        if is_verifiable(read.payload):
            for piece in pieces_around(read.payload, [(read.start, read.stop)]):
                for step in steps_of(piece):
                    if step.start < read.stop and read.start < step.stop:
                        yield step._replace(crc32=self.crcs(step))


def check_destinations(ranges: Iterable[RangeRead]) -> None:
    """Check that every range has exactly one destination.

    Raises:
        ValueError: a range has neither `into` nor `take`, or both, or is too long for `take`.
    """
    for each in ranges:
        where = f"bytes {each.start} to {each.stop} of {each.payload.key!r}"
        if (each.into is None) == (each.take is None):
            raise ValueError(f"{where}: give either `into` or `take` as their destination")
        if each.take is not None and each.size_bytes > MAX_TAKE_BYTES:
            raise ValueError(
                f"{where} are too many for one `take`; take them in parts of {MAX_TAKE_BYTES} bytes"
            )


def _order(read: RangeRead) -> Order:
    first = read.payload.offset + read.start
    last = first + read.size_bytes
    into = read.into
    if into is not None and (into.ndim != 1 or into.format != "B"):
        into = into.cast("B")
    return Order(first, last, (), first, last, into, read.take)


def _part(whole: Order, pieces: Sequence[Piece]) -> Order:
    """Return the part of an order that some pieces in a row cover."""
    start, stop = pieces[0].file_start, pieces[-1].file_stop
    first, last = max(whole.first, start), min(whole.last, stop)
    assert whole.into is not None
    into = whole.into[first - whole.first : last - whole.first]
    return Order(start, stop, pieces, first, last, into)


def _directly(path: str, order: Order, most_bytes: int) -> Iterator[Request]:
    assert order.into is not None
    for start in range(order.start, order.stop, most_bytes):
        stop = min(start + most_bytes, order.stop)
        into = order.into[start - order.start : stop - order.start]
        yield Request(path, start, stop, [Order(start, stop, (), start, stop, into)], direct=True)


def _spread(path: str, orders: Sequence[Order], limits: Limits) -> Iterator[Request]:
    """Yield requests that read neighbours directly into place, each into its own."""
    run: list[Order] = []
    for order in sorted(orders, key=lambda order: order.start):
        gap = order.start - run[-1].stop if run else 0
        if run and not (0 <= gap <= limits.gap_bytes and order.stop - run[0].start <= limits.spread_bytes):
            yield Request(path, run[0].start, run[-1].stop, run, direct=True)
            run = []
        run.append(order)
    if run:
        yield Request(path, run[0].start, run[-1].stop, run, direct=True)


def _direct_if_alone(request: Request) -> Request:
    """Read directly into place, if there is only one destination."""
    alone = len(request.orders) == 1 and request.orders[0].into is not None
    return request._replace(direct=True) if alone else request
