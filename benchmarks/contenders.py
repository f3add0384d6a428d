"""Who is measured: each contender saves the same state to the same disk and says when it was done."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ckpt_core import CheckpointManager
from ckpt_core.types import CapturedState

_PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds the training stood, and seconds until the bytes were durable."""

    stall_s: float
    durable_s: float


class Contender(ABC):
    """Saves a state into a fresh directory, over and over; `fsync` is part of every durable time."""

    name: str

    @abstractmethod
    def save(self, tensors: Tensors, directory: Path) -> Timing:
        """Save once."""

    def close(self) -> None:
        """Release what was kept between saves."""
        return


@final
class Ours(Contender):
    """`CheckpointManager.save`: checksums, manifest and commit included."""

    name = "ckpt-suite"

    def __init__(self, root: Path) -> None:
        self._manager = CheckpointManager(root / "ours")
        self._step = 0

    def save(self, tensors: Tensors, directory: Path) -> Timing:  # noqa: ARG002 - it has a root
        """Save, wait for the commit, and drop the checkpoint."""
        self._step += 1
        start = time.perf_counter()
        handle = self._manager.save(self._step, CapturedState(sharded={"": {"model": tensors}}))
        stall = time.perf_counter() - start
        if handle is None:
            raise RuntimeError("a save was skipped although the one before had ended")
        info = handle.result()
        durable = time.perf_counter() - start
        shutil.rmtree(Path(self._manager.storage.url) / info.name)
        return Timing(stall_s=stall, durable_s=durable)

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


@final
class StockSave(Contender):
    """`dcp.save` with its own writer, which fsyncs."""

    def __init__(self, threads: int) -> None:
        self.name = f"dcp.save, {threads} thread{'s' if threads > 1 else ''}"
        self._threads = threads

    def save(self, tensors: Tensors, directory: Path) -> Timing:
        """Save; all of it is a stall."""
        start = time.perf_counter()
        dcp.save(
            {"model": dict(tensors)}, storage_writer=FileSystemWriter(directory, thread_count=self._threads)
        )
        seconds = time.perf_counter() - start
        return Timing(stall_s=seconds, durable_s=seconds)


@final
class StockAsync(Contender):
    """`dcp.async_save`, as it comes or with one stager for all saves."""

    def __init__(self, *, reused: bool) -> None:
        self.name = f"dcp.async_save, {'reused stager' if reused else 'default'}"
        self._stager = DefaultStager(_PLAIN) if reused else None

    def save(self, tensors: Tensors, directory: Path) -> Timing:
        """Save and wait for the upload."""
        start = time.perf_counter()
        response = dcp.async_save(
            {"model": dict(tensors)},
            storage_writer=FileSystemWriter(directory),
            async_stager=self._stager,
        )
        stall = time.perf_counter() - start
        future = getattr(response, "upload_completion", response)
        future.result()
        return Timing(stall_s=stall, durable_s=time.perf_counter() - start)

    def close(self) -> None:
        """Close the stager."""
        if self._stager is not None:
            self._stager.close()


@final
class TorchSave(Contender):
    """`torch.save` of everything into one file, then fsync."""

    name = "torch.save + fsync"

    def save(self, tensors: Tensors, directory: Path) -> Timing:
        """Save; all of it is a stall."""
        directory.mkdir()
        start = time.perf_counter()
        with open(directory / "state.pt", "wb") as file:
            torch.save(dict(tensors), file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        return Timing(stall_s=seconds, durable_s=seconds)


@final
class Memcpy(Contender):
    """The floor of a blocking stall: the same bytes copied into buffers that exist already."""

    name = "limit: memcpy"

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def save(self, tensors: Tensors, directory: Path) -> Timing:  # noqa: ARG002 - it has no file
        """Copy once; nothing becomes durable."""
        if not self._buffers:
            self._buffers = {name: tensor.clone() for name, tensor in tensors.items()}
        start = time.perf_counter()
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor)
        seconds = time.perf_counter() - start
        return Timing(stall_s=seconds, durable_s=float("nan"))


@final
class RawDirect(Contender):
    """The floor of a durable save: as many bytes by O_DIRECT from one aligned buffer, then fsync."""

    name = "limit: O_DIRECT + fsync"

    def __init__(self, piece_bytes: int = 16 << 20) -> None:
        self._piece = mmap.mmap(-1, piece_bytes)
        self._piece.write(os.urandom(1 << 20) * (piece_bytes >> 20))

    def save(self, tensors: Tensors, directory: Path) -> Timing:
        """Write once."""
        directory.mkdir()
        total = sum(tensor.nbytes for tensor in tensors.values())
        start = time.perf_counter()
        file = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for offset in range(0, total, len(self._piece)):
            os.pwrite(file, self._piece, offset)
        os.fsync(file)
        os.close(file)
        seconds = time.perf_counter() - start
        return Timing(stall_s=float("nan"), durable_s=seconds)
