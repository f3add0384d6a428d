"""One load: read what the checkpoint holds, validate it against the live state, then read into place.

Nothing live is touched before every rank knows that names, shapes and dtypes fit and that every byte entry
can be read; the bytes themselves were verified before (see `_choose`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import SafeLoadPlanner
from ckpt_core.errors import CheckpointError, IncompatibleCheckpointError, LoadError
from ckpt_core.lifecycle._local import put_local
from ckpt_core.lifecycle._open import Opened, open_checkpoint
from ckpt_core.lifecycle._validate import Misfits
from ckpt_core.state import StateSource
from ckpt_core.storage import Storage
from ckpt_core.types import SavedState, StateDict

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """Which checkpoint directory to load, and how.

    Attributes:
        directory: key of the checkpoint directory.
        items: load only these items; all if None.
        allow_pickle: whether pickles may be executed.
    """

    directory: str
    items: Collection[str] | None = None
    allow_pickle: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartLoad:
    target: StateDict
    planner: SafeLoadPlanner
    plan: LoadPlan


def load(
    request: LoadRequest, source: StateSource, *, storage: Storage, coordinator: Coordinator
) -> SavedState:
    """Load a checkpoint directory, ours or one that stock DCP wrote, into `source`. Collective.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        IncompatibleCheckpointError: it does not fit the live state; nothing was touched.
        UnsafeCheckpointError: it needs pickle and that was not allowed; nothing was touched.
        CorruptCheckpointError: a file is damaged.
        LoadError: a rank failed otherwise; the message says whether the live state was touched.
    """
    place = f"{storage.url}/{request.directory}"

    def open_and_validate() -> tuple[Opened, dict[str, _PartLoad]]:
        opened = open_checkpoint(storage, request.directory, coordinator, allow_pickle=request.allow_pickle)
        opened = replace(opened, saved=_select(opened.saved, request.items))
        return opened, _plan(opened, source, request, place)

    opened, parts = _everywhere(coordinator, open_and_validate, f"{place}: nothing was loaded")

    def read_and_apply() -> None:
        for part, loading in parts.items():
            tensors = LoadPlan([i for i in loading.plan.items if i.type != LoadItemType.BYTE_IO])
            opened.readers[part].read_data(tensors, loading.planner).wait()
            put_local(opened.local, part, loading.planner.state_dict)
        source.apply({part: loading.target for part, loading in parts.items()}, opened.saved)

    _everywhere(
        coordinator,
        read_and_apply,
        f"{place}: reading failed half-way and the live state is partly overwritten; "
        "load another checkpoint before training goes on",
    )
    return opened.saved


def _select(saved: SavedState, items: Collection[str] | None) -> SavedState:
    if items is None:
        return saved
    return replace(
        saved,
        sharded={
            part: {path: entry for path, entry in of_part.items() if path[0] in items}
            for part, of_part in saved.sharded.items()
        },
        per_rank={name: value for name, value in saved.per_rank.items() if name in items},
        shared={name: value for name, value in saved.shared.items() if name in items},
    )


def _plan(opened: Opened, source: StateSource, request: LoadRequest, place: str) -> dict[str, _PartLoad]:
    misfits = Misfits()
    planners: dict[str, tuple[StateDict, SafeLoadPlanner]] = {}
    for part, tree in _target(source, opened.saved, place).items():
        target = {item: v for item, v in tree.items() if request.items is None or item in request.items}
        if not target:
            continue
        metadata = opened.metadata.get(part, Metadata({}))
        planner = SafeLoadPlanner(allow_pickle=request.allow_pickle)
        planner.set_up_planner(target, metadata, is_coordinator=False)
        misfits.compare(planner.state_dict, metadata)
        planners[part] = target, planner
    misfits.raise_if_any(place)
    return {part: _plan_part(opened, part, *planned) for part, planned in planners.items()}


def _target(source: StateSource, saved: SavedState, place: str) -> Mapping[str, StateDict]:
    try:
        return source.target(saved)
    except IncompatibleCheckpointError as error:
        raise IncompatibleCheckpointError(
            f"{place} does not fit the training state, and nothing was loaded: {error}. "
            "Check the configuration, or load only what fits with items=",
            missing=error.missing,
            unexpected=error.unexpected,
            mismatched=error.mismatched,
        ) from error


def _plan_part(opened: Opened, part: str, target: StateDict, planner: SafeLoadPlanner) -> _PartLoad:
    plan = planner.create_local_plan()
    # Byte entries first: they land in the template, not in anything live, and may turn out to be refused.
    plain = LoadPlan([item for item in plan.items if item.type == LoadItemType.BYTE_IO])
    opened.readers[part].read_data(plain, planner).wait()
    return _PartLoad(target=target, planner=planner, plan=plan)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one rank fared, as it travels to the others."""

    error: CheckpointError | None
    text: str


def _everywhere(coordinator: Coordinator, act: Callable[[], T], consequence: str) -> T:
    """Run one phase on every rank; if it fails on any, the same error is raised on all."""
    try:
        result = act()
    except Exception as error:
        own = _Outcome(
            error if isinstance(error, CheckpointError) else None, f"{type(error).__name__}: {error}"
        )
        _raise_first(coordinator.gather(own), consequence, error)
        raise
    _raise_first(coordinator.gather(_Outcome(None, "")), consequence, None)
    return result


def _raise_first(outcomes: list[_Outcome], consequence: str, cause: Exception | None) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise outcome.error from cause
        if outcome.text:
            raise LoadError(f"{consequence} (rank {rank}: {outcome.text})") from cause
