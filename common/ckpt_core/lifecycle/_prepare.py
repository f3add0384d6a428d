"""The first half of a save, on the main thread: capture, agree, stage. For so long the training stands still.

A save whose state is made up as that of the save before costs one all-reduce of a few integers, however many
ranks and tensors there are; nothing here touches storage unless there is something to refuse.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.commit import working_name
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import GroupNames, Replicas
from ckpt_core.errors import (
    ConfigError,
    CoordinationError,
    DeadlineError,
    SaveError,
    SavePhase,
    failure_text,
)
from ckpt_core.lifecycle._items import PICKLED, EncodedItems, encode_items, pickled_key
from ckpt_core.lifecycle._loadable import LoadNotes
from ckpt_core.lifecycle._local import LocalValues
from ckpt_core.lifecycle._ownership import Ownership
from ckpt_core.lifecycle._plans import AgreedPlans, Keeping, Offer
from ckpt_core.lifecycle._replicas import Evidence
from ckpt_core.lifecycle._request import SaveRequest
from ckpt_core.lifecycle._stage import NOTHING_STAGED, StagedParts, Stager
from ckpt_core.lifecycle._volume import NO_EXTRAS, Extras
from ckpt_core.names import SHARED, rank_name, shared_name
from ckpt_core.state import get
from ckpt_core.storage import Storage
from ckpt_core.types import CapturedState, Lineage

_MICROSECONDS = 1_000_000
_AGREEING = "agreeing on a save"
_DOING: Final[Mapping[SavePhase, str]] = {
    "plan": "planning",
    "stage": "staging",
    "open": "opening",
    "write": "writing",
    "commit": "committing",
}
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_JSON = 2
"""More than how many times its size a tensor takes as JSON."""
_FILES_PER_PART = 2
_OTHER_FILES = 2
"""The chunk table, and the file of buffers that differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where a save goes; the same on every rank."""

    save_id: str
    working: str
    created: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSave:
    """A save whose training-side work is done.

    Attributes:
        request: what was asked for.
        assignment: where it goes.
        files: name -> content of this rank's small files.
        metadata: part -> DCP metadata; on the coordinator only.
        items: item -> kind, for the manifest.
        local: this rank's values of entries that nothing keeps equal over ranks.
        keeping: when it keeps them.
        staged: the copies, to be released after the write.
        rank: this rank.
        optimizers: whose steps wait for copies that are still being made.
        lineage: the line of saves that it belongs to; on the coordinator only.
        buffers: (part, key) of module buffers.
        error: what kept this rank from staging; it takes the error to the meeting instead of files.
        extras: what ranks write beside tensors, at most.
        evidence: what this rank has to show of what others hold, too.
        replicas: part -> what several ranks hold under one name; on the coordinator only.
    """

    request: SaveRequest
    assignment: Assignment
    files: Mapping[str, bytes]
    metadata: Mapping[str, Metadata]
    items: Mapping[str, str]
    local: LocalValues
    keeping: Keeping
    staged: StagedParts
    rank: int
    optimizers: Sequence[Any] = ()
    lineage: Lineage = field(default_factory=Lineage)
    buffers: frozenset[tuple[str, str]] = frozenset()
    error: BaseException | None = None
    extras: Extras = NO_EXTRAS
    evidence: Evidence | None = None
    replicas: Mapping[str, Sequence[Replicas]] = field(default_factory=dict[str, Sequence[Replicas]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """What one rank keeps from save to save: the agreed plans, and the memory for the copies.

    `overlapped` says whether copies may go on while the training computes.
    """

    plans: AgreedPlans
    stager: Stager
    notes: LoadNotes
    overlapped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Survey:
    """This rank's state, small values encoded, and whether it changes the plans.

    `extra_bytes` and `extra_files` are of what it writes beside tensors, at most.
    """

    state: CapturedState
    files: Mapping[str, bytes]
    shared: EncodedItems
    changed: bool
    extra_bytes: int
    extra_files: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What all ranks know after one all-reduce: the same on each."""

    trouble: bool
    changed: bool
    created: float
    most_extra_bytes: int
    most_extra_files: int


