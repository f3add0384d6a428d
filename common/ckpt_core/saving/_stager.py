"""Staging: copies of this rank's shards, in one arena, as images of data files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils.hooks import RemovableHandle

from ckpt_core._torch_internals import PLAIN, copy_all, inner_tensors, own_part
from ckpt_core.dcp import Image, ImageLayout, Part
from ckpt_core.devices import current_stream, has_streams, side_stream
from ckpt_core.errors import ConfigError, StagingMemoryError
from ckpt_core.saving._in_flight import failed_in
from ckpt_core.staging import Arena, Arenas, Copy, DeferredCopies, Waves, flat_parts, whole_pages


@final
class StepGuard:
    """Hooks that make optimizer steps wait for deferred copies. Main thread only.

    The host has waited for `waited_seconds`, in all.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._pending: list[DeferredCopies] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self, deferred: DeferredCopies | None, optimizers: Sequence[Any]) -> None:
        """Make steps of `optimizers` wait for `deferred` and for earlier pending copies."""
        if deferred is None:
            return
        self._pending = [each for each in self._pending if not each.done] + [deferred]
        self._unhook()
        self._hooks = [each.register_step_pre_hook(lambda *_: self.wait()) for each in optimizers]

    def wait(self) -> None:
        """Order every copy before this thread's next work.

        On devices, before the next work that it enqueues on the current streams.
        """
        if not self._pending:
            return
        began = time.monotonic()
        for deferred in self._pending:
            deferred.wait()
        self.waited_seconds += time.monotonic() - began
        self._pending = [each for each in self._pending if not each.done]

    def close(self) -> None:
        self._unhook()
        self._pending = []

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


