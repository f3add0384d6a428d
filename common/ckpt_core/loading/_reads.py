"""The reads of one rank: for itself, and for others where ranks share reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import TensorRead
from ckpt_core.devices import DeviceFetch
from ckpt_core.disclosure import logger_of
from ckpt_core.loading._targets import PartLoad
from ckpt_core.loading.sharing import Cell, Layouts, Schedule, make_schedule, relay_shared
from ckpt_core.reading import Engine, RangeRead

_logger = logger_of(__name__)
_OBJECTION: Final = 1


@final
class Reads:
    """The ranges to verify, to fetch, and to pass on.

    Args:
        alone: reads outside of the schedule.
        shared: reads of scheduled tensors, by the identity of their payload.
        schedule: the readers and receivers of shared tensors; None if every rank reads for itself.
    """

    def __init__(
        self,
        alone: Sequence[TensorRead],
        shared: Mapping[int, Sequence[TensorRead]],
        schedule: Schedule | None,
    ) -> None:
        self._alone = alone
        self._shared = shared
        self._schedule = schedule

    @classmethod
    def of(cls, parts: Mapping[str, PartLoad], coordinator: Coordinator, *, read_once: bool) -> Reads:
        """Plan the reads of this rank. Collective.

        Ranks read for each other only if all of them have computed the same schedule, which one number from
        each shows; else every rank makes all its reads itself.
        """
        reads = [read for load in parts.values() for read in load.reads]
        if not read_once or coordinator.world_size == 1:
            return cls(reads, {}, None)
        schedule, names, vote = _schedule(parts, coordinator)
        if not (coordinator.can_broadcast_tensors or isinstance(vote, Exception)):
            vote = _OBJECTION  # all ranks must know: a connection may be lost on this rank alone
        votes: list[int] = coordinator.gather(vote, what="scheduling reads")
        if sum(votes) % 2**64:
            if coordinator.is_coordinator:
                _logger.info("the ranks do not hold the same tensors: each reads for itself")
            return cls(reads, {}, None)
        shared: defaultdict[int, list[TensorRead]] = defaultdict(list)
        for read in reads:
            if read.name in names:
                shared[id(read.payload)].append(read)
        return cls([read for read in reads if read.name not in names], shared, schedule)

    def _reads_of(self, cell: Cell) -> list[TensorRead]:
        return [read for read in self._shared.get(id(cell.payload), ()) if read.name == cell.name]

    def checked(self) -> Iterator[RangeRead]:
        """Yield the ranges to verify: all that this rank will read."""
        for read in self._alone:
            yield from read.ranges()
        for cell in self._schedule.own_cells() if self._schedule is not None else ():
            yield RangeRead(payload=cell.payload, start=cell.start, stop=cell.stop)

    def private(self, fetch: DeviceFetch | None = None) -> Iterator[RangeRead]:
        """Yield the ranges that this rank reads for itself alone."""
        for read in self._alone:
            yield from read.ranges(fetch=fetch)
        for cell in self._schedule.private if self._schedule is not None else ():
            for read in self._reads_of(cell):
                yield from read.ranges(cell.start, cell.stop, fetch)

    def relay(self, coordinator: Coordinator, engine: Engine, fetch: DeviceFetch | None = None) -> None:
        """Read and send this rank's buckets, and receive those of others. Collective."""
        if self._schedule is None:
            return

        def read_cells(places: Sequence[tuple[Cell, memoryview]]) -> None:
            engine.fetch(
                RangeRead(payload=cell.payload, start=cell.start, stop=cell.stop, into=memory)
                for cell, memory in places
            )

        def deliver(cell: Cell, content: memoryview) -> None:
            for read in self._reads_of(cell):
                read.fill(cell.start, content, fetch)

        relay_shared(self._schedule, coordinator, read=read_cells, deliver=deliver)


def _schedule(
    parts: Mapping[str, PartLoad], coordinator: Coordinator
) -> tuple[Schedule | None, set[str], int | Exception]:
    """Compute this rank's schedule, the shared tensors, and its vote or error."""
    layouts = Layouts(coordinator.rank, coordinator.world_size)
    try:
        tensors = [tensor for load in parts.values() for tensor in load.stored(layouts)]
        schedule = make_schedule(tensors, coordinator.rank)
    except Exception as error:  # noqa: BLE001 - raised on every rank, so that none waits for this one
        return None, set(), error
    return schedule, {tensor.name for tensor in tensors}, schedule.consistency
