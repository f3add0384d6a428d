"""A training-safe copy of this rank's shards in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import final

import torch
from typing_extensions import override

from ckpt_core.errors import CheckpointError


class StagedShards:
    """Host copies of shards, keyed as they were given; valid until `release`.

    Concurrency: filled on the main thread, read on one background thread, released once.
    """

    def __init__(self, tensors: Mapping[Hashable, torch.Tensor]) -> None:
        self.tensors = tensors
        self.released = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def release(self) -> None:
        """Give the memory back to the stager, which may overwrite it from now on."""
        self.released = True


class Stager(ABC):
    """Copies shards out of the training's reach.

    Who calls what: 1. (main thread) `stage`; training may go on when it returns. 2. (background thread) reads
    the copies, then `release`. 3. (main thread) the next `stage`.
    """

    @abstractmethod
    def stage(self, shards: Mapping[Hashable, torch.Tensor]) -> StagedShards:
        """Copy every shard.

        Args:
            shards: plain local tensors, any device, any strides.

        Raises:
            CheckpointError: the copies of the save before are still being read.
        """


@final
class HostStager(Stager):
    """Blocking copy into host buffers that are kept from save to save (pinned for CUDA sources)."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._staged: StagedShards | None = None

    @override
    def stage(self, shards: Mapping[Hashable, torch.Tensor]) -> StagedShards:
        if self._staged is not None and not self._staged.released:
            raise CheckpointError(
                "staging buffers are still being written; wait for the save in flight first"
            )
        # Dropping buffers of shards that are gone first keeps host memory at one copy.
        self._buffers = {key: self._buffers[key] for key in shards if key in self._buffers}
        devices: set[torch.device] = set()
        for key, shard in shards.items():
            source = shard.detach().resolve_conj().resolve_neg()
            self._buffer(key, source).copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._staged = StagedShards(dict(self._buffers))
        return self._staged

    def _buffer(self, key: Hashable, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        return buffer
