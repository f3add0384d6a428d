"""Whether there is room for a save, asked before it writes its first byte; and how room is made.

The rule that nothing is deleted before the new checkpoint is committed is relaxed here, and only so far:
what the retention policy would drop once the save is committed may go before it, oldest first and no more
than is needed, if that is enough; but never the newest checkpoint nor the one committed last, one of which is
verified first, nor what is pinned, nor what is marked as damaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.commit import Catalog, on_present_line, remove
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
"""A person is told when fewer saves than this fit."""
_KEEP_NONE: Final = ~KeepAll()
"""Keeps what no policy can undo: the newest, what was committed last, and what is pinned."""


@final
class DiskSpace:
    """Keeps the room for saves of one root. Coordinator only, on the thread that saves.

    Args:
        storage: the root.
        options: what is kept, what saves leave free, and how long ranks wait for one another.
        ownership: of the root.
        telemetry: receives `room.low` and spans of what is removed.
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
        # Half, so that the other ranks, which wait for the verdict, are told before they give up.
        self._patience_seconds = options.deadline_seconds / 2
        self._ownership = ownership
        self._telemetry = telemetry
        self._clock = clock
        self._volumes = SizeEstimator()
        self._extras = Overhead()
        self._metadata: Mapping[str, Metadata] = {}
        self._told = _AHEAD

    def make(self, prepared: PreparedSave) -> None:
        """Return if the save fits, after making room for it if need be.

        Raises:
            NoRoomError: it does not fit, and nothing may go for it.
            RootBusyError: another job has taken the root.
        """
        self._extras, self._metadata = prepared.extras, prepared.metadata
        need = self._volumes.need(prepared.metadata, prepared.extras)
        if self._free().fits(need):
            return
        self._ownership.collect_orphans()
        removed: list[CheckpointInfo] = []
        if not self._free().fits(need):
            removed = self._remove_superseded(_coming(prepared), need)
        if not self._free().fits(need):
            raise self._refusal(prepared, need, removed)

    def look_ahead(self, info: CheckpointInfo) -> None:
        """After the commit of `info`, and the prune behind it: tell if saves like it will soon not fit."""
        self._volumes.learn(self._extras, info.size_bytes)
        need = self._volumes.need(self._metadata, self._extras)
        free, fitting = self._free(), _AHEAD
        # Elsewhere nothing is listed: most of the time there is room for many.
        if not free.fits(need.times(_AHEAD)):
            history = self._ownership.inventory.history()
            fitting = saves_that_fit(
                self._keep or KeepAll(), history, info, need=need, free=free, now=self._clock()
            )
        if fitting < self._told:
            self._tell(info, fitting, need, free)
        self._told = fitting

    def _free(self) -> SpaceFree:
        return SpaceFree.of(self._storage, self._headroom)

    def _remove_superseded(self, coming: CheckpointInfo, need: SpaceNeeded) -> list[CheckpointInfo]:
        """Remove what the policy would drop after the save, oldest first, if that makes it fit."""
        candidates = self._candidates(coming)
        gain = SpaceNeeded(
            size_bytes=sum(info.size_bytes for info in candidates), files=sum(map(self._files_of, candidates))
        )
        removed: list[CheckpointInfo] = []
        if not candidates or not self._free().plus(gain).fits(need):
            return removed
        for info in candidates:
            if self._free().fits(need):
                break
            self._ownership.check()
            with self._telemetry.span("prune.remove", step=info.step, name=info.name, reason="room"):
                remove(self._storage, info)
            self._ownership.inventory.forget(info.name)
            removed.append(info)
        _logger.warning(
            "step %d would not have fitted into %s: removed step(s) %s ahead of its commit; the retention "
            "policy drops them after it anyway",
            coming.step,
            self._storage.url,
            _steps(removed),
        )
        return removed

    def _candidates(self, coming: CheckpointInfo) -> Sequence[CheckpointInfo]:
        """What may go, oldest first; nothing if what stays is not known to be whole."""
        if self._keep is None:
            return ()
        policy, deadline = self._keep, time.monotonic() + self._patience_seconds
        return self._ownership.soundness.droppable(
            self._ownership.inventory,
            lambda history: droppable(policy, history, coming, self._clock(), abandoned=self._abandoned),
            go_on=lambda: time.monotonic() < deadline,
        )

    def _files_of(self, info: CheckpointInfo) -> int:
        """Files of a checkpoint, where it matters."""
        if self._storage.free_files() is None:
            return 0
        try:
            return len(Catalog(self._storage).manifest(info.name).files)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return 0

    def _tell(self, info: CheckpointInfo, fitting: int, need: SpaceNeeded, free: SpaceFree) -> None:
        self._telemetry.point("room.low", step=info.step, saves=fitting, **_figures(need, free))
        what = f"room for {fitting} more save(s)" if fitting else "no room for another save"
        _logger.warning(
            "after step %d, %s has %s like it: %s. Make room there, or keep less",
            info.step,
            self._storage.url,
            what,
            _figures_text(need, free),
        )

    def _refusal(
        self, prepared: PreparedSave, need: SpaceNeeded, removed: Sequence[CheckpointInfo]
    ) -> NoRoomError:
        free, step = self._free(), prepared.request.step
        history = self._ownership.inventory.history()
        gone = f" Step(s) {_steps(removed)} went ahead of the policy." if removed else ""
        kept = "; ".join(
            _kept(self._keep or KeepAll(), history, Catalog(self._storage).quarantined(), self._clock())
        )
        text = (
            f"{_figures_text(need, free)}. Nothing was written.{gone} "
            f"Kept: {kept or 'nothing'}. SpaceFree space, keep fewer (keep=), take away pins (`ckpt unpin`), "
            "delete what is damaged (`ckpt prune --damaged`) or lower headroom=, then save again"
        )
        return NoRoomError(
            f"step {step} was not saved to {self._storage.url} (phase open): {text}",
            step=step,
            phase="open",
            failures={0: text},
            **_figures(need, free),
        )