_Layouts: TypeAlias = Mapping[str, ImageLayout]
_Values: TypeAlias = Mapping[str, Mapping[MetadataIndex, bytes]]
_LOWEST: Final = 1 << 40
"""No memory lies lower on most systems, and no offset in a storage is as large."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StagedParts:
    """A rank's staged copies, which training cannot change; valid until `release`.

    Attributes:
        images: part -> image of its data file.
        values: part -> byte entries.
        arena: the memory behind the images; None if nothing was staged.
        deferred: copies still to be made; until they are, the images are incomplete, and written files count
            only after its `finish` has returned.
        waves: the memory of images that are never whole, whose `copies` are `deferred`.
        non_finite: part and name of what is not finite, in waves that look for it.
    """

    images: Mapping[str, Image]
    values: _Values
    arena: Arena | None
    deferred: DeferredCopies | None = None
    waves: Waves | None = None
    non_finite: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def wait_for(self, part: str, piece: int) -> None:
        """Block until all is filled that lies in the pieces of a part up to this one.

        Raises:
            SaveError: it will not be, because the copies of waves have failed.
        """
        if self.deferred is None:
            return
        before = [image.layout for _, image in takewhile(lambda each: each[0] != part, self.images.items())]
        if self.waves is None:
            last = self.images[part].layout.batches[piece][2] - 1 + sum(len(each.slots) for each in before)
        else:
            last = piece + sum(len(each.batches) for each in before)
        self.deferred.wait_for(last)
        if self.waves is not None and self.deferred.done and (error := self.deferred.settle()) is not None:
            raise failed_in("stage", error)

    def stop(self) -> None:
        if self.waves is not None:
            self.waves.stop()

    @property
    def size_bytes(self) -> int:
        return sum(image.layout.size_bytes for image in self.images.values())

    def release(self) -> None:
        """Release the arena for the next save, once the pending copies have ended."""
        self.stop()
        if self.deferred is not None:
            self.deferred.settle()
        if self.arena is not None:
            self.arena.release()


@final
class Stager:
    """Copying of shards. Main thread. Layouts and memory are kept while plans stay.

    Args:
        priority: of the thread that makes deferred copies.
        until_free: blocks until no arena is in flight, unless its writer hangs.
        is_finite: looks at all that is copied in waves; None to look at nothing.
    """

    def __init__(
        self,
        arenas: Arenas,
        priority: int = 0,
        *,
        until_free: Callable[[], None] = lambda: None,
        held_bytes: Callable[[int], int] = lambda _: 0,
        is_finite: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.arenas, self._priority = arenas, priority
        self._until_free, self._held_bytes, self._is_finite = until_free, held_bytes, is_finite
        self._generation = -1
        self._layouts: _Layouts = {}

    def stage(
        self, parts: Mapping[str, Part], generation: int, *, stable: Sequence[Any] | None = None
    ) -> StagedParts:
        """Copy every shard but those that share memory with `stable` tensors.

        When it returns, training may change the copied tensors; the others, which only optimizer steps
        change, are in `deferred`. With `stable` None everything is copied now.

        Where there is too little memory, nothing is copied yet: nothing may change until `deferred.wait` has
        copied all, while other threads write the `waves`.

        Raises:
            CheckpointError: every arena is still being written.
            StagingMemoryError: there is no host memory for the copy, not even in waves.
        """
        values = {
            name: dict(zip(each.value_indices, each.values(), strict=True)) for name, each in parts.items()
        }
        sources = [shard for part in parts.values() for shard in part.shards()]
        # In freed memory it is the offset alone. That of a storage costs twice as much, and every save waits.
        if min(map(torch.Tensor.data_ptr, sources), default=_LOWEST) < _LOWEST:
            _check_memory(_names(parts), sources)
        on_host = all(map(attrgetter("is_cpu"), sources))  # in C: every save waits for it
        devices = set() if on_host else {source.device for source in sources if has_streams(source)}
        # Torch can pin for CUDA alone.
        pinned = bool(devices) and any(source.is_cuda for source in sources)
        try:
            arena, images = self._reserve(parts, generation, pinned=pinned)
        except StagingMemoryError:
            self._until_free()  # that memory can be used
            try:
                arena, images = self._reserve(parts, generation, pinned=pinned)
            except StagingMemoryError as refusal:
                return self._in_waves(sources, values, refusal, pinned=pinned)
        try:
            if stable is None:
                _fill(images.values(), sources, on_host=on_host)
                deferred = None
            else:
                targets = [target for image in images.values() for target in image.targets]
                frozen = frozenset(address for tensor in stable for address in memory_of_own(tensor))
                is_stable = (memory_of(source) in frozen for source in sources)
                later = _copy_unstable(zip(_names(parts), sources, targets, is_stable, strict=True))
                deferred = DeferredCopies(later, priority=self._priority) if later else None
            for device in devices if stable is None else ():
                current_stream(device).synchronize()
        except BaseException:
            # Copies enqueued before the error still write into the arena.
            try:
                for device in devices:
                    current_stream(device).synchronize()
                    side_stream(device).synchronize()
            finally:
                arena.release()
            raise
        return StagedParts(images=images, values=values, arena=arena, deferred=deferred)

    def _in_waves(
        self,
        sources: Sequence[torch.Tensor],
        values: _Values,
        refusal: StagingMemoryError,
        *,
        pinned: bool,
    ) -> StagedParts:
        arena, window_bytes = self._reserve_windows(refusal, pinned=pinned)
        non_finite: list[tuple[str, str]] = []
        fills: list[Callable[[torch.Tensor], None]] = []
        starts: dict[str, int] = {}
        rest = iter(sources)
        for name, layout in self._layouts.items():
            starts[name] = len(fills)
            of_part = list(islice(rest, len(layout.slots)))
            content = _Content(name, layout, of_part, self._is_finite, non_finite)
            fills += [partial(content.copy, piece) for piece in range(len(layout.batches))]
        waves = Waves(arena.memory, window_bytes, fills)
        return StagedParts(
            images={
                name: Image(layout, window=partial(waves.window, starts[name]))
                for name, layout in self._layouts.items()
            },
            values=values,
            arena=arena,
            deferred=waves.copies,
            waves=waves,
            non_finite=non_finite,
        )

    def _reserve_windows(self, refusal: StagingMemoryError, *, pinned: bool) -> tuple[Arena, int]:
        """Reserve memory for windows on all images; return it, and the size of one."""
        layouts = self._layouts.values()
        size_bytes = max(layout.window_bytes for layout in layouts)
        held = max(-(-self._held_bytes(layout.size_bytes) // layout.piece_bytes) for layout in layouts)
        with torch.inference_mode(mode=False):
            arena = self.arenas.reserve_most(size_bytes * (Waves.LEAST + held), refusal, pinned=pinned)
        arena.attach(None)  # images of another layout
        return arena, size_bytes

    def prewarm(self, parts: Mapping[str, Part], generation: int) -> int:
        """Allocate the arenas, or the memory of waves; return the bytes of all arenas."""
        pinned = any(shard.is_cuda for part in parts.values() for shard in part.shards())
        total = _total(self._laid_out(parts, generation))
        try:
            self.arenas.prewarm(total, pinned=pinned)
            arena, _ = self._reserve(parts, generation, pinned=pinned)
        except StagingMemoryError as refusal:
            arena, _ = self._reserve_windows(refusal, pinned=pinned)
        arena.release()
        return self.arenas.size_bytes

    def close(self) -> None:
        self._layouts, self._generation = {}, -1
        self.arenas.close()

    def _reserve(
        self, parts: Mapping[str, Part], generation: int, *, pinned: bool
    ) -> tuple[Arena, Mapping[str, Image]]:
        layouts = self._laid_out(parts, generation)
        # Memory and views made inside `torch.inference_mode` could not be filled outside of it.
        with torch.inference_mode(mode=False):
            arena = self.arenas.reserve(_total(layouts), pinned=pinned)
            attached = arena.attached
            if attached is not None and attached[0] is layouts:
                return arena, attached[1]
            images: dict[str, Image] = {}
            offset = 0
            for name, layout in layouts.items():
                images[name] = Image(layout, arena.memory[offset : offset + layout.size_bytes])
                offset += whole_pages(layout.size_bytes)
            arena.attach((layouts, images))
            return arena, images

    def _laid_out(self, parts: Mapping[str, Part], generation: int) -> _Layouts:
        if generation != self._generation:
            self._layouts = {name: ImageLayout(part.specs, part.records) for name, part in parts.items()}
            self._generation = generation
        return self._layouts


def _names(parts: Mapping[str, Part]) -> list[str]:
    return [index.fqn for part in parts.values() for index, _, _ in part.specs]


@final
class _Content(NamedTuple):
    """What is copied to the windows on the image of a part."""

    part: str
    layout: ImageLayout
    sources: Sequence[torch.Tensor]
    is_finite: Callable[[torch.Tensor], bool] | None
    non_finite: list[tuple[str, str]]

    def copy(self, piece: int, window: torch.Tensor) -> None:
        copied: list[tuple[str, torch.Tensor]] = []
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for place, start, stop, at in self.layout.parts(piece):
            slot, source = self.layout.slots[place], self.sources[place].detach()
            size = source.dtype.itemsize
            target = window[at : at + stop - start].view(source.dtype)
            copied.append((slot.index.fqn, target))
            for each in flat_parts(source, start // size, stop // size):
                sources.append(each)
                targets.append(target[: each.numel()].view(each.shape))
                target = target[each.numel() :]
        copy_all(targets, sources)
        for device in {each.device for each in sources if has_streams(each)}:
            current_stream(device).synchronize()
        if self.is_finite is not None:
            self.non_finite.extend((self.part, name) for name, each in copied if not self.is_finite(each))


def _fill(images: Iterable[Image], sources: Sequence[torch.Tensor], *, on_host: bool) -> None:
    rest = iter(sources)
    for image in images:
        image.fill(list(islice(rest, len(image.layout.slots))), on_host=on_host)


def _copy_unstable(copies: Iterable[tuple[str, torch.Tensor, torch.Tensor, bool]]) -> list[Copy]:
    """Copy the unstable tensors now; return the copies still to be made.

    On devices, unstable tensors are cloned where they are, so that the host need not wait for the device.
    `copies` are name, source, target, and whether the source is stable.
    """
    later: list[Copy] = []
    now: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for slot, (name, source, target, is_stable) in enumerate(copies):
        if is_stable:
            later.append(Copy(name, source, target, slot))
        elif has_streams(source):
            later.append(Copy(name, source.detach().clone(), target, slot))
        else:
            now[0].append(target)
            now[1].append(source)
    copy_all(*now)
    return later


def _check_memory(names: Sequence[str], sources: Sequence[torch.Tensor]) -> None:
    """Refuse tensors freed since planned: copying one would crash the process."""
    pairs = zip(names, sources, strict=True)
    freed = [name for name, source in pairs if source.numel() and not memory_of(source)]
    if freed:
        raise ConfigError(
            f"{len(freed)} tensor(s) have no memory any more, first {freed[0]}: freed, or on the meta "
            "device; save at a moment when the parameters are materialised"
        )


def memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def memory_of_own(tensor: Any) -> list[int]:
    """Return the addresses of what this rank has of a tensor."""
    local = own_part(tensor)
    inner = [local] if type(local) in PLAIN else [each for _, each in inner_tensors(local)]
    return list(map(memory_of, inner))


def _total(layouts: _Layouts) -> int:
    # Direct writes need every image to start on a page.
    return sum(whole_pages(layout.size_bytes) for layout in layouts.values())
