"""Who reads what, and in which order it is passed on: the same on every rank without a word between them."""

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
    """Cells that one rank reads and several need, passed on in one message.

    Attributes:
        owner: the rank that reads them.
        members: the ranks that need them, in ascending order; the owner is one of them.
        cells: what is in it, in this order; made as they are asked for.
        num_bytes: how long it is, with the gaps between cells.
    """

    owner: int
    members: tuple[int, ...]
    cells: Sequence[Cell]
    num_bytes: int

    def route(self) -> tuple[int, ...]:
        """The members from the owner on, round and round, so that each has its turn at every place."""
        place = self.members.index(self.owner)
        return self.members[place:] + self.members[:place]

    def places(self) -> Iterator[tuple[Cell, int, int]]:
        """Each cell, and where it starts and stops in the bucket, in bytes."""
        start = 0
        for cell in self.cells:
            stop = start + cell.stop - cell.start
            yield cell, start, stop
            start = _aligned(stop)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What one rank reads, passes on and is given.

    Attributes:
        rank: whose schedule it is.
        private: what no other rank needs, as cells joined where they meet.
        buckets: what others need, too, in the one order in which all ranks pass buckets on.
        consistency: 0 to 2**64 - 1. The sum over all ranks, modulo 2**64, is 0 if, and but for chance only
            if, all ranks that share something have worked out the same cells, owners and order. If it is not
            0, nothing may be shared: ranks would wait for one another for ever.
    """

    rank: int
    private: tuple[Cell, ...]
    buckets: tuple[Bucket, ...]
    consistency: int

    def own_buckets(self) -> list[Bucket]:
        """Those that this rank reads."""
        return [bucket for bucket in self.buckets if bucket.owner == self.rank]

    def own_cells(self) -> list[Cell]:
        """All that this rank reads, for itself or for others, too: by place, and joined where cells meet."""
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
    """What `rank` reads of `tensors`, for whom, and what it is given by others.

    Ranks that need the same cells divide them into runs, each of about as many bytes, and each reads one; the
    runs are cut into buckets, and a bucket's place in the order depends on nothing but itself: the first
    buckets of all runs come first, so that all ranks read at the same time, then the second ones.

    Args:
        tensors: every tensor that can be shared; the order does not matter.
        rank: the rank to make it for.
        cell_bytes: how much is read at once; equal on all ranks.
        bucket_bytes: how much is passed on at once, at least `cell_bytes`; equal on all ranks.

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
"""How many buckets of its run come before it, and the bucket."""


def _order(placed: _Placed) -> tuple[object, ...]:
    number, bucket = placed
    return number, _place(bucket.cells[0]), bucket.members, bucket.owner


def _place(cell: Cell) -> tuple[str, int, str, int]:
    return cell.payload.path, cell.payload.offset, cell.name, cell.start


def _in_order(units: Units) -> Units:
    """By place in the checkpoint, which is the same order on every rank."""
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
    """The place of each among all that occur, in alphabetical order."""
    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    return np.array([places[text] for text in texts], dtype=np.int64)


def _by_set(numbers: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Every number that occurs, and where it does, in order."""
    order = np.argsort(numbers, kind="stable")
    if not len(order):
        return
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    for places in np.split(order, cuts):
        yield int(numbers[places[0]]), places


def _deal(sizes: IntArray, parts: int) -> IntArray:
    """Which of `parts` ranks reads each unit: runs of about as many bytes, cut where a unit's middle lies."""
    twice_the_middle = 2 * np.cumsum(sizes) - sizes
    return twice_the_middle * parts // (2 * int(sizes.sum()))


def _vote(rank: int, ranks: tuple[int, ...], digest: int) -> int:
    """What a rank adds to the sum that is 0 if all members have the same digest."""
    return (len(ranks) - 1) * digest if rank == ranks[0] else -digest


def _digest(run: Cells, owners: IntArray, facts: object) -> int:
    """64 bits that depend on every unit, in order, and on `facts`, and on nothing of this rank alone."""
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
    """The same bytes; units that meet are one."""
    breaks = (run.payload[1:] != run.payload[:-1]) | (run.start[1:] != run.stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], breaks]))
    last = np.concatenate([first[1:] - 1, [len(run) - 1]])
    return Cells(run.units, run.payload[first], run.start[first], run.stop[last])


def _cut(run: Cells, most_bytes: int) -> Cells:
    """The same bytes; units that are larger than a cell may be are several."""
    counts = -(-(run.stop - run.start) // most_bytes)
    unit = np.repeat(np.arange(len(run)), counts)
    before = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = run.start[unit] + before * most_bytes
    return Cells(run.units, run.payload[unit], start, np.minimum(start + most_bytes, run.stop[unit]))


def _fill(cells: Cells, owner: int, members: tuple[int, ...], most_bytes: int) -> list[_Placed]:
    """Buckets of one owner's cells; a cell larger than a bucket may be has one of its own."""
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
