"""The cached write plans, negotiated only when the structure of the state changes.

Planning costs time and messages that grow with the number of tensors and ranks; its result is a function of
names, dtypes, shapes and placements, which rarely change between two saves.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final, Literal, TypeVar, final

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import (
    Decision,
    GroupNames,
    LocalPlan,
    Outline,
    Part,
    PlannedIndex,
    Replicas,
    WriteTask,
    decide,
)
from ckpt_core.messages import decode, encode, message
from ckpt_core.options import OnDivergence
from ckpt_core.saving._reports import Evidence
from ckpt_core.state import BufferKey

T = TypeVar("T")


@message
class KeepOwn(Enum):
    """When a rank writes its own values of rank-local buffers."""

    NEVER = auto()
    """All of them are in the checkpoint already: this rank is their writer."""
    IF_DIFFERENT = auto()
    """The coordinator writes the same entries, so this rank writes those that differ."""
    ALWAYS = auto()
    """Several ranks write them, and this rank does not know their values."""


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A rank's input to the plans, beside its tensors and values: names.

    The lowest rank with a `rank_local` entry writes it. `files` are small ones that this rank could write.
    """

    rank_local: frozenset[BufferKey] = frozenset()
    files: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    groups: Mapping[str, GroupNames] = field(default_factory=dict[str, GroupNames])


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """One rank's possible writes.

    Attributes:
        common: outlines and offer but for `files`, compressed: most ranks send the same bytes.
        boxes: part -> boxes of its `LocalPlan`, compressed.
        files: names of the small files that it could write.
    """

    common: bytes
    boxes: Mapping[str, bytes]
    files: frozenset[str]

    @classmethod
    def of(cls, plans: Mapping[str, LocalPlan], offer: Offer) -> Proposal:
        common = {part: plan.outline for part, plan in plans.items()}, replace(offer, files=frozenset())
        return cls(
            common=zlib.compress(encode(common), level=1),
            boxes={part: zlib.compress(plan.boxes) for part, plan in plans.items()},
            files=offer.files,
        )


_Common = tuple[Mapping[str, Outline], Offer]


@message
@dataclass(frozen=True, kw_only=True, slots=True)
class _RankPlan:
    parts: dict[str, WriteTask]
    files: frozenset[str]
    shared: frozenset[str]
    keeping: KeepOwn


@final
class PlanCache:
    """This rank's share of the writes; on the coordinator also DCP's metadata.

    Order of calls, on all ranks: 1. `update`, for every save. 2. `negotiate`, if that was true on any rank.
    3. `raise_pending`. 4. `evidence`, for every save of several ranks. 5. `release`.

    Concurrency: main thread; `distrust` on any thread.

    Attributes:
        files: names of the small files that this rank writes.
        shared: names of the shared items that this rank writes.
        replicas: part -> entries that several ranks hold; on the coordinator only.
        keeping: when this rank writes its rank-local buffers.
        metadata: part -> its index; on the coordinator only.
        generation: the number of negotiations; the same on every rank.
    """

    def __init__(self, on_divergence: OnDivergence = "refuse") -> None:
        self.parts: dict[str, Part] = {}
        self.files: frozenset[str] = frozenset()
        self.shared: frozenset[str] = frozenset()
        self.replicas: Mapping[str, Sequence[Replicas]] = {}
        self.keeping = KeepOwn.NEVER
        self.metadata: Mapping[str, PlannedIndex] = {}
        self.generation = 0
        self._on_divergence: OnDivergence = on_divergence
        self._offer = Offer()
        self._valid = False
        self._distrusted = False
        self._turn = 0
        self._problem: Exception | None = None

    def update(self, sharded: Mapping[str, Mapping[str, Any]], offer: Offer) -> bool:
        """Hold the live state of a save; return whether the plans must be negotiated."""
        fits = (offer, list(sharded)) == (self._offer, list(self.parts))
        self._offer = offer
        self.parts = {name: self.parts.get(name) or Part() for name in sharded}
        alike = [self.parts[name].update(tree) for name, tree in sharded.items()]
        self._valid = self._valid and fits and all(alike)
        return self._distrusted or not self._valid

    def distrust(self) -> None:
        """Note that replicas differ: the next save negotiates and compares every byte."""
        self._distrusted = True

    def evidence(self, shared: Mapping[str, int]) -> Evidence | None:
        """Take fingerprints of this rank's replicas; None if they are not compared.

        `shared` are digests of the shared items that must be the same on all ranks.
        """
        if self._on_divergence == "keep-each":
            return None
        turn, self._turn = self._turn, self._turn + 1
        return Evidence(self.parts, turn, shared)

    def negotiate(self, coordinator: Coordinator) -> None:
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
        except Exception as error:  # noqa: BLE001 - `raise_pending` raises it in time for the commit barrier
            self._problem = error
        else:
            self._valid = True

    def raise_pending(self) -> None:
        """Raise the error that kept this rank from accepting its share, if any."""
        if self._problem is not None:
            raise self._problem

    def release(self) -> None:
        for part in self.parts.values():
            part.release()

    def _propose(self) -> Proposal | BaseException:
        try:
            return Proposal.of({name: part.local_plan() for name, part in self.parts.items()}, self._offer)
        except Exception as error:  # noqa: BLE001 - the exchange carries it to every rank
            return error

    def _decide(self, proposals: list[Proposal]) -> list[_RankPlan]:
        known: dict[bytes, _Common] = {}
        for proposal in proposals:
            if proposal.common not in known:
                known[proposal.common] = decode(zlib.decompress(proposal.common))
        commons = [known[proposal.common] for proposal in proposals]
        decided = {
            part: _decide_part(part, proposals, commons, self._on_divergence)
            for part in sorted({part for outlines, _ in known.values() for part in outlines})
        }
        self.metadata = {part: decision.planned for part, decision in decided.items()}
        self.replicas = {part: decision.replicas for part, decision in decided.items()}
        keepings = _keepings([offer.rank_local for _, offer in commons])
        files = _lowest([proposal.files for proposal in proposals])
        shared = [offer.shared for _, offer in commons]
        writers = shared if self._on_divergence == "keep-each" else _lowest(shared)
        return [
            _RankPlan(
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


def _decide_part(
    part: str, proposals: Sequence[Proposal], commons: Sequence[_Common], on_divergence: OnDivergence
) -> Decision:
    nothing = LocalPlan()  # of a rank without the part, so that ranks and plans stay aligned
    return decide(
        [
            LocalPlan(outline=outlines[part], boxes=zlib.decompress(proposal.boxes[part]))
            if part in outlines
            else nothing
            for proposal, (outlines, _) in zip(proposals, commons, strict=True)
        ],
        {key for keys in {offer.rank_local for _, offer in commons} for of, key in keys if of == part},
        groups=[offer.groups.get(part, {}) for _, offer in commons],
        replicas=_WRITTEN[on_divergence],
    )


def _lowest(offered: Sequence[frozenset[T]]) -> list[frozenset[T]]:
    """Return for every rank the names that no lower rank offers."""
    writers: dict[T, int] = {}
    for rank, names in enumerate(offered):
        for name in names:
            writers.setdefault(name, rank)
    return [frozenset(name for name in names if writers[name] == rank) for rank, names in enumerate(offered)]


def _keepings(rank_local: Sequence[frozenset[BufferKey]]) -> list[KeepOwn]:
    return [
        KeepOwn.NEVER if own == keys else KeepOwn.IF_DIFFERENT if keys == rank_local[0] else KeepOwn.ALWAYS
        for own, keys in zip(_lowest(rank_local), rank_local, strict=True)
    ]