def prepare(
    request: SaveRequest,
    capture: Callable[[], CapturedState],
    *,
    storage: Storage,
    coordinator: Coordinator,
    workshop: Workshop,
    ownership: Ownership,
) -> PreparedSave:
    """Capture, agree and stage. Collective; nothing is written here.

    Args:
        request: what is to be saved.
        capture: gives the live state of this rank.
        storage: where the checkpoint goes.
        coordinator: the ranks of the job.
        workshop: what is kept from save to save.
        ownership: the right to write there, which must have been taken.

    Raises:
        SaveError: planning failed on a rank; the same on every rank.
        ConfigError: ranks ask for different saves; the same on every rank.
        CheckpointExistsError: the name is taken; the same on every rank.
    """
    plans = workshop.plans
    surveyed = _try_survey(capture, coordinator, plans)
    try:
        verdict = _combine(request, surveyed, coordinator, ownership)
        survey, request = _settle(request, surveyed, verdict, coordinator=coordinator, ownership=ownership)
        if verdict.changed:
            plans.agree(coordinator)
    except CoordinationError as error:
        raise save_error(storage.url, request.step, "plan", error) from error
    save_id = ownership.id_at(round(verdict.created * _MICROSECONDS))
    prepared = PreparedSave(
        request=request,
        assignment=Assignment(
            save_id=save_id,
            working=working_name(storage, request.name, save_id),
            created=verdict.created,
        ),
        files={
            **{name: content for name, content in survey.files.items() if name in plans.files},
            **_shared_file(survey.shared, plans.shared, coordinator),
        },
        metadata=plans.metadata,
        items=_kinds(survey.state),
        buffers=frozenset(survey.state.local),
        local=LocalValues({}),
        keeping=plans.keeping,
        staged=NOTHING_STAGED,
        rank=coordinator.rank,
        optimizers=survey.state.optimizers,
        lineage=ownership.line.lineage_of(request.step) if coordinator.is_coordinator else Lineage(),
        extras=Extras(
            generation=plans.generation,
            ranks=coordinator.world_size,
            rank_bytes=verdict.most_extra_bytes,
            rank_files=verdict.most_extra_files,
        ),
        replicas=plans.replicas,
    )
    return _stage(prepared, survey, workshop, storage.url)


def _shared_file(
    items: EncodedItems, names: Collection[str], coordinator: Coordinator
) -> Mapping[str, bytes]:
    """The file of the shared items that this rank writes; ranks but the coordinator rarely have one."""
    if coordinator.is_coordinator:
        return {SHARED: items.content_of(names)}
    return {shared_name(coordinator.rank): items.content_of(names)} if names else {}


def warm_up(
    capture: Callable[[], CapturedState], *, coordinator: Coordinator, workshop: Workshop, url: str
) -> int:
    """Do ahead of the first save what only the first save has to do: plan, and make the arenas. Collective.

    Returns:
        Bytes of host memory that this rank's arenas take.

    Raises:
        SaveError: planning failed on a rank; the same on every rank.
        StagingMemoryError: this rank's share does not fit; others may have room.
    """
    plans = workshop.plans
    survey = _try_survey(capture, coordinator, plans)
    failed = isinstance(survey, BaseException)
    try:
        if coordinator.all_reduce_max([int(failed)], what="planning a save")[0]:
            coordinator.gather(survey if isinstance(survey, BaseException) else None)
        changed = not isinstance(survey, BaseException) and survey.changed
        if coordinator.all_reduce_max([int(changed)], what="planning a save")[0]:
            plans.agree(coordinator)
        plans.check()
    except CoordinationError as error:
        raise save_error(url, 0, "plan", error) from error
    try:
        return workshop.stager.prewarm(plans.parts, plans.generation)
    finally:
        plans.forget()


def _try_survey(
    capture: Callable[[], CapturedState], coordinator: Coordinator, plans: AgreedPlans
) -> _Survey | BaseException:
    try:
        return _survey(capture(), coordinator, plans)
    except Exception as error:  # noqa: BLE001 - an exchange carries it to every rank
        return error


def _survey(state: CapturedState, coordinator: Coordinator, plans: AgreedPlans) -> _Survey:
    scope = rank_name(coordinator.rank)
    per_rank = encode_items(state.per_rank)
    shared = encode_items(state.shared)
    files = {**state.files, scope: per_rank.content}
    sharded: dict[str, Mapping[str, Any]] = dict(state.sharded)
    pickled = {pickled_key(scope, name): content for name, content in per_rank.pickled.items()}
    pickled |= {pickled_key("shared", name): content for name, content in shared.pickled.items()}
    if pickled:
        sharded[""] = {**sharded.get("", {}), PICKLED: pickled}
    changed = plans.look(sharded, _offer(state, files, several=coordinator.world_size > 1))
    small = [len(content) for name, content in files.items() if changed or name in plans.files]
    if coordinator.is_coordinator or changed or plans.shared:
        small.append(len(shared.content))
    own = (
        sum(tensor.numel() * tensor.element_size() for tensor in state.local.values())
        if coordinator.world_size > 1
        else 0
    )
    return _Survey(
        state=state,
        files=files,
        shared=shared,
        changed=changed,
        extra_bytes=sum(small) + sum(map(len, pickled.values())) + own * _IN_JSON,
        extra_files=len(small) + _FILES_PER_PART * len(sharded) + _OTHER_FILES,
    )


