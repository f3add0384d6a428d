"""Disk space for a save: checked before its first byte, and freed if necessary.

The rule that nothing is deleted before the new checkpoint is committed has one exception, here: checkpoints
that the retention policy would drop after the commit may be removed before it, oldest first and no more than
needed, if that frees enough. The newest checkpoint and the one committed last are never removed, and one of
them is verified first; nor are checkpoints that are pinned or marked as damaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.commit import Catalog, on_present_line, remove, replaced
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, NoRoomError
from ckpt_core.options import CheckpointOptions, bytes_text
from ckpt_core.retention import Abandoned, KeepAll, RetentionPolicy, plan_prune
from ckpt_core.root import Ownership
from ckpt_core.saving._prepared import PreparedSave
from ckpt_core.saving._size_estimate import Overhead, SizeEstimator, SpaceFree, SpaceNeeded
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_AHEAD: Final = 3
"""A warning is logged when fewer saves than this fit."""
_KEEP_NONE: Final = ~KeepAll()
"""Keeps only checkpoints that no policy can drop: the newest, the one committed last, and pinned ones."""


@final
class DiskSpace:
    """The free space of one root. Coordinator only, on the save thread.

    Args:
        storage: the root.
        options: retention, headroom and deadline.
        ownership: of the root.
        telemetry: receives `room.low` and a span per removal.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        storage: Storage,
        options: CheckpointOptions,
        *,
        ownership: Ownership,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._headroom = options.free_headroom
        self._keep = options.keep
        self._abandoned: Abandoned = options.abandoned
        # Half, so that a refusal reaches the other ranks, which wait for it, before their deadline.
        self._patience_seconds = options.deadline_seconds / 2
        self._ownership = ownership
        self._telemetry = telemetry
        self._clock = clock
        self._estimator = SizeEstimator()
        self._overhead = Overhead()
        self._metadata: Mapping[str, Metadata] = {}
        self._last_fitting = _AHEAD

    def make(self, prepared: PreparedSave) -> None:
        """Make room for the save, if necessary.

        Raises:
            NoRoomError: the save does not fit, and the policy drops too little for it.
            RootBusyError: another job has taken the root.
        """
        self._overhead, self._metadata = prepared.overhead, prepared.metadata
        needed = self._estimator.predict(prepared.metadata, prepared.overhead)
        if self._free().fits(needed):
            return
        self._ownership.collect_orphans()
        removed: list[CheckpointInfo] = []
        if not self._free().fits(needed):
            removed = self._remove_superseded(_coming(prepared), needed)
        if not self._free().fits(needed):
            raise self._refusal(prepared, needed, removed)

    def warn_if_low(self, info: CheckpointInfo) -> None:
        """Warn, after the commit and prune of `info`, if saves like it soon do not fit."""
        self._estimator.record(self._overhead, info.size_bytes)
        needed = self._estimator.predict(self._metadata, self._overhead)
        free, fitting = self._free(), _AHEAD
        # Only then is the root listed: most of the time there is room for many saves.
        if not free.fits(needed.times(_AHEAD)):
            history = self._ownership.inventory.history()
            fitting = saves_that_fit(
                self._keep or KeepAll(), history, info, needed=needed, free=free, now=self._clock()
            )
        if fitting < self._last_fitting:
            self._warn(info, fitting, needed, free)
        self._last_fitting = fitting

    def _free(self) -> SpaceFree:
        return SpaceFree.of(self._storage, self._headroom)

    def _remove_superseded(self, coming: CheckpointInfo, needed: SpaceNeeded) -> list[CheckpointInfo]:
        """Remove checkpoints that the policy drops after the save, if that makes it fit."""
        candidates = self._candidates(coming)
        gain = SpaceNeeded(
            size_bytes=sum(info.size_bytes for info in candidates), files=sum(map(self._files_of, candidates))
        )
        removed: list[CheckpointInfo] = []
        if not candidates or not self._free().plus(gain).fits(needed):
            return removed
        for info in candidates:
            if self._free().fits(needed):
                break
            self._ownership.check()
            with self._telemetry.span("prune.remove", step=info.step, name=info.name, reason="room"):
                remove(self._storage, info)
            self._ownership.inventory.forget(info.name)
            removed.append(info)
        size = sum(info.size_bytes for info in removed)
        names = [info.name for info in removed]
        why = f"room for the save of step {coming.step}"
        self._telemetry.point("prune", names=names, size_bytes=size, why=why, tier=self._storage.url)
        _logger.warning(
            "step %d would not have fitted into %s: removed step(s) %s ahead of its commit; the retention "
            "policy drops them after it in any case",
            coming.step,
            self._storage.url,
            _steps(removed),
        )
        return removed

    def _candidates(self, coming: CheckpointInfo) -> Sequence[CheckpointInfo]:
        """List the removable checkpoints, oldest first; none unless a kept one is whole."""
        if self._keep is None:
            return ()
        policy, deadline = self._keep, time.monotonic() + self._patience_seconds
        return self._ownership.inventory.droppable(
            lambda history: droppable(policy, history, coming, self._clock(), abandoned=self._abandoned),
            go_on=lambda: time.monotonic() < deadline,
        )

    def _files_of(self, info: CheckpointInfo) -> int:
        """Count the files of a checkpoint; 0 where files are not limited."""
        if self._storage.space().free_files is None:
            return 0
        try:
            # And the directory, the manifest and the marker.
            return len(Catalog(self._storage).manifest(info.name).files) + 3
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return 0

    def _warn(self, info: CheckpointInfo, fitting: int, needed: SpaceNeeded, free: SpaceFree) -> None:
        self._telemetry.point("room.low", step=info.step, saves=fitting, **_figures(needed, free))
        what = f"room for {fitting} more save(s)" if fitting else "no room for another save"
        _logger.warning(
            "after step %d, %s has %s like it: %s. Make room there, or keep less",
            info.step,
            self._storage.url,
            what,
            _figures_text(needed, free),
        )

    def _refusal(
        self, prepared: PreparedSave, needed: SpaceNeeded, removed: Sequence[CheckpointInfo]
    ) -> NoRoomError:
        free, step = self._free(), prepared.request.step
        history = self._ownership.inventory.history()
        gone = f" Step(s) {_steps(removed)} were removed ahead of the policy." if removed else ""
        kept = "; ".join(_kept(self._keep or KeepAll(), history, replaced(self._storage), self._clock()))
        text = (
            f"{_figures_text(needed, free)}. Nothing was written.{gone} "
            f"Kept: {kept or 'nothing'}. Free space, keep fewer (keep=), remove pins (`ckpt unpin`), delete "
            f"damaged checkpoints (`ckpt prune {self._storage.url} --damaged`) or lower headroom=, then save "
            "again"
        )
        return NoRoomError(
            f"step {step} was not saved to {self._storage.url} (phase open): {text}",
            step=step,
            phase="open",
            failures={0: text},
            **_figures(needed, free),
        )


