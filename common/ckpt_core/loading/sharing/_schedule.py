"""The schedule of shared reads, equal on all ranks without communication."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np

from ckpt_core.loading.sharing._layouts import IntArray
from ckpt_core.loading.sharing._units import (
    CELL_BYTES,
    Cell,
    Cells,
    Members,
    StoredTensor,
    Units,
    cut_units,
)

BUCKET_BYTES: Final = 16 << 20
ALIGNMENT: Final = 64
"""Every cell starts at a multiple of this in its bucket, so that it can be viewed as any dtype."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Cells that one rank reads and several need, broadcast in one message.

    Attributes:
        owner: the rank that reads them.
        members: the ranks that need them, in ascending order; the owner is one of them.
        cells: its content, in order; made on access.
        num_bytes: its size, with the gaps between cells.
    """

    owner: int
    members: tuple[int, ...]
    cells: Sequence[Cell]
    num_bytes: int

    def route(self) -> tuple[int, ...]:
        """Return the members in cyclic order from the owner, to spread positions evenly."""
        place = self.members.index(self.owner)
        return self.members[place:] + self.members[:place]

    def places(self) -> Iterator[tuple[Cell, int, int]]:
        """Yield each cell with its start and stop in the bucket, in bytes."""
        start = 0
        for cell in self.cells:
            stop = start + cell.stop - cell.start
            yield cell, start, stop
            start = _aligned(stop)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The reads, broadcasts and receipts of one rank.

    Attributes:
        rank: of the schedule.
        private: cells that no other rank needs, with neighbours joined.
        buckets: of cells that several ranks need, in the one order in which all ranks broadcast them.
        consistency: 0 to 2**64 - 1. The sum over all ranks, modulo 2**64, is zero iff, barring collisions of
            hashes, all ranks computed the same cells, owners and order. If it is not zero, nothing may be
            shared: ranks would wait for each other forever.
    """

    rank: int
    private: tuple[Cell, ...]
    buckets: tuple[Bucket, ...]
    consistency: int

    def own_buckets(self) -> list[Bucket]:
        """List the buckets that this rank reads."""
        return [bucket for bucket in self.buckets if bucket.owner == self.rank]

    def own_cells(self) -> list[Cell]:
        """List all cells that this rank reads, by position, with neighbours joined."""
        cells = [*self.private, *(cell for bucket in self.own_buckets() for cell in bucket.cells)]
        joined: list[Cell] = []
        for cell in sorted(cells, key=_place):
            last = joined[-1] if joined else cell
            if last.payload is cell.payload and last.name == cell.name and last.stop == cell.start:
                joined[-1] = replace(last, stop=cell.stop)
            else:
                joined.append(cell)
        return joined


