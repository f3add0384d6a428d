"""The first half of a save, on the main thread: capture, plan, agree, stage."""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.commit import begin
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import PartPlanner
from ckpt_core.errors import ConfigError, CoordinationError, DeadlineError, SaveError
from ckpt_core.lifecycle._items import PICKLED, encode_items, pickled_key
from ckpt_core.lifecycle._local import LocalKey, digests, diverging, encode_local
from ckpt_core.lifecycle._plans import AgreedPlans
from ckpt_core.lifecycle._stage import NOTHING_STAGED, StagedParts, Stager
from ckpt_core.names import SHARED, rank_name
from ckpt_core.storage import Storage
from ckpt_core.types import CapturedState


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What is to be saved under which name. `replace` allows `name` to be committed already."""

    step: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replace: bool = False

    def __post_init__(self) -> None:
        # At once: the commit would find out only after everything has been written.
        try:
            json.dumps(self.annotations, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"annotations of step {self.step} must be plain JSON: {error}") from error
        try:
            # A metric is often a tensor of one element, which no listing could show.
            numbers = {str(name): float(value) for name, value in self.metrics.items()}
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"metrics of step {self.step} must be numbers by name: {error}") from error
        object.__setattr__(self, "metrics", numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """What one rank brings to the exchange."""

    step: int
    name: str
    files: tuple[str, ...]
    digests: dict[LocalKey, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one rank is told to write, and where."""

    save_id: str
    working: str
    created: float
    files: frozenset[str]
    divergent: frozenset[LocalKey]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSave:
    """A save whose training-side work is done.

    Attributes:
        request: what was asked for.
        assignment: this rank's share.
        files: name -> content of this rank's small files.
        metadata: part -> DCP metadata; on the coordinator only.
        items: item -> kind, for the manifest.
        staged: the copies, to be released after the write.
        rank: this rank.
        optimizers: whose steps wait for copies that are still being made.
        error: what kept this rank from staging; it takes the error to the meeting instead of files.
    """

    request: SaveRequest
    assignment: Assignment
    files: Mapping[str, bytes]
    metadata: Mapping[str, Metadata]
    items: Mapping[str, str]
    staged: StagedParts
    rank: int
    optimizers: Sequence[Any] = ()
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """What one rank keeps from save to save: the agreed plans, and the memory for the copies.

    `overlapped` says whether copies may go on while the training computes.
    """

    plans: AgreedPlans = field(default_factory=AgreedPlans)
    stager: Stager = field(default_factory=Stager)
    overlapped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Local:
    planners: Mapping[str, PartPlanner]
    files: Mapping[str, bytes]
    items: Mapping[str, str]
    local: Mapping[LocalKey, Any]
    stable: Sequence[Any]
    optimizers: Sequence[Any]
    proposal: _Proposal


def prepare(
    request: SaveRequest,
    capture: Callable[[], CapturedState],
    *,
    storage: Storage,
    coordinator: Coordinator,
    workshop: Workshop,
    check: Callable[[str], None],
) -> PreparedSave:
    """Capture, plan, agree and stage. Collective; nothing is written unless every rank has planned.

    Args:
        request: what is to be saved.
        capture: gives the live state of this rank.
        storage: where the checkpoint goes.
        coordinator: the ranks of the job.
        workshop: what is kept from save to save.
        check: called on the coordinator, with the name, right before anything is written; raises to refuse.

    Raises:
        SaveError: planning failed on a rank; the same on every rank.
        CheckpointError: what `check` raised, or `CheckpointExistsError`; the same on every rank.
    """
    local = _try_local(request, capture, coordinator)
    plans = workshop.plans
    try:
        if isinstance(local, BaseException):
            plans.agree(local, (), coordinator)
            raise local  # unreachable: a rank that brings an error makes every rank raise
        plans.agree(local.planners, local.local, coordinator)
        assignment = coordinator.exchange(
            local.proposal,
            lambda proposals: _assign(proposals, storage=storage, request=request, check=check),
        )
    except CoordinationError as error:
        raise save_error(storage.url, request.step, "plan", error) from error
    prepared = PreparedSave(
        request=request,
        assignment=assignment,
        files={name: content for name, content in local.files.items() if name in assignment.files},
        metadata=plans.metadata,
        items=local.items,
        staged=NOTHING_STAGED,
        rank=coordinator.rank,
        optimizers=local.optimizers,
    )
    try:
        return _stage(prepared, local, workshop)
    except Exception as error:  # noqa: BLE001 - the meeting carries it to every rank
        return replace(prepared, error=SaveError(f"while staging: {type(error).__name__}: {error}"))


