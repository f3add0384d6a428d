"""The reads of one rank, some of them for all that hold the same parts of tensors.

Ranks whose parts are equal divide what they have to read by bytes, and each broadcasts its share in buckets.
Every rank computes shares and order by itself; one number from each shows whether all have the same.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, cycle
from operator import itemgetter
from typing import Any, Final, NamedTuple, final

import torch
from torch.distributed.tensor import DTensor, Replicate

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import TensorRead
from ckpt_core.devices import DeviceFetch
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError, failure_text
from ckpt_core.loading._targets import PartLoad
from ckpt_core.reading import REQUEST_BYTES, Engine, RangeRead

_logger = logger_of(__name__)

BUCKET_BYTES: Final = 16 << 20
_ALIGNMENT: Final = 64
"""Every cell starts at a multiple of this in its bucket, so that it can be viewed as any dtype."""
_ERROR_BYTES: Final = 256


class Cell(NamedTuple):
    """Bytes `start` to `stop` of a read's payload."""

    read: TensorRead
    start: int
    stop: int


class Bucket(NamedTuple):
    """Cells that one of the members reads, broadcast to them in one message.

    `number` counts the buckets of an owner and the same members.
    """

    number: int
    members: tuple[int, ...]
    owner: int
    cells: Sequence[Cell]

    @property
    def size_bytes(self) -> int:
        """Its size, with the gaps between cells and room for the owner's error."""
        return sum(map(_aligned, self.cells)) + _ERROR_BYTES

    def cut(self, memory: memoryview) -> Iterator[tuple[Cell, memoryview]]:
        """Yield each cell with its place in the memory of the bucket."""
        start = 0
        for cell in self.cells:
            yield cell, memory[start : start + cell.stop - cell.start]
            start += _aligned(cell)


@final
class Reads:
    """The ranges to verify, to fetch, and to pass on."""

    def __init__(self, rank: int, alone: Sequence[TensorRead], buckets: Sequence[Bucket] = ()) -> None:
        self._rank = rank
        self._alone = alone
        self._buckets = buckets

    @classmethod
    def of(cls, parts: Mapping[str, PartLoad], coordinator: Coordinator) -> Reads:
        """Plan the reads of this rank. Collective.

        What ranks should hold alike is read by one of them if they agree on what it is, else by each.
        """
        rank = coordinator.rank
        if coordinator.world_size == 1:
            return cls(rank, [read for load in parts.values() for read in load.reads])
        try:
            common, votes = _common(parts, coordinator)
        except Exception as error:  # noqa: BLE001 - raised on every rank, so that none waits for this one
            common, votes = {}, error
        agreed = coordinator.gather_scatter(votes, _agree, what="scheduling reads")
        alone = common.pop((rank,), [])
        for members in common.keys() - agreed:
            _logger.info("ranks %s do not hold the same tensors: rank %d reads for itself", members, rank)
            alone += common.pop(members)
        buckets = [each for members, same in common.items() for each in dealt(members, same)]
        return cls(rank, alone, sorted(buckets, key=lambda bucket: bucket[:3]))

    @property
    def _own(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.owner == self._rank]

    def checked(self) -> Iterator[RangeRead]:
        """Yield the ranges to verify: all that this rank will read."""
        for read in self._alone:
            yield from read.checked()
        for bucket in self._own:
            for read, start, stop in bucket.cells:
                yield RangeRead(payload=read.payload, start=start, stop=stop)

    def private(self, fetch: DeviceFetch | None = None) -> Iterator[RangeRead]:
        """Yield the ranges that this rank reads for itself alone."""
        for read in self._alone:
            yield from read.ranges(fetch=fetch)

    def relay(self, coordinator: Coordinator, engine: Engine, fetch: DeviceFetch | None = None) -> None:
        """Read and send this rank's buckets, and receive those of others. Collective.

        Its own are read one ahead of the broadcast. Needs three buffers of the size of the largest buckets.
        A rank that cannot read goes on to send buckets, which say so, and all others go on, too, so that no
        rank waits for one that never comes.

        Raises:
            CoordinationError: another rank could not read, or was lost.
            Exception: raised on this rank by its reads, or by the copies into its tensors.
        """
        if not self._buckets:
            return
        errors: list[Exception] = []
        error: Exception | None = None
        failures: dict[int, str] = {}
        own = self._own
        inbox, buffers = _buffer(self._buckets), cycle([_buffer(own), _buffer(own[1:])])
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-read-ahead") as thread:
            ahead = (thread.submit(_read, each, next(buffers), engine, errors) for each in own)
            reading = next(ahead, None)
            for bucket in self._buckets:
                buffer = inbox
                if bucket.owner == self._rank and reading is not None:
                    buffer, reading = reading.result(), next(ahead, None)
                buffer = buffer[: bucket.size_bytes]
                at = bucket.members.index(bucket.owner)  # the tree begins at the owner
                coordinator.broadcast_tensor(buffer, bucket.members[at:] + bucket.members[:at])
                memory = _memory(buffer)
                if text := bytes(memory[-_ERROR_BYTES:]).rstrip(b"\0").decode(errors="ignore"):
                    failures.setdefault(bucket.owner, text)
                elif not failures and error is None:
                    error = _fill(bucket, memory, fetch)
        if found := next(iter(errors), error):
            raise found
        if failures:
            what = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise CoordinationError(
                f"rank {self._rank}: other ranks could not read its data: {what}", failures=failures
            )


