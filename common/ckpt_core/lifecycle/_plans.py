"""Who writes what, agreed once and kept for as long as no rank's state changes its make-up.

Planning costs time and messages that grow with the number of tensors and ranks; its result is a function of
names, dtypes, shapes and placements, which rarely change between two saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Literal, final

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import Decision, GroupNames, Meshes, Part, Replicas, Task, decide
from ckpt_core.lifecycle._local import LocalKey
from ckpt_core.lifecycle._replicas import Evidence
from ckpt_core.messages import message
from ckpt_core.options import OnDivergence


@message
class Keeping(Enum):
    """When a rank keeps its own values of entries that nothing keeps equal over ranks."""

    NEVER = auto()
    """They are in the checkpoint: this rank writes all of them."""
    IF_DIFFERENT = auto()
    """The coordinator writes the same entries, so only what differs from its values is kept."""
    ALWAYS = auto()
    """Several ranks write them, and nobody tells this one what."""


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What of a rank's state the plans depend on, beside its tensors and values.

    Attributes:
        uneven: keys of entries that are left to the lowest rank that has them.
        files: names of the small files that this rank could write.
        shared: names of its shared items.
        groups: part -> the names in its parameter groups.
    """

    uneven: frozenset[LocalKey] = frozenset()
    files: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    groups: Mapping[str, GroupNames] = field(default_factory=dict[str, GroupNames])


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """What one rank could write, and what its DTensors are spread over."""

    plans: dict[str, SavePlan]
    offer: Offer
    meshes: dict[str, Meshes] = field(default_factory=dict[str, Meshes])


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class _Assignment:
    """What one rank is told to write."""

    parts: dict[str, Task]
    files: frozenset[str]
    shared: frozenset[str]
    keeping: Keeping


@final
class AgreedPlans:
    """This rank's share of the writing, and on the coordinator what DCP says of the whole.

    Who calls what: 1. (all ranks, every save) `look`. 2. (all ranks, if it was true on any of them) `agree`.
    3. (all ranks, every save) `show`.

    Concurrency: main thread; `distrust` may be called on any.

    Attributes:
        parts: part -> what this rank writes of it.
        files: names of the small files that this rank writes.
        shared: names of the shared items that this rank writes.
        replicas: part -> what several ranks hold under one name; on the coordinator only.
        keeping: when it keeps its own values of uneven entries.
        metadata: part -> DCP's metadata; on the coordinator only.
        generation: counts the agreements; the same on every rank.
    """

    def __init__(self, on_divergence: OnDivergence = "refuse") -> None:
        self.parts: dict[str, Part] = {}
        self.files: frozenset[str] = frozenset()
        self.shared: frozenset[str] = frozenset()
        self.replicas: Mapping[str, Sequence[Replicas]] = {}
        self.keeping = Keeping.NEVER
        self.metadata: Mapping[str, Metadata] = {}
        self.generation = 0
        self._on_divergence: OnDivergence = on_divergence
        self._offer = Offer()
        self._valid = False
        self._distrusted = False
        self._turn = 0
        self._problem: Exception | None = None

    def look(self, sharded: Mapping[str, Mapping[str, Any]], offer: Offer) -> bool:
        """Take the live state of a save; whether the plans have to be agreed on anew.

        Args:
            sharded: part -> nested state dict.
            offer: what else the plans depend on.
        """
        fits = (offer, list(sharded)) == (self._offer, list(self.parts))
        self._offer = offer
        self.parts = {name: self.parts.get(name) or Part() for name in sharded}
        alike = [self.parts[name].look(tree) for name, tree in sharded.items()]
        self._valid = self._valid and fits and all(alike)
        return self._distrusted or not self._valid

    def distrust(self) -> None:
        """Replicas were found to differ: from the next save on nothing counts as shown to be the same."""
        self._distrusted = True

    def show(self, shared: Mapping[str, int]) -> Evidence | None:
        """What this rank has to show of what other ranks hold, too; None if nobody is to compare it.

        Args:
            shared: digests of the shared items that must be the same on all ranks.
        """
        if self._on_divergence == "keep-each":
            return None
        turn, self._turn = self._turn, self._turn + 1
        return Evidence(self.parts, turn, shared)

    def agree(self, coordinator: Coordinator) -> None:
        """Make the plans fit the state of every rank. Collective.

        Raises:
            CoordinationError: a rank could not plan; the same on every rank.
        """
        self._valid, self._distrusted, self._turn, self._problem = False, False, 0, None
        assigned = coordinator.gather_scatter(self._propose(), self._decide, what="planning a save")
        self.generation += 1
        self.files, self.keeping, self.shared = assigned.files, assigned.keeping, assigned.shared
        try:
            for name, part in self.parts.items():
                part.accept(assigned.parts[name], coordinator.rank)
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
            meshes = {name: part.meshes() for name, part in self.parts.items()}
        except Exception as error:  # noqa: BLE001 - the exchange carries it to every rank
            return error
        return _Proposal(plans=plans, offer=self._offer, meshes=meshes)

    def _decide(self, proposals: list[_Proposal]) -> list[_Assignment]:
        decided = {
            part: _decide_part(part, proposals, self._on_divergence)
            for part in sorted({part for proposal in proposals for part in proposal.plans})
        }
        self.metadata = {part: decision.metadata for part, decision in decided.items()}
        self.replicas = {part: decision.replicas for part, decision in decided.items()}
        keepings = _keepings([proposal.offer.uneven for proposal in proposals])
        files = _lowest([proposal.offer.files for proposal in proposals])
        shared = [proposal.offer.shared for proposal in proposals]
        writers = shared if self._on_divergence == "keep-each" else _lowest(shared)
        return [
            _Assignment(
                parts={part: decision.tasks[rank] for part, decision in decided.items()},
                files=files[rank],
                shared=writers[rank],
                keeping=keepings[rank],
            )
            for rank in range(len(proposals))
        ]


_WRITTEN: Final[Mapping[OnDivergence, Literal["spread", "lowest", "kept"]]] = {
    "refuse": "spread",
    "warn": "lowest",
    "keep-each": "kept",
}


def _decide_part(part: str, proposals: Sequence[_Proposal], on_divergence: OnDivergence) -> Decision:
    return decide(
        # A rank without the part still takes its place, so that ranks and plans stay aligned.
        [proposal.plans.get(part, SavePlan([], planner_data={})) for proposal in proposals],
        {key for proposal in proposals for of_part, key in proposal.offer.uneven if of_part == part},
        meshes=[proposal.meshes.get(part, {}) for proposal in proposals],
        groups=[proposal.offer.groups.get(part, {}) for proposal in proposals],
        replicas=_WRITTEN[on_divergence],
    )


def _lowest(offered: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """For every rank the names that no lower one offers."""
    writers: dict[str, int] = {}
    for rank, names in enumerate(offered):
        for name in names:
            writers.setdefault(name, rank)
    return [frozenset(name for name in names if writers[name] == rank) for rank, names in enumerate(offered)]


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
