"""Who writes what, agreed once and kept for as long as no rank's state changes its make-up.

Planning costs time and messages that grow with the number of tensors and ranks; its result is a function of
names, dtypes, shapes and placements, which rarely change between two saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import PartPlanner, decide, lowest_rank_only
from ckpt_core.lifecycle._local import LocalKey


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """What one rank could write, and which of its entries nothing keeps equal over ranks."""

    plans: dict[str, SavePlan]
    uneven: frozenset[LocalKey]


@final
class AgreedPlans:
    """This rank's share of the writing, per part, and on the coordinator DCP's metadata.

    Concurrency: `agree` on the main thread, collective.
    """

    def __init__(self) -> None:
        self._fingerprint: Any = None
        self.own: Mapping[str, SavePlan] = {}
        self.metadata: dict[str, Metadata] = {}

    def agree(
        self,
        planners: Mapping[str, PartPlanner] | BaseException,
        uneven: Collection[LocalKey],
        coordinator: Coordinator,
    ) -> None:
        """Make the plans fit the state of every rank; without an exchange if they do already.

        Args:
            planners: part -> planner over the live state, or the error that kept this rank from having them.
            uneven: keys of entries that are left to the lowest rank that has them.
            coordinator: the ranks.

        Raises:
            CoordinationError: a rank could not plan; the same on every rank.
        """
        error = planners if isinstance(planners, BaseException) else None
        fingerprint = None if error is not None else _fingerprint(planners, uneven)
        changed = fingerprint is None or fingerprint != self._fingerprint
        if not coordinator.combine([int(changed)])[0]:
            return
        self._fingerprint = None
        self.own = coordinator.exchange(_propose(planners, uneven), self._decide)
        self._fingerprint = fingerprint

    def _decide(self, proposals: list[_Proposal]) -> list[Mapping[str, SavePlan]]:
        parts = sorted({part for proposal in proposals for part in proposal.plans})
        answers: list[dict[str, SavePlan]] = [{} for _ in proposals]
        self.metadata = {}
        for part in parts:
            # A rank without the part still takes its place, so that ranks and plans stay aligned.
            local = [proposal.plans.get(part, SavePlan([], planner_data={})) for proposal in proposals]
            uneven = {key for proposal in proposals for of_part, key in proposal.uneven if of_part == part}
            final_plans, self.metadata[part] = decide(lowest_rank_only(local, uneven))
            for answer, plan in zip(answers, final_plans, strict=True):
                answer[part] = plan
        return list(answers)


def _fingerprint(planners: Mapping[str, PartPlanner] | BaseException, uneven: Collection[LocalKey]) -> Any:
    if isinstance(planners, BaseException):
        return None
    return tuple((part, planner.fingerprint()) for part, planner in planners.items()), frozenset(uneven)


def _propose(
    planners: Mapping[str, PartPlanner] | BaseException, uneven: Collection[LocalKey]
) -> _Proposal | BaseException:
    if isinstance(planners, BaseException):
        return planners
    try:
        plans = {part: planner.local_plan() for part, planner in planners.items()}
    except Exception as error:  # noqa: BLE001 - the exchange carries it to every rank
        return error
    return _Proposal(plans=plans, uneven=frozenset(uneven))
