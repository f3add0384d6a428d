"""The blocking part of a save: capture the state, agree on the plan, stage copies.

If names, shapes, dtypes and placements are unchanged since the last save, a save costs one all-reduce of a
few integers, for any number of ranks and tensors. Storage is not touched unless the save must be refused.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

from ckpt_core.commit import working_name
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import GroupNames
from ckpt_core.errors import ConfigError, CoordinationError
from ckpt_core.names import SHARED, rank_name, shared_name
from ckpt_core.provenance import configuration_digest
from ckpt_core.saving._checks import LoadNotes, TrainedSlots, refuse_non_finite_in_files, trained_slots
from ckpt_core.saving._disk_space import SpaceNeeded
from ckpt_core.saving._handle import SaveRequest, failed_in, save_error
from ckpt_core.saving._plan_cache import KeepOwn, Offer
from ckpt_core.saving._save import Means, Save
from ckpt_core.saving._stager import StagedParts, Stager
from ckpt_core.staging import Arenas
from ckpt_core.state import (
    PICKLED,
    EncodedItems,
    RankBuffers,
    State,
    as_captured,
    encode_items,
    get,
    pickled_key,
)
from ckpt_core.types import CapturedState, Lineage, Provenance

_MICROSECONDS: Final = 1_000_000
_AGREEING: Final = "agreeing on a save"
_PLANNING: Final = "planning a save"
_IN_JSON: Final = 2
"""Upper bound of a tensor's size as JSON, relative to its size in memory."""
_FILES_PER_PART: Final = 2
_OTHER_FILES: Final = 2
"""The chunk table, and the file of rank-local buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LocalState:
    """The captured state of this rank, with its small values encoded.

    Attributes:
        files: name -> content of the small files that this rank could write.
        changed: whether the cached plan no longer fits.
        extra_bytes, extra_files: upper bounds of its writes beside tensors.
    """

    state: CapturedState
    files: Mapping[str, bytes]
    shared: EncodedItems
    changed: bool
    extra_bytes: int
    extra_files: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreement:
    """The result of the all-reduce, equal on every rank."""

    trouble: bool
    changed: bool
    created: float
    most_extra_bytes: int
    most_extra_files: int


@final
class Preparer:
    """The blocking part of every save; it keeps plans and arenas from save to save.

    Concurrency: main thread; `prepare` and `prewarm` are collective.
    """

    def __init__(self, coordinator: Coordinator, means: Means) -> None:
        self._coordinator, self._means, self._options = coordinator, means, means.options
        self._url, self._ownership, self._plans = means.storage.url, means.ownership, means.plans
        self._notes = LoadNotes(allow_pickle=self._options.allow_pickle)
        self._configuration: str | None = None
        self._trained: tuple[int, TrainedSlots] = (-1, {})
        self.stager = Stager(Arenas(self._options.arenas, self._options.staging_memory_bytes))

    def prepare(self, request: SaveRequest, state: State | CapturedState) -> Save:
        """Capture, agree and stage. Nothing is written; the root must be owned.

        Raises:
            SaveError: planning failed on a rank; the same on every rank.
            ConfigError: ranks ask for different saves; the same on every rank.
            CheckpointExistsError: the name is taken; the same on every rank.
        """
        plans, coordinator, means = self._plans, self._coordinator, self._means
        captured = self._capture(state, request.refusal)
        try:
            agreement = self._all_reduce(request, captured)
            local, request = self._resolve(request, captured, agreement)
            if agreement.changed:
                plans.negotiate(coordinator)
            if means.partners is not None:
                means.partners.settle(coordinator)
        except CoordinationError as error:
            raise save_error(self._url, request.step, "plan", error) from error
        save_id = self._ownership.id_at(round(agreement.created * _MICROSECONDS))
        lead = coordinator.is_coordinator
        save = Save(
            means=means,
            channel=coordinator.commit_channel(),
            request=request,
            save_id=save_id,
            working=working_name(means.storage, request.name, save_id),
            created=agreement.created,
            files={
                **{name: content for name, content in local.files.items() if name in plans.files},
                **self._shared_file(local.shared),
            },
            metadata=plans.metadata,
            items=_kinds(local.state),
            buffers=frozenset(local.state.local),
            keeping=plans.keeping,
            optimizers=local.state.optimizers,
            lineage=self._ownership.line.lineage_of(request.step) if lead else Lineage(),
            generation=plans.generation,
            extra=SpaceNeeded(agreement.most_extra_bytes, agreement.most_extra_files),
            replicas=plans.replicas,
            provenance=self._provenance(local.state) if lead else Provenance(),
        )
        try:
            self._stage(save, local)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            save.error = failed_in("stage", caught)
        finally:
            plans.release()
        return save

    def prewarm(self, state: State | CapturedState) -> int:
        """Plan and allocate the arenas ahead of the first save.

        Returns:
            Bytes of host memory that this rank's arenas take.

        Raises:
            SaveError: planning failed on a rank; the same on every rank.
            StagingMemoryError: this rank's share does not fit; others may have room.
        """
        plans, coordinator = self._plans, self._coordinator
        captured = self._capture(state)
        failed = isinstance(captured, BaseException)
        try:
            if coordinator.all_reduce_max([int(failed)], what=_PLANNING)[0]:
                coordinator.gather(captured if isinstance(captured, BaseException) else None)
            changed = not isinstance(captured, BaseException) and captured.changed
            if coordinator.all_reduce_max([int(changed)], what=_PLANNING)[0]:
                plans.negotiate(coordinator)
            plans.raise_pending()
        except CoordinationError as error:
            raise save_error(self._url, 0, "plan", error) from error
        try:
            return self.stager.prewarm(plans.parts, plans.generation)
        finally:
            plans.release()

    def _provenance(self, state: CapturedState) -> Provenance:
        if self._configuration is None:
            host = state.configuration
            self._configuration = configuration_digest(
                lambda: {"options": self._options.chosen, "host": None if host is None else host()}
            )
        return Provenance(configuration_sha256=self._configuration, data=state.positions)

    def _capture(
        self, state: State | CapturedState, refusal: Exception | None = None
    ) -> _LocalState | BaseException:
        try:
            if refusal is not None:
                raise refusal
            return self._encode(as_captured(state))
        except Exception as error:  # noqa: BLE001 - an exchange carries it to every rank
            return error

    def _encode(self, state: CapturedState) -> _LocalState:
        plans, coordinator = self._plans, self._coordinator
        scope, several = rank_name(coordinator.rank), coordinator.world_size > 1
        per_rank, shared = encode_items(state.per_rank), encode_items(state.shared)
        files = {**state.files, scope: per_rank.content}
        sharded: dict[str, Mapping[str, Any]] = dict(state.sharded)
        pickled = {pickled_key(scope, name): content for name, content in per_rank.pickled.items()}
        pickled |= {pickled_key("shared", name): content for name, content in shared.pickled.items()}
        if pickled:
            sharded[""] = {**sharded.get("", {}), PICKLED: pickled}
        changed = plans.update(sharded, _offer(state, files, several=several))
        small = [len(content) for name, content in files.items() if changed or name in plans.files]
        if coordinator.is_coordinator or changed or plans.shared:
            small.append(len(shared.content))
        buffers = (
            sum(tensor.numel() * tensor.element_size() for tensor in state.local.values()) if several else 0
        )
        return _LocalState(
            state=state,
            files=files,
            shared=shared,
            changed=changed,
            extra_bytes=sum(small) + sum(map(len, pickled.values())) + buffers * _IN_JSON,
            extra_files=len(small) + _FILES_PER_PART * len(sharded) + _OTHER_FILES,
        )

    def _all_reduce(self, request: SaveRequest, captured: _LocalState | BaseException) -> _Agreement:
        lead, failed = self._coordinator.is_coordinator, isinstance(captured, BaseException)
        taken = lead and self._ownership.is_taken(request.name, replace=request.replace)
        changed = isinstance(captured, BaseException) or captured.changed
        created = int(time.time() * _MICROSECONDS) if lead else 0
        digest = request.digest() + self._options.replicas - 1
        extra = (
            (0, 0) if isinstance(captured, BaseException) else (captured.extra_bytes, captured.extra_files)
        )
        # Only maxima can be reduced: the maximum and, negated, the minimum show whether all are equal.
        found = self._coordinator.all_reduce_max(
            [int(failed or taken), int(changed), digest, -digest, created, *extra], what=_AGREEING
        )
        return _Agreement(
            trouble=bool(found[0]) or found[2] != -found[3],
            changed=bool(found[1]),
            created=found[4] / _MICROSECONDS,
            most_extra_bytes=found[5],
            most_extra_files=found[6],
        )

    def _resolve(
        self, request: SaveRequest, captured: _LocalState | BaseException, agreement: _Agreement
    ) -> tuple[_LocalState, SaveRequest]:
        """Report this rank's error to all, or clear the name: see `Ownership.clear_name`."""

        def decide(requested: list[tuple[Any, ...]]) -> list[str]:
            if len(set(requested)) > 1:
                different = sorted(set(requested))
                raise ConfigError(f"ranks ask for different saves: {different}; all must ask for the same")
            name = self._ownership.clear_name(request.name, request.step, replace=request.replace)
            return [name] * len(requested)

        error = captured if isinstance(captured, BaseException) else None
        own = (request.step, request.name, *(["replicas=2"] if self._options.replicas > 1 else []))
        if agreement.trouble:
            name = self._coordinator.gather_scatter(error or own, decide, what=_AGREEING)
            request = replace(request, name=name)
        if isinstance(captured, BaseException):
            raise captured  # unreachable: an error of one rank makes every rank raise
        return captured, request

    def _stage(self, save: Save, local: _LocalState) -> None:
        plans, state = self._plans, local.state
        plans.raise_pending()
        if self._options.reject_non_finite:
            refuse_non_finite_in_files(state.in_files)
        if self._coordinator.world_size > 1:
            save.evidence = plans.evidence({name: local.shared.digest(name) for name in state.alike})
        if self._options.on_stale != "ignore" and self._trained[0] != plans.generation:
            self._trained = plans.generation, trained_slots(plans, state)
        save.trained = self._trained[1]
        if plans.keeping is not KeepOwn.NEVER or self._coordinator.is_coordinator:
            save.local = RankBuffers(state.local)
        stable = state.stable if self._options.staging == "overlapped" and state.optimizers else None
        save.staged = self.stager.stage(plans.parts, plans.generation, stable=stable)
        self._notes.log(state, plans, save.staged, self._url)
        save.extra = self._extra(save.extra, save.staged)

    def _extra(self, of_rank: SpaceNeeded, staged: StagedParts) -> SpaceNeeded:
        """Add the staged plain values; those of other ranks are assumed to be alike."""
        values = sum(
            len(content)
            for part in staged.values.values()
            for index, content in part.items()
            if not index.fqn.startswith(f"{PICKLED}.")  # counted already
        )
        ranks = self._coordinator.world_size
        return SpaceNeeded(ranks * (of_rank.size_bytes + values), ranks * of_rank.files)

    def _shared_file(self, items: EncodedItems) -> Mapping[str, bytes]:
        """Return this rank's file of shared items; few ranks but the coordinator have one."""
        names = self._plans.shared
        if self._coordinator.is_coordinator:
            return {SHARED: items.content_of(names)}
        return {shared_name(self._coordinator.rank): items.content_of(names)} if names else {}


def _offer(state: CapturedState, files: Collection[str], *, several: bool) -> Offer:
    groups: dict[str, GroupNames] = {}
    for part, path in state.groups if several else ():
        lists = get(state.sharded[part], path) or ()
        groups[part] = {**groups.get(part, {}), path: [tuple(each["params"]) for each in lists]}
    return Offer(
        rank_local=frozenset(state.local),
        files=frozenset(files),
        shared=frozenset(state.shared),
        groups=groups,
    )


def _kinds(state: CapturedState) -> dict[str, str]:
    kinds = {name: "sharded" for tree in state.sharded.values() for name in tree}
    kinds |= dict.fromkeys(state.shared, "shared") | dict.fromkeys(state.per_rank, "per_rank")
    if state.files:
        kinds["files"] = "files"
    return kinds
