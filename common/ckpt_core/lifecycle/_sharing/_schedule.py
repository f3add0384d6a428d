"""Who reads what, and in which order it is passed on: the same on every rank without a word between them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np

from ckpt_core.lifecycle._sharing._layouts import IntArray
from ckpt_core.lifecycle._sharing._units import CELL_BYTES, Cell, Members, StoredTensor, Units, cut_units
from ckpt_core.reading import Payload

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
        cells: what is in it, in this order.
        num_bytes: how long it is, with the gaps between cells.
    """

    owner: int
    members: tuple[int, ...]
    cells: tuple[Cell, ...]
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
        run = _Run.of(units, own)
        if len(ranks) == 1:
            private += run.joined()
            continue
        owners = _deal(run.stop - run.start, len(ranks))
        consistency += _vote(rank, ranks, run.digest(ranks, owners, cell_bytes, bucket_bytes))
        for place, share in _by_set(owners):
            cells = run.pick(share).cells(cell_bytes)
            buckets += _fill(cells, ranks[place], ranks, bucket_bytes)
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
    keys = [(payload.path, payload.offset, name) for name, payload in units.payloads]
    ranking = np.zeros(len(keys), dtype=np.int64)
    ranking[np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)] = np.arange(len(keys))
    order = np.lexsort((units.start, ranking[units.payload]))
    return Units(
        payloads=units.payloads,
        payload=units.payload[order],
        start=units.start[order],
        stop=units.stop[order],
        members=units.members[order],
    )


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


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Units in order, as columns; `payload` says which of `payloads`."""

    payloads: list[tuple[str, Payload]]
    payload: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, units: Units, places: IntArray) -> _Run:
        return cls(
            payloads=units.payloads,
            payload=units.payload[places],
            start=units.start[places],
            stop=units.stop[places],
        )

    def pick(self, places: IntArray) -> _Run:
        return _Run(
            payloads=self.payloads,
            payload=self.payload[places],
            start=self.start[places],
            stop=self.stop[places],
        )

    def cells(self, most_bytes: int) -> list[Cell]:
        """The units, those that are larger cut into cells of at most `most_bytes`."""
        rows = zip(self.payload.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return [
            Cell(name=name, payload=payload, start=at, stop=min(at + most_bytes, stop))
            for number, start, stop in rows
            for name, payload in (self.payloads[number],)
            for at in range(start, stop, most_bytes)
        ]

    def joined(self) -> list[Cell]:
        """The units, those that meet made one."""
        breaks = (self.payload[1:] != self.payload[:-1]) | (self.start[1:] != self.stop[:-1])
        first = np.flatnonzero(np.concatenate([[True], breaks]))
        last = np.concatenate([first[1:] - 1, [len(self.payload) - 1]])
        rows = zip(
            self.payload[first].tolist(), self.start[first].tolist(), self.stop[last].tolist(), strict=True
        )
        return [
            Cell(name=self.payloads[number][0], payload=self.payloads[number][1], start=start, stop=stop)
            for number, start, stop in rows
        ]

    def digest(self, *facts: object) -> int:
        """64 bits that depend on every unit, in order, and on `facts`, and on nothing of this rank alone."""
        changes = np.concatenate([[0], np.cumsum(self.payload[1:] != self.payload[:-1])])
        first = np.flatnonzero(np.concatenate([[True], self.payload[1:] != self.payload[:-1]]))
        hashed = hashlib.blake2b(digest_size=8)
        for name, payload in (self.payloads[number] for number in self.payload[first].tolist()):
            text = f"{name}\0{payload.path}\0{payload.offset}\0{payload.size_bytes}\n"
            hashed.update(text.encode(errors="surrogatepass"))
        for column in (changes, self.start, self.stop):
            hashed.update(column.astype("<i8").tobytes())
        for fact in facts:
            hashed.update(
                fact.astype("<i8").tobytes() if isinstance(fact, np.ndarray) else repr(fact).encode()
            )
        return int.from_bytes(hashed.digest(), "little")


def _fill(cells: list[Cell], owner: int, members: tuple[int, ...], most_bytes: int) -> list[_Placed]:
    """Buckets of one owner's cells; a cell larger than a bucket may be has one of its own."""
    sizes = np.array([_aligned(cell.stop - cell.start) for cell in cells], dtype=np.int64)
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
                cells=tuple(cells[first:last]),
                num_bytes=int(sizes[first:last].sum()),
            ),
        )
        for number, (first, last) in enumerate(pairwise(cuts))
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
