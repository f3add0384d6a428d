"""Who writes what, agreed once and kept for as long as no rank's state changes its make-up.

Planning costs time and messages that grow with the number of tensors and ranks; its result is a function of
names, dtypes, shapes and placements, which rarely change between two saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, final

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import Part, Share, decide
from ckpt_core.lifecycle._local import LocalKey


class Keeping(Enum):
    """When a rank keeps its own values of entries that nothing keeps equal over ranks."""

    NEVER = auto()
    """They are in the checkpoint: this rank writes all of them."""
    IF_DIFFERENT = auto()
    """The coordinator writes the same entries, so only what differs from its values is kept."""
    ALWAYS = auto()
    """Several ranks write them, and nobody tells this one what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """What one rank could write, and which of its entries nothing keeps equal over ranks."""

    plans: dict[str, SavePlan]
    uneven: frozenset[LocalKey]
    files: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Assignment:
    """What one rank is told to write."""

    parts: dict[str, Share]
    files: frozenset[str]
    keeping: Keeping


@final
class AgreedPlans:
    """This rank's share of the writing, and on the coordinator what DCP says of the whole.

    Who calls what: 1. (all ranks, every save) `look`. 2. (all ranks, if it was true on any of them) `agree`.

    Concurrency: main thread.

    Attributes:
        parts: part -> what this rank writes of it.
        files: names of the small files that this rank writes.
        keeping: when it keeps its own values of uneven entries.
        metadata: part -> DCP's metadata; on the coordinator only.
        generation: counts the agreements; the same on every rank.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.files: frozenset[str] = frozenset()
        self.keeping = Keeping.NEVER
        self.metadata: Mapping[str, Metadata] = {}
        self.generation = 0
        self._uneven: frozenset[LocalKey] = frozenset()
        self._offered: frozenset[str] = frozenset()
        self._valid = False
        self._problem: Exception | None = None

    def look(
        self, sharded: Mapping[str, Mapping[str, Any]], uneven: Collection[LocalKey], files: Iterable[str]
    ) -> bool:
        """Take the live state of a save; whether the plans have to be agreed on anew.

        Args:
            sharded: part -> nested state dict.
            uneven: keys of entries that are left to the lowest rank that has them.
            files: names of the small files that this rank could write.
        """
        make_up = frozenset(uneven), frozenset(files), list(sharded)
        fits = make_up == (self._uneven, self._offered, list(self.parts))
        self._uneven, self._offered, _ = make_up
        self.parts = {name: self.parts.get(name) or Part() for name in sharded}
        alike = [self.parts[name].look(tree) for name, tree in sharded.items()]
        self._valid = self._valid and fits and all(alike)
        return not self._valid

    def agree(self, coordinator: Coordinator) -> None:
        """Make the plans fit the state of every rank. Collective.

        Raises:
            CoordinationError: a rank could not plan; the same on every rank.
        """
        self._valid, self._problem = False, None
        assigned = coordinator.exchange(self._propose(), self._decide, what="planning a save")
        self.generation += 1
        self.files, self.keeping = assigned.files, assigned.keeping
        try:
            for name, part in self.parts.items():
                part.accept(assigned.parts[name])
        except Exception as error:  # noqa: BLE001 - `check` raises it where every rank can be told
            self._problem = error
        else:
            self._valid = True

    def trees(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The live state of this rank, by part, until `forget`."""
        return ((name, part.tree) for name, part in self.parts.items())

    def check(self) -> None:
        """Raise what kept this rank from taking over its share."""
        if self._problem is not None:
            raise self._problem

    def forget(self) -> None:
        """Let go of the live state."""
        for part in self.parts.values():
            part.forget()

    def _propose(self) -> _Proposal | BaseException:
        try:
            plans = {name: part.local_plan() for name, part in self.parts.items()}
        except Exception as error:  # noqa: BLE001 - the exchange carries it to every rank
            return error
        return _Proposal(plans=plans, uneven=self._uneven, files=self._offered)

    def _decide(self, proposals: list[_Proposal]) -> list[_Assignment]:
        everyone, self.metadata = _plan_all(proposals)
        writers: dict[str, int] = {}
        for rank, proposal in enumerate(proposals):
            for name in proposal.files:
                writers.setdefault(name, rank)
        keepings = _keepings([proposal.uneven for proposal in proposals])
        return [
            _Assignment(
                parts={part: shares[rank] for part, shares in everyone.items()},
                files=frozenset(name for name, writer in writers.items() if writer == rank),
                keeping=keepings[rank],
            )
            for rank in range(len(proposals))
        ]


def _plan_all(
    proposals: Sequence[_Proposal],
) -> tuple[dict[str, Sequence[Share]], dict[str, Metadata]]:
    everyone: dict[str, Sequence[Share]] = {}
    metadata: dict[str, Metadata] = {}
    for part in sorted({part for proposal in proposals for part in proposal.plans}):
        # A rank without the part still takes its place, so that ranks and plans stay aligned.
        local = [proposal.plans.get(part, SavePlan([], planner_data={})) for proposal in proposals]
        uneven = {key for proposal in proposals for of_part, key in proposal.uneven if of_part == part}
        everyone[part], metadata[part] = decide(local, uneven)
    return everyone, metadata


def _keepings(uneven: Sequence[frozenset[LocalKey]]) -> list[Keeping]:
    lowest: dict[LocalKey, int] = {}
    for rank, keys in enumerate(uneven):
        for key in keys:
            lowest.setdefault(key, rank)

    def keeping(rank: int, keys: frozenset[LocalKey]) -> Keeping:
        if all(lowest[key] == rank for key in keys):
            return Keeping.NEVER
        return Keeping.IF_DIFFERENT if keys == uneven[0] else Keeping.ALWAYS

    return [keeping(rank, keys) for rank, keys in enumerate(uneven)]
