"""Disk space for a save: checked before its first byte, and freed if necessary.

The sizes of tensors in DCP's metadata are exact but for the pages of a file's headers; everything else is
small, and bounded by the rank with most of it. After a commit the size of that checkpoint is known, and a
save of the same plan is predicted to be as large, plus the growth of the rest.

The rule that nothing is deleted before the new checkpoint is committed has one exception, here: checkpoints
that the retention policy would drop after the commit may be removed before it, oldest first and no more than
needed, if that frees enough. The newest checkpoint and the one committed last are never removed, and one of
them is verified first; nor are checkpoints that are pinned or marked as damaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

import numpy as np

from ckpt_core.commit import Catalog, on_present_line, read_notes, replaced
from ckpt_core.dcp import PlannedIndex
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, NoRoomError
from ckpt_core.formats.chunks import BLOCK_BYTES
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.index import Index
from ckpt_core.options import CheckpointOptions, Headroom, bytes_text
from ckpt_core.policies import RetentionPolicy
from ckpt_core.retention import Abandoned, KeepAll, as_it_is, plan_prune
from ckpt_core.root import Ownership, Pruner
from ckpt_core.storage import Space, Storage
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_KEEP_NONE: Final = ~KeepAll()
"""Keeps only checkpoints that no policy can drop: the newest, the one committed last, and pinned ones."""
_PAGE: Final = 4096
_FRAME_BYTES: Final = 832
"""Upper bound of the zip around a tensor, without padding to a page."""
_SMALL_FRAME_BYTES: Final = 208
"""Of a small tensor, which is no zip."""
_TABLE_BYTES: Final = 110
"""Upper bound of a chunk's entries in its rank's table and in `.metadata`, without name, path and shape."""
_SHAPE_BYTES: Final = 112
"""Of a dtype and shape in `.metadata`, with its boxes."""
_TEXT_BYTES: Final = 6
"""Of a text in `.metadata`, beside its letters, and of each reference to it."""
_ENTRY_BYTES: Final = 3072
"""Upper bound of a plain value in its file and in the tables."""
_BLOCK_CRC: Final = 8 / (1 << 20)
"""Bytes of a chunk table per byte of a tensor."""
_LISTED_BYTES: Final = 512
"""Upper bound of a file's entry in the manifest."""
_FIXED_BYTES: Final = 16 * 1024
"""Upper bound of the marker and the rest of the manifest."""


@final
class SpaceNeeded(NamedTuple):
    """Upper bounds of the space of a save."""

    size_bytes: int = 0
    files: int = 0

    def fits(self, free: Space, headroom: Headroom, gain: tuple[int, int] = (0, 0)) -> bool:
        """Return whether there is room for it beside the headroom, once `gain` is freed."""
        return (
            free.free_bytes is None
            or self.size_bytes <= max(0, free.free_bytes + gain[0] - headroom.of(free.total_bytes))
        ) and (free.free_files is None or self.files <= free.free_files + gain[1])


@final
class DiskSpace:
    """The free space of one root. Coordinator only, on the save thread."""

    def __init__(
        self, storage: Storage, options: CheckpointOptions, ownership: Ownership, pruner: Pruner
    ) -> None:
        self._storage, self._options = storage, options
        self._ownership, self._pruner = ownership, pruner
        self._planned = (0, 0)
        self._saved = (0, 0, 0)

    def predict(
        self, metadata: Mapping[str, PlannedIndex], generation: int, extra: SpaceNeeded
    ) -> SpaceNeeded:
        """Predict the space of a save by the plans of that `generation`.

        `extra` is what all ranks write at most beside planned tensors.
        """
        copies = self._options.replicas
        files = copies * (extra.files + 2 * len(metadata)) + 3
        rest = files * (_PAGE + _LISTED_BYTES) + _FIXED_BYTES
        saved_generation, saved_extra, saved_bytes = self._saved
        if saved_bytes and saved_generation == generation:
            growth = max(0, copies * (extra.size_bytes - saved_extra))
            return SpaceNeeded(saved_bytes + growth + rest, files)
        if self._planned[0] != generation:
            self._planned = generation, sum(_part_bytes(part.index) for part in metadata.values())
        return SpaceNeeded(copies * (self._planned[1] + extra.size_bytes) + rest, files)

    def record(self, info: CheckpointInfo, generation: int, extra: SpaceNeeded) -> None:
        self._saved = generation, extra.size_bytes, info.size_bytes

    def make(self, coming: CheckpointInfo, needed: SpaceNeeded) -> None:
        """Make room for a save, if necessary.

        Raises:
            NoRoomError: the save does not fit, and the policy drops too little for it.
            RootBusyError: another job has taken the root.
        """
        if self._fits(needed):
            return
        self._ownership.collect_orphans()
        removed: list[CheckpointInfo] = []
        if not self._fits(needed):
            removed = self._remove_superseded(coming, needed)
        if not self._fits(needed):
            raise self._refusal(coming.step, needed, removed)

    def _fits(self, needed: SpaceNeeded, gain: tuple[int, int] = (0, 0)) -> bool:
        return needed.fits(self._storage.space(), self._options.free_headroom, gain)

    def _remove_superseded(self, coming: CheckpointInfo, needed: SpaceNeeded) -> list[CheckpointInfo]:
        """Remove checkpoints that the policy drops after the save, if that makes it fit."""
        policy, abandoned = self._options.keep, self._options.abandoned
        inventory, removed = self._ownership.inventory, list[CheckpointInfo]()
        if policy is None:
            return removed
        # Half, so that a refusal reaches the other ranks, which wait for it, before their deadline.
        deadline = time.monotonic() + self._options.deadline_seconds / 2
        candidates = inventory.droppable(
            lambda history: droppable(
                policy, history, coming, time.time(), abandoned=abandoned, sizes=self._pruner.weights_bytes
            ),
            go_on=lambda: time.monotonic() < deadline,
        )
        gain = sum(info.size_bytes for info in candidates), sum(map(self._files_of, candidates))
        if not candidates or not self._fits(needed, gain):
            return removed
        for info in candidates:
            if self._fits(needed):
                break
            self._ownership.check()
            if info.step in read_notes(self._storage).in_use:
                continue
            self._pruner.drop(info, reason="room")
            removed.append(info)
        self._pruner.report(removed, f"room for the save of step {coming.step}")
        _logger.warning(
            "step %d would not have fitted into %s: removed step(s) %s ahead of its commit; the retention "
            "policy drops them after it in any case",
            coming.step,
            self._storage.url,
            _steps(removed),
        )
        return removed

    def _files_of(self, info: CheckpointInfo) -> int:
        """Count the files of a checkpoint; 0 where files are not limited."""
        if self._storage.space().free_files is None:
            return 0
        try:
            # And the directory, the manifest and the marker.
            return len(Catalog(self._storage).manifest(info.name).files) + 3
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return 0

    def _refusal(self, step: int, needed: SpaceNeeded, removed: Sequence[CheckpointInfo]) -> NoRoomError:
        (free_bytes, total_bytes, free_files), url = self._storage.space(), self._storage.url
        headroom_bytes = self._options.free_headroom.of(total_bytes)
        size = "unknown" if free_bytes is None else bytes_text(free_bytes)
        files = "" if free_files is None else f" and {free_files} files"
        gone = f" Step(s) {_steps(removed)} were removed ahead of the policy." if removed else ""
        history, aside = self._ownership.inventory.history(), replaced(self._storage)
        kept = "; ".join(_kept(self._options.keep or KeepAll(), history, aside))
        text = (
            f"a save takes {bytes_text(needed.size_bytes)} and {needed.files} files, free are {size}{files}, "
            f"of which {bytes_text(headroom_bytes)} are headroom. Nothing was written.{gone} "
            f"Kept: {kept or 'nothing'}. Free space, keep fewer (keep=), remove pins (`ckpt unpin`), delete "
            f"damaged checkpoints (`ckpt prune {url} --damaged`) or lower headroom=, then save again"
        )
        return NoRoomError(
            f"step {step} was not saved to {url} (phase open): {text}",
            step=step,
            phase="open",
            failures={0: text},
            needed_bytes=needed.size_bytes,
            free_bytes=free_bytes,
            headroom_bytes=headroom_bytes,
            needed_files=needed.files,
            free_files=free_files,
        )


