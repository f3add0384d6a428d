"""What a rank reads of a checkpoint: for itself, and, where ranks read for one another, for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import Need
from ckpt_core.disclosure import logger_of
from ckpt_core.lifecycle._part_load import PartLoad
from ckpt_core.lifecycle._sharing import Cell, Layouts, Schedule, make_schedule, relay_shared
from ckpt_core.reading import Engine, Wanted

_logger = logger_of(__name__)
_OBJECTION: Final = 1


@final
class Reads:
    """The ranges to verify, to fetch, and to pass on.

    Args:
        alone: needs that no other rank is asked for.
        shared: needs that the schedule deals with, by the identity of their payload.
        schedule: who reads what of those for whom; None if every rank reads for itself.
    """

    def __init__(
        self,
        alone: Sequence[Need],
        shared: Mapping[int, Sequence[Need]],
        schedule: Schedule | None,
    ) -> None:
        self._alone = alone
        self._shared = shared
        self._schedule = schedule

    @classmethod
    def of(cls, parts: Mapping[str, PartLoad], coordinator: Coordinator, *, read_once: bool) -> Reads:
        """What this rank reads. Collective.

        Ranks read for one another only if all of them have worked out the same schedule, which one number
        from each tells; else every rank reads all that it needs.
        """
        needs = [need for load in parts.values() for need in load.needs]
        if not read_once or coordinator.world_size == 1:
            return cls(needs, {}, None)
        schedule, names, vote = _schedule(parts, coordinator)
        if not (coordinator.can_broadcast_tensors or isinstance(vote, Exception)):
            vote = _OBJECTION  # told to all: a connection may be lost on this rank alone
        votes: list[int] = coordinator.gather(vote, what="working out who reads what")
        if sum(votes) % 2**64:
            if coordinator.is_coordinator:
                _logger.info("the ranks do not hold the same tensors: each reads for itself")
            return cls(needs, {}, None)
        shared: defaultdict[int, list[Need]] = defaultdict(list)
        for need in needs:
            if need.name in names:
                shared[id(need.payload)].append(need)
        return cls([need for need in needs if need.name not in names], shared, schedule)

    def _needs_of(self, cell: Cell) -> list[Need]:
        return [need for need in self._shared.get(id(cell.payload), ()) if need.name == cell.name]

    def checked(self) -> Iterator[Wanted]:
        """What this rank verifies: all that it will read."""
        for need in self._alone:
            yield from need.wanted()
        for cell in self._schedule.own_cells() if self._schedule is not None else ():
            yield Wanted(payload=cell.payload, start=cell.start, stop=cell.stop)

    def private(self) -> Iterator[Wanted]:
        """What this rank reads for itself alone."""
        for need in self._alone:
            yield from need.wanted()
        for cell in self._schedule.private if self._schedule is not None else ():
            for need in self._needs_of(cell):
                yield from need.wanted(cell.start, cell.stop)

    def relay(self, coordinator: Coordinator, engine: Engine) -> None:
        """Read what this rank owns for others, too, and take what others read for it."""
        if self._schedule is None:
            return

        def read(places: Sequence[tuple[Cell, memoryview]]) -> None:
            engine.fetch(
                Wanted(payload=cell.payload, start=cell.start, stop=cell.stop, into=memory)
                for cell, memory in places
            )

        def deliver(cell: Cell, content: memoryview) -> None:
            for need in self._needs_of(cell):
                need.land(cell.start, content)

        relay_shared(self._schedule, coordinator, read=read, deliver=deliver)


def _schedule(
    parts: Mapping[str, PartLoad], coordinator: Coordinator
) -> tuple[Schedule | None, set[str], int | Exception]:
    """What this rank reads for whom, the tensors that this is about, and its vote, or why it has none."""
    layouts = Layouts(coordinator.rank, coordinator.world_size)
    try:
        tensors = [tensor for load in parts.values() for tensor in load.stored(layouts)]
        schedule = make_schedule(tensors, coordinator.rank)
    except Exception as error:  # noqa: BLE001 - raised on every rank, so that nobody waits for this one
        return None, set(), error
    return schedule, {tensor.name for tensor in tensors}, schedule.consistency