def _offer(state: CapturedState, files: Collection[str], *, several: bool) -> Offer:
    groups: dict[str, GroupNames] = {}
    for part, path in state.groups if several else ():
        lists = get(state.sharded[part], path) or ()
        groups[part] = {**groups.get(part, {}), path: [tuple(each["params"]) for each in lists]}
    return Offer(
        uneven=frozenset(state.local),
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


def _combine(
    request: SaveRequest, survey: _Survey | BaseException, coordinator: Coordinator, ownership: Ownership
) -> _Verdict:
    failed = isinstance(survey, BaseException)
    trouble = failed or (
        coordinator.is_coordinator and ownership.is_taken(request.name, replace=request.replace)
    )
    changed = isinstance(survey, BaseException) or survey.changed
    digest = request.digest()
    created = int(time.time() * _MICROSECONDS) if coordinator.is_coordinator else 0
    extra = (0, 0) if isinstance(survey, BaseException) else (survey.extra_bytes, survey.extra_files)
    # Only maxima can be combined: the greatest and, negated, the smallest tell whether all are the same.
    found = coordinator.all_reduce_max(
        [int(trouble), int(changed), digest, -digest, created, *extra], what=_AGREEING
    )
    return _Verdict(
        trouble=bool(found[0]) or found[2] != -found[3],
        changed=bool(found[1]),
        created=found[4] / _MICROSECONDS,
        most_extra_bytes=found[5],
        most_extra_files=found[6],
    )


def _settle(
    request: SaveRequest,
    survey: _Survey | BaseException,
    verdict: _Verdict,
    *,
    coordinator: Coordinator,
    ownership: Ownership,
) -> tuple[_Survey, SaveRequest]:
    """Tell every rank what is wrong, or put it right: see `Ownership.clear_name`."""

    def decide(asked: list[tuple[int, str]]) -> list[str]:
        if len(set(asked)) > 1:
            different = sorted(set(asked))
            raise ConfigError(f"ranks ask to save different things at once: {different}; they must agree")
        name = ownership.clear_name(request.name, request.step, replace=request.replace)
        return [name] * len(asked)

    error = survey if isinstance(survey, BaseException) else None
    if verdict.trouble:
        name = coordinator.gather_scatter(error or (request.step, request.name), decide, what=_AGREEING)
        request = replace(request, name=name)
    if isinstance(survey, BaseException):
        raise survey  # unreachable: a rank that brings an error makes every rank raise
    return survey, request


def _stage(prepared: PreparedSave, survey: _Survey, workshop: Workshop, url: str) -> PreparedSave:
    plans, state = workshop.plans, survey.state
    try:
        plans.check()
        if prepared.extras.ranks > 1:
            alike = {name: survey.shared.digest(name) for name in state.alike}
            prepared = replace(prepared, evidence=plans.show(alike))
        if plans.keeping is not Keeping.NEVER or (prepared.rank == 0 and state.local):
            prepared = replace(prepared, local=LocalValues(state.local))
        stable = state.stable if workshop.overlapped and state.optimizers else None
        # Last: from here on the memory is taken, and only the prepared save knows to give it back.
        staged = workshop.stager.stage(plans.parts, plans.generation, stable=stable)
        workshop.notes.tell(state, plans, staged, url)
        return replace(prepared, staged=staged, extras=prepared.extras.with_values(staged.values.values()))
    except Exception as caught:  # noqa: BLE001 - the meeting carries it to every rank
        return replace(prepared, error=failed_in("stage", caught))
    finally:
        plans.forget()


def failed_in(phase: SavePhase, error: BaseException) -> SaveError:
    """The error that a rank tells the others of when something failed on it while it saved."""
    if isinstance(error, SaveError):
        told = error if error.phase else error.retold(str(error), phase=phase)
    else:
        told = SaveError(f"while {_DOING[phase]}: {failure_text(error)}", phase=phase)
    if told is not error:
        told.__cause__ = error
    return told


def save_error(url: str, step: int, phase: SavePhase, error: CoordinationError) -> SaveError:
    """The one error that every rank raises for a failed save."""
    # Nothing is written while ranks plan, whether or not this one heard how that ended.
    in_doubt = error.in_doubt and phase != "plan"
    verdict = f"it is not known whether step {step} was" if in_doubt else f"step {step} was not"
    return SaveError(
        f"{verdict} saved to {url} (phase {phase}): {error}. "
        f"Every checkpoint committed before is untouched; {_remedy(error)}, then save again",
        step=step,
        phase=phase,
        failures=error.failures,
        in_doubt=in_doubt,
    )


def _remedy(error: CoordinationError) -> str:
    if isinstance(error, DeadlineError):
        return "find out what stopped those ranks"
    full = any(cause.errno in _FULL for cause in error.causes.values())
    return "free space there" if full else "remove the cause"
