"""Staging: this rank's shards copied into the image of its data files, in one arena."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ckpt_core.dcp import Image, ImageLayout, ResolvedPlan, ShardSpec, spec_of
from ckpt_core.staging import Arena, Arenas, Copy, DeferredCopies

_Key: TypeAlias = tuple[tuple[str, tuple[ShardSpec, ...]], ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StagedParts:
    """What a rank is about to write, out of the training's reach; valid until `release`.

    Attributes:
        images: part -> image of its data file.
        values: part -> byte entries.
        arena: the memory behind the images; None if nothing was staged.
        deferred: copies still to be made; until then the images are not whole.
    """

    images: Mapping[str, Image]
    values: Mapping[str, Mapping[MetadataIndex, bytes]]
    arena: Arena | None
    deferred: DeferredCopies | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.layout.size_bytes for image in self.images.values())

    def release(self) -> None:
        """Give the memory back to the next save."""
        if self.arena is not None:
            self.arena.release()


NOTHING_STAGED = StagedParts(images={}, values={}, arena=None)


@final
class Stager:
    """Copies shards on the main thread. Layouts and memory are kept for as long as the shards stay alike.

    Args:
        arenas: the memory for the copies.
    """

    def __init__(self, arenas: Arenas | None = None) -> None:
        self.arenas = Arenas() if arenas is None else arenas
        self._layouts: tuple[_Key, dict[str, ImageLayout]] = ((), {})

    def stage(self, plans: Mapping[str, ResolvedPlan], *, stable: Sequence[Any] = ()) -> StagedParts:
        """Copy every shard of the plans but those that share memory with `stable` tensors.

        When it returns, the training may change what was copied; the rest is in `deferred`.

        Raises:
            CheckpointError: every arena is still being written.
            StagingMemoryError: there is no host memory for the copy.
        """
        key = tuple(
            (part, tuple(spec_of(index, shard) for index, shard in plan.shards.items()))
            for part, plan in plans.items()
        )
        devices = {shard.device for plan in plans.values() for shard in plan.shards.values() if shard.is_cuda}
        arena, images = self._lay_out(key, pinned=bool(devices))
        later = frozenset(_address(tensor) for tensor in stable) if stable else None
        left: list[Copy] = []
        try:
            for part, plan in plans.items():
                left += [Copy(*each) for each in images[part].copy(plan.shards, later=later)]
            for device in devices if later is None else ():
                torch.cuda.current_stream(device).synchronize()
            deferred = DeferredCopies(left) if left else None
        except BaseException:
            arena.release()
            raise
        values = {part: plan.values for part, plan in plans.items()}
        return StagedParts(images=images, values=values, arena=arena, deferred=deferred)

    def close(self) -> None:
        """Give the memory back to the system."""
        self.arenas.close()

    def _lay_out(self, key: _Key, *, pinned: bool) -> tuple[Arena, Mapping[str, Image]]:
        if key != self._layouts[0]:
            self._layouts = (key, {part: ImageLayout(specs) for part, specs in key})
        layouts = self._layouts[1]
        total = sum(_whole_pages(layout.size_bytes) for layout in layouts.values())
        arena = self.arenas.reserve(total, pinned=pinned)
        kept: tuple[_Key, dict[str, Image]] | None = arena.attached
        if kept is not None and kept[0] == key:
            return arena, kept[1]
        images: dict[str, Image] = {}
        offset = 0
        for part, layout in layouts.items():
            images[part] = Image(layout, arena.memory[offset : offset + layout.size_bytes])
            offset += _whole_pages(layout.size_bytes)
        arena.attach((key, images))
        return arena, images


def _address(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().data_ptr())


def _whole_pages(size_bytes: int) -> int:
    """Every image starts on a page, as direct writes need it."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