def droppable(
    policy: RetentionPolicy,
    history: Sequence[CheckpointInfo],
    coming: CheckpointInfo,
    now: float,
    *,
    abandoned: Abandoned = "keep",
) -> list[CheckpointInfo]:
    """List checkpoints that the policy drops after `coming` and that may go before it.

    The lowest step is first. The newest sound checkpoint and the one committed last stay: if the save fails,
    training resumes from one of them. So does the one that `coming` replaces.
    """
    others = [info for info in history if info.name != coming.name]
    stays = plan_prune(_KEEP_NONE, history, now).keep
    after = on_present_line([*others, coming])
    drop = plan_prune(policy, after, now, abandoned=abandoned, last=coming.step).drop
    gone_before = {info.name for info in history if info.abandoned}
    return [info for info in drop if info.name in gone_before or info.step not in stays]


def saves_that_fit(
    policy: RetentionPolicy,
    history: Sequence[CheckpointInfo],
    last: CheckpointInfo,
    *,
    needed: SpaceNeeded,
    free: SpaceFree,
    now: float,
) -> int:
    """Count further saves like the last one, with their prunes, that fit; at most 3."""
    known = list(history)
    gaps = [last.step - info.step for info in history if info.step < last.step]
    gap = min(gaps, default=1)
    for number in range(1, _AHEAD + 1):
        coming = replace(
            last, step=last.step + number * gap, name=f"{last.name}+{number}", created=now + number
        )
        for info in droppable(policy, known, coming, now):
            if free.fits(needed):
                break
            known.remove(info)
            free = free.plus(_space_of(info, needed))
        if not free.fits(needed):
            return number - 1
        known.append(coming)
        free = free.plus(needed, -1)
        for info in plan_prune(policy, known, now, last=coming.step).drop:
            known.remove(info)
            free = free.plus(_space_of(info, needed))
    return _AHEAD


def _space_of(info: CheckpointInfo, needed: SpaceNeeded) -> SpaceNeeded:
    # Checkpoints of one root have about the same number of files.
    return SpaceNeeded(size_bytes=info.size_bytes, files=needed.files)


def _coming(prepared: PreparedSave) -> CheckpointInfo:
    request, created = prepared.request, prepared.assignment.created
    return CheckpointInfo(
        step=request.step,
        name=request.name,
        created=created,
        metrics=request.metrics,
        lineage=prepared.lineage,
    )


def _figures(needed: SpaceNeeded, free: SpaceFree) -> dict[str, int | None]:
    return {
        "needed_bytes": needed.size_bytes,
        "free_bytes": free.size_bytes,
        "headroom_bytes": free.headroom_bytes,
        "needed_files": needed.files,
        "free_files": free.files,
    }


def _figures_text(needed: SpaceNeeded, free: SpaceFree) -> str:
    size = "unknown" if free.size_bytes is None else bytes_text(free.size_bytes)
    files = "" if free.files is None else f" and {free.files} files"
    return (
        f"a save takes {bytes_text(needed.size_bytes)} and {needed.files} files, free are {size}{files}, of "
        f"which {bytes_text(free.headroom_bytes)} are headroom"
    )


def _kept(
    policy: RetentionPolicy, history: Sequence[CheckpointInfo], aside: Sequence[str], now: float
) -> Iterable[str]:
    """Describe every checkpoint that takes space, with the reason why it stays."""
    plan = plan_prune(policy, history, now)
    sizes = {info.step: info.size_bytes for info in history if not info.abandoned}
    for step, reasons in plan.keep.items():
        yield f"step {step}, {bytes_text(sizes[step])} ({', '.join(reasons)})"
    for info in plan.damaged:
        yield f"step {info.step}, {bytes_text(info.size_bytes)} (marked as damaged)"
    for info in plan.bad:
        yield f"step {info.step}, {bytes_text(info.size_bytes)} (marked as bad)"
    for info in plan.abandoned:
        yield f"{info.name}, {bytes_text(info.size_bytes)} (abandoned)"
    for name in aside:
        yield f"{name} (moved aside)"


def _steps(infos: Iterable[CheckpointInfo]) -> str:
    return ", ".join(str(info.step) for info in infos)
