"""What pass 2 reads, and where to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

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

DIRECT_BYTES: Final = 16 << 20
"""Largest request that is read straight into place."""

Crcs = Callable[[Piece], int | None]
"""Checksum of a piece, if it is known."""


def plan_plainly(wanted: Sequence[RangeRead], limits: Limits) -> list[Request]:
    """Read just the ranges, as they are."""
    requests: list[Request] = []
    for path, ranges in by_path(wanted):
        orders: list[Order] = []
        for each in ranges:
            if each.into is not None and each.size_bytes > limits.copied_bytes:
                requests.extend(_directly(path, _order(each)))
            else:
                orders.append(_order(each))
        requests.extend(map(_without_detour, joined(path, orders, limits.gap_bytes)))
    # Both kinds in the order of the file, which is how a disk likes to be read.
    return sorted(requests, key=lambda request: request[:2])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedPlan:
    """What is not kept is read once more, in whole pieces, to be compared before it is delivered."""

    files: OpenFiles
    crcs: Crcs
    limits: Limits

    def requests(self, wanted: Sequence[RangeRead]) -> list[Request]:
        """What is to be read; kept ranges are served from memory as they are."""
        requests: list[Request] = []
        for path, ranges in by_path(wanted):
            orders: list[Order] = []
            for order in (order for each in ranges for order in self._orders(each)):
                if self._is_held(path, order):
                    alone = order._replace(start=order.first, stop=order.last, pieces=())
                    requests.append(_without_detour(Request(path, alone.start, alone.stop, [alone])))
                else:
                    orders.append(order)
            requests.extend(joined(path, orders, self.limits.gap_bytes))
        return requests

    def _is_held(self, path: str, order: Order) -> bool:
        kept = self.files.kept(path)
        return kept is not None and kept.holds(order.first, order.last)

    def _orders(self, wanted: RangeRead) -> Iterator[Order]:
        whole = _order(wanted)
        pieces = list(self._pieces(wanted))
        if not pieces:
            yield whole
        elif whole.into is None:
            yield whole._replace(start=pieces[0].file_start, stop=pieces[-1].file_stop, pieces=pieces)
        else:
            yield from (_part(whole, piece) for piece in pieces)

    def _pieces(self, wanted: RangeRead) -> Iterator[Piece]:
        """What the range touches, every piece with its checksum where that is known."""
        if is_verifiable(wanted.payload):
            for piece in pieces_around(wanted.payload, [(wanted.start, wanted.stop)]):
                for step in steps_of(piece):
                    if step.start < wanted.stop and wanted.start < step.stop:
                        yield step._replace(crc32=self.crcs(step))


def refuse_unplaced(wanted: Iterable[RangeRead]) -> None:
    """Every range has to go somewhere.

    Raises:
        ValueError: one has neither `into` nor `take`, or both, or is too long to be taken at once.
    """
    for each in wanted:
        where = f"bytes {each.start} to {each.stop} of {each.payload.key!r}"
        if (each.into is None) == (each.take is None):
            raise ValueError(f"{where}: give either `into` or `take`, to say where they go")
        if each.take is not None and each.size_bytes > MAX_TAKE_BYTES:
            raise ValueError(
                f"{where} are too many to be taken at once; take them in parts of {MAX_TAKE_BYTES} bytes"
            )


def _order(wanted: RangeRead) -> Order:
    first = wanted.payload.offset + wanted.start
    last = first + wanted.size_bytes
    into = wanted.into
    if into is not None and (into.ndim != 1 or into.format != "B"):
        into = into.cast("B")
    return Order(first, last, (), first, last, into, wanted.take)


def _part(whole: Order, piece: Piece) -> Order:
    """What one piece gives of an order."""
    first, last = max(whole.first, piece.file_start), min(whole.last, piece.file_stop)
    assert whole.into is not None
    into = whole.into[first - whole.first : last - whole.first]
    return Order(piece.file_start, piece.file_stop, (piece,), first, last, into)


def _directly(path: str, order: Order) -> Iterator[Request]:
    assert order.into is not None
    for start in range(order.start, order.stop, DIRECT_BYTES):
        stop = min(start + DIRECT_BYTES, order.stop)
        into = order.into[start - order.start : stop - order.start]
        yield Request(path, start, stop, [Order(start, stop, (), start, stop, into)], direct=True)


def _without_detour(request: Request) -> Request:
    """Straight into place, if there is one place only."""
    alone = len(request.orders) == 1 and request.orders[0].into is not None
    return request._replace(direct=True) if alone else request