def _try_local(
    request: SaveRequest, capture: Callable[[], CapturedState], coordinator: Coordinator
) -> _Local | BaseException:
    try:
        return _plan_local(request, capture(), coordinator)
    except Exception as error:  # noqa: BLE001 - the exchange carries it to every rank
        return error


def _plan_local(request: SaveRequest, state: CapturedState, coordinator: Coordinator) -> _Local:
    scope = rank_name(coordinator.rank)
    per_rank = encode_items(state.per_rank)
    shared = encode_items(state.shared if coordinator.is_coordinator else {})
    files = {**state.files, scope: per_rank.content}
    if coordinator.is_coordinator:
        files[SHARED] = shared.content
    sharded = {part: dict(tree) for part, tree in state.sharded.items()}
    pickled = {pickled_key(scope, name): content for name, content in per_rank.pickled.items()}
    pickled |= {pickled_key("shared", name): content for name, content in shared.pickled.items()}
    if pickled:
        sharded.setdefault("", {})[PICKLED] = pickled
    planners = {part: PartPlanner(tree) for part, tree in sharded.items()}
    proposal = _Proposal(
        step=request.step,
        name=request.name,
        files=tuple(files),
        digests=digests(state.local),
    )
    return _Local(
        planners=planners,
        files=files,
        items=_kinds(state),
        local=state.local,
        stable=state.stable,
        optimizers=state.optimizers,
        proposal=proposal,
    )


def _kinds(state: CapturedState) -> dict[str, str]:
    kinds = {name: "sharded" for tree in state.sharded.values() for name in tree}
    kinds |= dict.fromkeys(state.shared, "shared") | dict.fromkeys(state.per_rank, "per_rank")
    if state.files:
        kinds["files"] = "files"
    return kinds


def _assign(
    proposals: Sequence[_Proposal],
    *,
    storage: Storage,
    request: SaveRequest,
    check: Callable[[str], None],
) -> list[Assignment]:
    """Decide for all ranks; on the coordinator only. Touches storage last, when nothing else can fail."""
    asked = {(proposal.step, proposal.name) for proposal in proposals}
    if len(asked) > 1:
        raise ConfigError(f"ranks ask to save different things at once: {sorted(asked)}; they must agree")
    owners: dict[str, int] = {}
    for rank, proposal in enumerate(proposals):
        for name in proposal.files:
            owners.setdefault(name, rank)
    divergent = diverging([proposal.digests for proposal in proposals])
    check(request.name)
    save_id = secrets.token_hex(4)
    working = begin(storage, request.name, save_id, replace=request.replace)
    created = time.time()
    return [
        Assignment(
            save_id=save_id,
            working=working,
            created=created,
            files=frozenset(name for name, owner in owners.items() if owner == rank),
            divergent=divergent[rank],
        )
        for rank in range(len(proposals))
    ]


def _stage(prepared: PreparedSave, local: _Local, workshop: Workshop) -> PreparedSave:
    resolved = {
        part: local.planners[part].resolve(plan)
        for part, plan in workshop.plans.own.items()
        if part in local.planners
    }
    files = {**prepared.files, **encode_local(prepared.rank, local.local, prepared.assignment.divergent)}
    stable = local.stable if workshop.overlapped and local.optimizers else ()
    # Last: from here on the memory is taken, and only the prepared save knows to give it back.
    return replace(prepared, staged=workshop.stager.stage(resolved, stable=stable), files=files)


def save_error(url: str, step: int, phase: str, error: CoordinationError) -> SaveError:
    """The one error that every rank raises for a failed save."""
    return SaveError(
        f"step {step} was not saved to {url} (phase {phase}): {error}. "
        f"Every checkpoint committed before is untouched; {_remedy(error)}, then save again",
        step=step,
        phase=phase,
        failures=error.failures,
    )


def _remedy(error: CoordinationError) -> str:
    if isinstance(error, DeadlineError):
        return "find out what stopped those ranks"
    # Only the text of an error travels between ranks.
    full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
    return "free space there" if full else "remove the cause"