def droppable(
    policy: RetentionPolicy,
    history: Sequence[CheckpointInfo],
    coming: CheckpointInfo,
    now: float,
    *,
    abandoned: Abandoned = "keep",
    sizes: Callable[[CheckpointInfo, str | None], int] = as_it_is,
) -> list[CheckpointInfo]:
    """List checkpoints that the policy drops after `coming` and that may go before it.

    The lowest step is first. The newest sound checkpoint and the one committed last stay: if the save fails,
    training resumes from one of them. So does the one that `coming` replaces. `sizes` are of weights to come.
    """
    others = [info for info in history if info.name != coming.name]
    stays = plan_prune(_KEEP_NONE, history, now).keep
    after = on_present_line([*others, coming])
    drop = plan_prune(policy, after, now, abandoned=abandoned, last=coming.step, weights_bytes=sizes).drop
    gone_before = {info.name for info in history if info.abandoned}
    return [info for info in drop if info.name in gone_before or info.step not in stays]


def _part_bytes(index: Index) -> int:
    known = {id(None): (_ENTRY_BYTES, 1)}
    for entry in index.entries:
        if entry is not None and id(entry) not in known:
            payload = entry.boxes.sizes.prod(axis=1) * item_bytes(entry.dtype)
            frame = np.where(payload < BLOCK_BYTES, _SMALL_FRAME_BYTES, _FRAME_BYTES + _PAGE) + _TABLE_BYTES
            total = int((payload + frame + (payload * _BLOCK_CRC).astype(np.int64)).sum())
            known[id(entry)] = total, len(entry.boxes)
    texts = {str(key) for path in index.paths for key in path or ()}  # each is written once
    total = _SHAPE_BYTES * len(known) + _TEXT_BYTES * len(texts) + sum(map(len, texts))
    for name, path, entry in zip(index.names, index.paths, index.entries, strict=True):
        size, chunks = known[id(entry)]
        total += size + 2 * len(name) * chunks + _TEXT_BYTES * len(path or ())
    return total


def _kept(policy: RetentionPolicy, history: Sequence[CheckpointInfo], aside: Sequence[str]) -> Iterable[str]:
    """Describe every checkpoint that takes space, with the reason why it stays."""
    plan = plan_prune(policy, history, time.time())
    sizes = {info.step: info.size_bytes for info in history if not info.abandoned}
    for step, reasons in plan.keep.items():
        yield f"step {step}, {bytes_text(sizes[step])} ({', '.join(reasons)})"
    for infos, why in ((plan.damaged, "marked as damaged"), (plan.bad, "marked as bad")):
        yield from (f"step {info.step}, {bytes_text(info.size_bytes)} ({why})" for info in infos)
    yield from (f"{info.name}, {bytes_text(info.size_bytes)} (abandoned)" for info in plan.abandoned)
    yield from (f"{name} (moved aside)" for name in aside)


def _steps(infos: Iterable[CheckpointInfo]) -> str:
    return ", ".join(str(info.step) for info in infos)