def _read(bucket: Bucket, buffer: torch.Tensor, engine: Engine, errors: list[Exception]) -> torch.Tensor:
    """Read a bucket, or put into it why this rank cannot."""
    memory = _memory(buffer[: bucket.size_bytes])
    if not errors:
        try:
            engine.fetch(
                RangeRead(payload=read.payload, start=start, stop=stop, into=into)
                for (read, start, stop), into in bucket.cut(memory)
            )
        except Exception as error:  # noqa: BLE001 - the bucket tells it to all; raised at the end
            errors.append(error)
    text = failure_text(errors[0]) if errors else ""
    memory[-_ERROR_BYTES:] = text.encode(errors="replace")[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
    return buffer


def _fill(bucket: Bucket, memory: memoryview, fetch: DeviceFetch | None) -> Exception | None:
    """Copy a bucket into the tensors; return an error, so that nobody waits."""
    try:
        for cell, content in bucket.cut(memory):
            cell.read.fill(cell.start, content, fetch)
    except Exception as error:  # noqa: BLE001 - raised at the end
        return error
    return None


def _common(
    parts: Mapping[str, PartLoad], coordinator: Coordinator
) -> tuple[dict[tuple[int, ...], list[TensorRead]], dict[tuple[int, ...], int] | Exception | None]:
    """Return the reads by the ranks that share them, and this rank's votes, if it can."""
    rank, world_size = coordinator.rank, coordinator.world_size
    common: dict[tuple[int, ...], list[TensorRead]] = {}
    for load in parts.values():
        ranks = {name: alike(value, world_size) for name, value in load.common()}
        for read in load.reads:
            common.setdefault(ranks.get(read.name, (rank,)), []).append(read)
    # All ranks must know if they cannot: a connection may be lost on this rank alone.
    can = coordinator.can_broadcast_tensors
    return common, {each: _vote(rank, each, reads) for each, reads in common.items()} if can else None


def alike(value: Any, world_size: int) -> tuple[int, ...]:
    """Return the ranks that hold the same part as this one; () if it has none.

    Nothing is communicated: a mesh and its placements are equal on all of its ranks, and a plain tensor is
    taken to be whole on every rank of the job.
    """
    if not isinstance(value, DTensor):
        return tuple(range(world_size))
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    replicated = (isinstance(placement, Replicate) for placement in value.placements)
    place = tuple(slice(None) if all_of else at for all_of, at in zip(replicated, coordinate, strict=True))
    return tuple(sorted(value.device_mesh.mesh[place].reshape(-1).tolist()))


def dealt(members: tuple[int, ...], reads: Sequence[TensorRead]) -> Iterator[Bucket]:
    """Divide reads among the members by bytes, in buckets.

    What only one rank can verify, as it has one checksum, goes to the rank with the least so far, the largest
    first; everything else in runs that fill what room is left.
    """
    runs: dict[int, list[Cell]] = {rank: [] for rank in members}
    loads = dict.fromkeys(members, 0)
    units = [unit for read in sorted(reads, key=_identity) for unit in _units(read)]
    for size, unit in sorted(units, key=itemgetter(0), reverse=True):
        if size > REQUEST_BYTES:
            owner = min(members, key=loads.__getitem__)
            runs[owner] += unit
            loads[owner] += size
    rest = [(size, unit) for size, unit in units if 0 < size <= REQUEST_BYTES]
    ends, done = list(accumulate(_room(list(loads.values()), sum(size for size, _ in rest)))), 0
    for size, unit in rest:
        runs[members[min(bisect_right(ends, done + size / 2), len(members) - 1)]] += unit
        done += size
    for owner, run in runs.items():
        number, filled, cells = 0, 0, list[Cell]()
        for cell in run:
            if cells and filled + _aligned(cell) > BUCKET_BYTES:
                yield Bucket(number, members, owner, cells)
                number, filled, cells = number + 1, 0, []
            cells.append(cell)
            filled += _aligned(cell)
        if cells:
            yield Bucket(number, members, owner, cells)


def _room(loads: Sequence[int], rest: int) -> list[float]:
    """Return how much of the rest each takes for loads as equal as can be."""
    level, lowest = 0.0, sorted(loads)
    for count, load in enumerate(lowest, 1):
        if count == 1 or level > load:
            level = (rest + sum(lowest[:count])) / count
    return [max(0.0, level - load) for load in loads]


def _units(read: TensorRead) -> list[tuple[int, list[Cell]]]:
    """Return the sizes and cells of what one rank has to read as a whole."""
    cells = list(_cells(read))
    apart = read.payload.block_crcs or read.payload.crc32 is None
    units = [[each] for each in cells] if apart else [cells]
    return [(sum(stop - start for _, start, stop in unit), unit) for unit in units]


def _cells(read: TensorRead) -> Iterator[Cell]:
    """Cut a read where requests, and so the blocks with checksums, begin."""
    start, stop = read.target.byte_range
    while start < stop:
        cut = min(stop, (start // REQUEST_BYTES + 1) * REQUEST_BYTES)
        yield Cell(read, start, cut)
        start = cut


def _identity(read: TensorRead) -> tuple[str, int, str, tuple[int, int]]:
    return read.payload.path, read.payload.offset, read.name, read.target.byte_range


def _vote(rank: int, members: tuple[int, ...], reads: Sequence[TensorRead]) -> int:
    """Return a number whose sum over the members is 0 if they have the same reads."""
    text = repr((members, sorted(map(_identity, reads))))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (len(members) - 1) * digest if rank == members[0] else -digest


def _agree(votes: list[Any]) -> list[list[tuple[int, ...]]]:
    sums = Counter[tuple[int, ...]]()
    for of_rank in votes:
        sums.update(of_rank)
    return [[] if None in votes else [members for members, total in sums.items() if not total]] * len(votes)


def _aligned(cell: Cell) -> int:
    return -(-(cell.stop - cell.start) // _ALIGNMENT) * _ALIGNMENT


def _buffer(buckets: Sequence[Bucket]) -> torch.Tensor:
    return torch.empty(max((each.size_bytes for each in buckets), default=0), dtype=torch.uint8)


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # the types of numpy 1 do not declare it as a buffer
    return memoryview(array)