def droppable(
    policy: RetentionPolicy,
    history: Sequence[CheckpointInfo],
    coming: CheckpointInfo,
    now: float,
    *,
    abandoned: Abandoned = "keep",
) -> list[CheckpointInfo]:
    """What the policy drops once `coming` is committed and is not needed until then, lowest step first.

    The newest sound checkpoint and the one committed last stay: should the save fail, one of them is what
    training goes on from. So does what `coming` is going to replace.
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
    need: SpaceNeeded,
    free: SpaceFree,
    now: float,
) -> int:
    """How many saves like the last one, each with its prune, go on to fit; no more than a few are tried."""
    known = list(history)
    gaps = [last.step - info.step for info in history if info.step < last.step]
    gap = min(gaps, default=1)
    for number in range(1, _AHEAD + 1):
        coming = replace(
            last, step=last.step + number * gap, name=f"{last.name}+{number}", created=now + number
        )
        for info in droppable(policy, known, coming, now):
            if free.fits(need):
                break
            known.remove(info)
            free = free.plus(_taken(info, need))
        if not free.fits(need):
            return number - 1
        known.append(coming)
        free = free.plus(need, -1)
        for info in plan_prune(policy, known, now, last=coming.step).drop:
            known.remove(info)
            free = free.plus(_taken(info, need))
    return _AHEAD


def _taken(info: CheckpointInfo, need: SpaceNeeded) -> SpaceNeeded:
    """What a checkpoint gives back: those of a root have about as many files."""
    return SpaceNeeded(size_bytes=info.size_bytes, files=need.files)


def _coming(prepared: PreparedSave) -> CheckpointInfo:
    request, created = prepared.request, prepared.assignment.created
    return CheckpointInfo(
        step=request.step,
        name=request.name,
        created=created,
        metrics=request.metrics,
        lineage=prepared.lineage,
    )


def _figures(need: SpaceNeeded, free: SpaceFree) -> dict[str, int | None]:
    return {
        "needed_bytes": need.size_bytes,
        "free_bytes": free.size_bytes,
        "headroom_bytes": free.headroom_bytes,
        "needed_files": need.files,
        "free_files": free.files,
    }


def _figures_text(need: SpaceNeeded, free: SpaceFree) -> str:
    size = "unknown" if free.size_bytes is None else bytes_text(free.size_bytes)
    files = "" if free.files is None else f" and {free.files} files"
    return (
        f"a save takes {bytes_text(need.size_bytes)} and {need.files} files, free are {size}{files}, of "
        f"which {bytes_text(free.headroom_bytes)} are headroom"
    )


def _kept(
    policy: RetentionPolicy, history: Sequence[CheckpointInfo], aside: Sequence[str], now: float
) -> Iterable[str]:
    """Every checkpoint that takes room, with the reason why it stays."""
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
        yield f"{name} (damaged, moved aside)"


def _steps(infos: Iterable[CheckpointInfo]) -> str:
    return ", ".join(str(info.step) for info in infos)