def make_schedule(
    tensors: Iterable[StoredTensor],
    rank: int,
    *,
    cell_bytes: int = CELL_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> Schedule:
    """Compute the schedule of `rank` for `tensors`.

    Ranks that need the same cells divide them into runs of about equal size, and each reads one; the runs are
    cut into buckets, and a bucket's position in the order depends on itself alone: the first buckets of all
    runs come first, so that all ranks read at the same time, then the second ones.

    Args:
        tensors: every tensor that can be shared, in any order.
        rank: the rank of the schedule.
        cell_bytes: bytes of one read; equal on all ranks.
        bucket_bytes: bytes of one broadcast, at least `cell_bytes`; equal on all ranks.

    Raises:
        ValueError: a payload is larger or smaller than its chunk.
    """
    members = Members()
    units = _in_order(cut_units(tensors, rank, members, cell_bytes=cell_bytes))
    private: list[Cell] = []
    buckets: list[_Placed] = []
    consistency = 0
    for number, own in _by_set(units.members):
        ranks = members.sets[number]
        run = Cells(units, units.payload[own], units.start[own], units.stop[own])
        if len(ranks) == 1:
            private += _joined(run)
            continue
        owners = _deal(run.stop - run.start, len(ranks))
        consistency += _vote(rank, ranks, _digest(run, owners, (ranks, cell_bytes, bucket_bytes)))
        for place, share in _by_set(owners):
            buckets += _fill(_cut(run.at(share), cell_bytes), ranks[place], ranks, bucket_bytes)
    buckets.sort(key=_order)
    return Schedule(
        rank=rank,
        private=tuple(private),
        buckets=tuple(bucket for _, bucket in buckets),
        consistency=consistency % 2**64,
    )


_Placed: TypeAlias = tuple[int, Bucket]
"""Position of the bucket in its run, and the bucket."""


def _order(placed: _Placed) -> tuple[object, ...]:
    number, bucket = placed
    return number, _place(bucket.cells[0]), bucket.members, bucket.owner


def _place(cell: Cell) -> tuple[str, int, str, int]:
    return cell.payload.path, cell.payload.offset, cell.name, cell.start


def _in_order(units: Units) -> Units:
    """Order units by position in the checkpoint, equally on every rank."""
    payloads = units.payloads
    paths = _ranking([payload.path for payload in payloads])
    offsets = np.array([payload.offset for payload in payloads], dtype=np.int64)
    names = _ranking(units.names)
    used = units.payload
    order = np.lexsort((units.start, names[used], offsets[used], paths[used]))
    return Units(
        names=units.names,
        payloads=units.payloads,
        payload=units.payload[order],
        start=units.start[order],
        stop=units.stop[order],
        members=units.members[order],
    )


def _ranking(texts: Sequence[str]) -> IntArray:
    """Return the position of each text among the distinct ones, in alphabetical order."""
    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    return np.array([places[text] for text in texts], dtype=np.int64)


def _by_set(numbers: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield every distinct number and its positions, in order."""
    order = np.argsort(numbers, kind="stable")
    if not len(order):
        return
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    for places in np.split(order, cuts):
        yield int(numbers[places[0]]), places


def _deal(sizes: IntArray, parts: int) -> IntArray:
    """Assign units to `parts` ranks in runs of about equal size, cut by their middles."""
    twice_the_middle = 2 * np.cumsum(sizes) - sizes
    return twice_the_middle * parts // (2 * int(sizes.sum()))


def _vote(rank: int, ranks: tuple[int, ...], digest: int) -> int:
    """Return a rank's term of the sum that is 0 if all members have the same digest."""
    return (len(ranks) - 1) * digest if rank == ranks[0] else -digest


def _digest(run: Cells, owners: IntArray, facts: object) -> int:
    """Hash all units, in order, and `facts` to 64 bits, without rank-local values."""
    used, which = np.unique(run.payload, return_inverse=True)
    chosen: list[int] = used.tolist()
    names = [run.units.names[number] for number in chosen]
    payloads = [run.units.payloads[number] for number in chosen]
    paths = [payload.path for payload in payloads]
    offsets = np.array([payload.offset for payload in payloads], dtype=np.int64)
    sizes = np.array([payload.size_bytes for payload in payloads], dtype=np.int64)
    texts = repr((sorted(set(names)), sorted(set(paths)), facts))
    hashed = hashlib.blake2b(texts.encode(), digest_size=8)
    for column in (_ranking(names), _ranking(paths), offsets, sizes):
        hashed.update(column[which].astype("<i8").tobytes())
    for column in (run.start, run.stop, owners):
        hashed.update(column.astype("<i8").tobytes())
    return int.from_bytes(hashed.digest(), "little")


def _joined(run: Cells) -> Cells:
    """Join adjacent units."""
    breaks = (run.payload[1:] != run.payload[:-1]) | (run.start[1:] != run.stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], breaks]))
    last = np.concatenate([first[1:] - 1, [len(run) - 1]])
    return Cells(run.units, run.payload[first], run.start[first], run.stop[last])


def _cut(run: Cells, most_bytes: int) -> Cells:
    """Cut units larger than a cell."""
    counts = -(-(run.stop - run.start) // most_bytes)
    unit = np.repeat(np.arange(len(run)), counts)
    before = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = run.start[unit] + before * most_bytes
    return Cells(run.units, run.payload[unit], start, np.minimum(start + most_bytes, run.stop[unit]))


def _fill(cells: Cells, owner: int, members: tuple[int, ...], most_bytes: int) -> list[_Placed]:
    """Fill buckets with one owner's cells; a cell too large gets one of its own."""
    sizes = -(-(cells.stop - cells.start) // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(cells):
        filled = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        fits = int(np.searchsorted(ends, filled + most_bytes, side="right"))
        cuts.append(max(fits, cuts[-1] + 1))
    return [
        (
            number,
            Bucket(
                owner=owner,
                members=members,
                cells=cells[first:last],
                num_bytes=int(sizes[first:last].sum()),
            ),
        )
        for number, (first, last) in enumerate(pairwise(cuts))
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
