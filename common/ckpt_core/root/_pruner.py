"""Retention applied: the checkpoints to remove, and their order. Coordinator only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from ckpt_core.commit import Catalog, Inventory, read_notes, remove
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.journal import MOST_STEPS
from ckpt_core.options import CheckpointOptions
from ckpt_core.retention import (
    Abandoned,
    KeepAll,
    PrunePlan,
    as_it_is,
    plan_prune,
    unknown_metrics,
    withheld,
)
from ckpt_core.root._demoter import Demoter
from ckpt_core.root._ownership import Ownership
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_ENOUGH: Final = 2
"""The first checkpoint of a run is often saved before the first evaluation."""


@final
class Pruner:
    """Removal of checkpoints that a manager's retention policy does not keep.

    Concurrency: one thread at a time.

    Attributes:
        behind: whether the last prune has left something to be made weights of.
        weights_bytes: returns what weights will take, as far as is known; see `plan_prune`.

    Args:
        demoter: makes weights of what only a `KeepWeights` keeps.
    """

    def __init__(
        self,
        storage: Storage,
        options: CheckpointOptions,
        *,
        ownership: Ownership,
        telemetry: Telemetry,
        demoter: Demoter | None = None,
    ) -> None:
        self._demoter = demoter
        self.weights_bytes = as_it_is if demoter is None else demoter.weights_bytes
        self.behind = False
        self._storage = storage
        self._policy = options.keep or KeepAll()
        self._abandoned: Abandoned = options.abandoned
        self._ownership = ownership
        self._warned = False
        self._kept: Mapping[str, Sequence[int]] = {}
        self._telemetry = telemetry

    def plan(
        self, history: Sequence[CheckpointInfo] | None = None, *, newest: int | None = None
    ) -> PrunePlan:
        """Apply the policy to a history, by default that of the root, without removals.

        `newest` is the step committed last. Timestamps are not enough: a clock may have been set back.
        """
        if history is None:
            history = Inventory(self._storage, lambda: self._ownership.held).history()
        self._check_metrics(history)
        return self._plan(history, newest)

    def _plan(self, history: Sequence[CheckpointInfo], newest: int | None) -> PrunePlan:
        return plan_prune(
            self._policy,
            history,
            time.time(),
            abandoned=self._abandoned,
            last=newest,
            weights_bytes=self.weights_bytes,
        )

    def apply(
        self,
        *,
        newest: int | None = None,
        go_on: Callable[[], bool] = lambda: True,
        until: float = 0.0,
    ) -> PrunePlan:
        """Remove checkpoints that the policy does not keep, oldest first.

        Weights are made in the background, and waited for `until` then, in monotonic seconds; what they
        replace is removed by the first prune after that.

        One that stays must be known to be whole first (see `Inventory.droppable`, also for `go_on`). Parts of
        checkpoints, where the disks of nodes that are gone had the rest, are removed likewise. The root is
        listed again, so that pins and marks set meanwhile are seen. Marked checkpoints are neither counted
        nor removed.

        Returns:
            The plan as carried out.

        Raises:
            RootBusyError: another job has taken the root.
        """
        self._ownership.check()
        while True:
            if self._demoter is not None:
                self._demoter.take(self._ownership.check, self._ownership.inventory.note_written)
            plan = self._remove_dropped(newest, go_on)
            demoter, self.behind = self._demoter, False
            if demoter is None or not demoter.begin(plan.demote):
                return plan
            self.behind = True
            while demoter.is_busy and go_on() and time.monotonic() < until:
                demoter.wait()
            if not go_on() or time.monotonic() >= until:
                return plan

    def close(self) -> None:
        """Leave what is being made."""
        if self._demoter is not None:
            self._demoter.close()

    def _remove_dropped(self, newest: int | None, go_on: Callable[[], bool]) -> PrunePlan:
        ownership, plans = self._ownership, list[PrunePlan]()

        def choose(history: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
            plans.append(self.plan(history, newest=newest))
            return [*plans[-1].drop, *self._parts_to_drop(history, newest)]

        drop = ownership.inventory.droppable(choose, go_on=go_on)
        removed: list[CheckpointInfo] = []
        for info in drop:
            ownership.check()
            # Another process may have deleted or replaced it meanwhile, or begun to use it.
            taken = info.step in read_notes(self._storage).in_use
            if not taken and ownership.inventory.still_there(info):
                self.drop(info)
                removed.append(info)
        lighter = [info for info in removed if info.name in plans[-1].superseded]
        self.report(lighter, "demoted: the weights of each stay")
        self.report([info for info in removed if info not in lighter], f"not kept by {self._policy!r}")
        planned = {info.name for info in plans[-1].drop}
        plan = withheld(plans[-1], [info for info in drop if info.name in planned])
        found = defaultdict[str, list[int]](list)
        for step, reasons in plan.keep.items():
            for reason in reasons:
                found[reason].append(step)
        for info in plan.abandoned:
            found["abandoned, and not pruned"].append(info.step)
        kept = {reason: steps[-MOST_STEPS:] for reason, steps in found.items()}
        if kept != self._kept:
            self._kept = kept
            self._telemetry.point("retention", kept=kept, tier=self._storage.url)
        return plan

    def remove(self, name: str) -> None:
        """Remove one committed checkpoint on behalf of its host, regardless of the policy."""
        self._ownership.check()
        info = Catalog(self._storage).find(name=name)
        if info.pinned is not None:
            raise ConfigError(f"it is pinned ({info.pinned}); unpin it first")
        if info.name in self._ownership.held:
            raise ConfigError("its upload has not ended; remove it afterwards")
        self.drop(info)
        self.report([info], "removed by its host")

    def drop(self, info: CheckpointInfo, **why: str) -> None:
        """Remove a checkpoint that retention may drop; `report` follows."""
        with self._telemetry.span("prune.remove", step=info.step, name=info.name, **why):
            remove(self._storage, info)
        self._ownership.inventory.forget(info.name)

    def report(self, removed: Sequence[CheckpointInfo], why: str) -> None:
        """Report removals to telemetry, if there were any."""
        if removed:
            size = sum(info.size_bytes for info in removed)
            names = [info.name for info in removed]
            self._telemetry.point("prune", names=names, size_bytes=size, why=why, tier=self._storage.url)

    def _parts_to_drop(
        self, history: Sequence[CheckpointInfo], newest: int | None
    ) -> Sequence[CheckpointInfo]:
        """Return the parts to remove: retention would not keep them if they were whole.

        None is the newest. The rest of a part may come back with its node, and nothing is removed that would
        be kept then. Where the step was saved again, that checkpoint stands for it, also of the newest.
        """
        parts = self._ownership.inventory.parts
        if not parts:
            return ()
        held, plan = self._ownership.held, self._plan([*history, *parts], newest)
        drop = {(info.name, info.save_id) for info in plan.drop}
        whole = {info.step for info in history if info.usable and not info.abandoned}
        return [
            info
            for info in parts
            if (info.step in whole or (info.name, info.save_id) in drop)
            and info.step <= max(whole, default=-1)
            and info.pinned is None
            and info.usable
            and info.name not in held
        ]

    def _check_metrics(self, history: Sequence[CheckpointInfo]) -> None:
        """Warn once if the policy ranks by a metric that no checkpoint has."""
        ranks_by = unknown_metrics(self._policy, ())
        if self._warned or not ranks_by:
            return
        history = [info for info in history if not info.abandoned]
        unknown = () if len(history) < _ENOUGH else unknown_metrics(self._policy, history)
        if unknown:
            self._warned = True
            there = sorted({metric for info in history for metric in info.metrics})
            _logger.warning(
                "none of the %d checkpoints in %s has a number for the metric %s, so that none is kept as "
                "the best, and all stay where nothing else in keep= keeps any; metrics there: %s. Measure "
                "it where checkpoints are saved, write it back (`ckpt annotate`), or correct keep=",
                len(history),
                self._storage.url,
                " or ".join(map(repr, unknown)),
                ", ".join(there) or "none",
            )
