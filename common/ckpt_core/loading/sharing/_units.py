"""Units of shared reads: ranges of payloads, and the sets of ranks that need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ckpt_core.loading.sharing._layouts import Boxes, IntArray
from ckpt_core.reading import Payload

CELL_BYTES: Final = 4 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A range of a payload, for one live tensor.

    Attributes:
        name: of the live tensor.
        payload: the chunk's raw bytes.
        start: in the payload, in bytes.
        stop: likewise, exclusive.
    """

    name: str
    payload: Payload
    start: int
    stop: int


@final
class Cells(Sequence[Cell]):
    """Cells as columns; objects are made on access, because there may be very many."""

    def __init__(self, units: Units, payload: IntArray, start: IntArray, stop: IntArray) -> None:
        self.units = units
        self.payload = payload
        self.start = start
        self.stop = stop

    @override
    def __len__(self) -> int:
        return len(self.payload)

    @overload
    def __getitem__(self, place: int) -> Cell: ...
    @overload
    def __getitem__(self, place: slice) -> Cells: ...
    @override
    def __getitem__(self, place: int | slice) -> Cell | Cells:
        if isinstance(place, slice):
            return self.at(place)
        number: int = self.payload[place].item()
        return Cell(
            name=self.units.names[number],
            payload=self.units.payloads[number],
            start=int(self.start[place]),
            stop=int(self.stop[place]),
        )

    @override
    def __iter__(self) -> Iterator[Cell]:
        names, payloads = self.units.names, self.units.payloads
        which: list[int] = self.payload.tolist()
        for number, start, stop in zip(which, self.start.tolist(), self.stop.tolist(), strict=True):
            yield Cell(name=names[number], payload=payloads[number], start=start, stop=stop)

    def at(self, places: IntArray | slice) -> Cells:
        """Select cells by position."""
        return Cells(self.units, self.payload[places], self.start[places], self.stop[places])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A live tensor and its chunks in the checkpoint.

    Attributes:
        name: of the live tensor; equal on all ranks, unique in a load.
        boxes: the parts that ranks hold.
        lo: int64 [C, D], start of each chunk, in elements of the whole tensor.
        hi: int64 [C, D], its stop, exclusive.
        itemsize: bytes of one element.
        payload: returns the payload of a chunk by its row; called only for chunks that this rank needs.
        scattered: rows of the chunks whose elements are not in row-major order in the payload.
    """

    name: str
    boxes: Boxes
    lo: IntArray
    hi: IntArray
    itemsize: int
    payload: Callable[[int], Payload]
    scattered: Collection[int] = ()


@final
class Members:
    """Small numbers for sets of ranks; they are valid on this rank only."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self.sets: list[tuple[int, ...]] = []

    def number(self, ranks: IntArray) -> int:
        """Return the number of this set; `ranks` may be unordered and repeated."""
        distinct = tuple(sorted(set(ranks.tolist())))
        found = self._numbers.setdefault(distinct, len(self.sets))
        if found == len(self.sets):
            self.sets.append(distinct)
        return found


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The units that one rank needs, as columns; each unit is read by one rank.

    Attributes:
        names: the live tensor of each of `payloads`.
        payloads: in no order, some possibly without a unit.
        payload: int64 [U], index in `payloads`.
        start: int64 [U], in the payload, in bytes.
        stop: int64 [U], likewise, exclusive.
        members: int64 [U], number of the set of ranks that need it (`Members`).
    """

    names: Sequence[str]
    payloads: Sequence[Payload]
    payload: IntArray
    start: IntArray
    stop: IntArray
    members: IntArray


def cut_units(tensors: Iterable[StoredTensor], rank: int, members: Members, *, cell_bytes: int) -> Units:
    """Cut everything that `rank` needs of `tensors` into units.

    A unit is a cell, except where bytes can be verified only together or are not in row-major order: then it
    is the whole payload. A rank needs a unit if its box overlaps the bounding box of the unit's elements, so
    that all ranks compute the same result.

    Raises:
        ValueError: a payload is larger or smaller than its chunk.
    """
    names: list[str] = []
    payloads: list[Payload] = []
    columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    groups: dict[int, _Groups] = {}
    for tensor in tensors:
        own = tensor.boxes.of(rank)
        near = np.flatnonzero(own.overlap(tensor.lo, tensor.hi).any(axis=1))
        if not len(near):
            continue
        first, found = len(payloads), [tensor.payload(row) for row in near.tolist()]
        names += [tensor.name] * len(found)
        payloads += found
        chunk, start, stop, lo, hi = _cut(tensor, near, found, cell_bytes)
        mine = np.flatnonzero(own.overlap(lo, hi).any(axis=1))
        # Tensors of one layout share their boxes; the groups hold them, so that their ids are not reused.
        if id(tensor.boxes) not in groups:
            groups[id(tensor.boxes)] = _Groups(tensor.boxes, members)
        sets = groups[id(tensor.boxes)].of(lo[mine], hi[mine])
        columns.append((first + chunk[mine], start[mine], stop[mine], sets))
    empty = np.zeros(0, dtype=np.int64)
    payload, start, stop, member_sets = (
        np.concatenate(column) for column in zip((empty, empty, empty, empty), *columns, strict=True)
    )
    return Units(names=names, payloads=payloads, payload=payload, start=start, stop=stop, members=member_sets)


@final
class _Groups:
    """The sets of ranks that need units, for tensors with equal boxes, cached."""

    def __init__(self, boxes: Boxes, members: Members) -> None:
        self._boxes = boxes
        self._members = members
        self._known: dict[bytes, int] = {}
        self._replicated = bool((boxes.lo == boxes.lo[:1]).all() and (boxes.hi == boxes.hi[:1]).all())

    def of(self, lo: IntArray, hi: IntArray) -> IntArray:
        """Return the set of ranks (`Members`) for each unit, by bounding boxes."""
        if self._replicated:
            return np.full(len(lo), self._members.number(self._boxes.ranks), dtype=np.int64)
        overlap = self._boxes.overlap(lo, hi)
        packed = np.packbits(overlap, axis=1)
        # Neighbours mostly have the same ranks: only changes of the pattern are looked up.
        changes = np.concatenate([[True], (packed[1:] != packed[:-1]).any(axis=1)])
        numbers = [self._number(packed[row].tobytes(), overlap[row]) for row in np.flatnonzero(changes)]
        found: IntArray = np.array(numbers, dtype=np.int64)[np.cumsum(changes) - 1]
        return found

    def _number(self, pattern: bytes, boxes: npt.NDArray[np.bool_]) -> int:
        if pattern not in self._known:
            self._known[pattern] = self._members.number(self._boxes.ranks[boxes])
        return self._known[pattern]


def _cut(
    tensor: StoredTensor, near: IntArray, payloads: Sequence[Payload], cell_bytes: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Return for every unit its payload, start and stop in bytes, and bounding box."""
    lo, sizes = tensor.lo[near], tensor.hi[near] - tensor.lo[near]
    total = sizes.prod(axis=1, dtype=np.int64) * tensor.itemsize
    _check_sizes(tensor, payloads, total)
    step = total.copy()
    divisible = (total > cell_bytes) & ~np.isin(near, list(tensor.scattered))
    for row in np.flatnonzero(divisible).tolist():
        step[row] = _step(payloads[row], tensor.itemsize, cell_bytes)
    counts = -(-total // step)
    chunk = np.repeat(np.arange(len(near)), counts)
    start = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * step[chunk]
    stop = np.minimum(start + step[chunk], total[chunk])
    low, high = _bounding_boxes(sizes[chunk], start // tensor.itemsize, (stop - 1) // tensor.itemsize)
    return chunk, start, stop, lo[chunk] + low, lo[chunk] + high


def _check_sizes(tensor: StoredTensor, payloads: Sequence[Payload], expected: IntArray) -> None:
    sizes = np.array([payload.size_bytes for payload in payloads], dtype=np.int64)
    for row in np.flatnonzero(sizes != expected).tolist():
        payload = payloads[row]
        raise ValueError(
            f"{tensor.name}: the payload of {payload.key} in {payload.path} has {payload.size_bytes} bytes, "
            f"but its chunk takes {expected[row]}"
        )


def _step(payload: Payload, itemsize: int, cell_bytes: int) -> int:
    """Return the bytes of a unit of this payload."""
    if payload.crc32 is not None and not payload.block_crcs:
        return payload.size_bytes
    unit = lcm(payload.block_bytes if payload.block_bytes <= cell_bytes else 1, itemsize)
    return max(cell_bytes // unit, 1) * unit


def _bounding_boxes(sizes: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Compute bounding boxes of row-major elements `first` to `last` of chunks."""
    lo, hi = np.zeros_like(sizes), sizes.copy()
    same = np.ones(len(sizes), dtype=bool)
    for dim in range(sizes.shape[1]):
        stride = sizes[:, dim + 1 :].prod(axis=1, dtype=np.int64)
        one, other = first // stride, last // stride
        lo[same, dim], hi[same, dim] = one[same], other[same] + 1
        same &= one == other
        first, last = first - one * stride, last - other * stride
    return lo, hi
