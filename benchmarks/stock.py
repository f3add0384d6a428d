"""What comes with torch: `torch.distributed.checkpoint` in its modes, and `torch.save`."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import ClassVar, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.contenders import Contender, InFlight, Kind, Task, ended


class _StockSave(Contender):
    """`dcp.save` with its own writer, which fsyncs its files."""

    kind: ClassVar[Kind] = "stock"
    threads: ClassVar[int]

    def start(self, number: int) -> InFlight:
        """Save; all of it is a stall."""
        writer = FileSystemWriter(self.directory(number), thread_count=self.threads)
        dcp.save({"model": dict(self.task.tensors)}, storage_writer=writer)
        return InFlight(durable=ended())


@final
class StockSaveOneThread(_StockSave):
    """As it comes."""

    key = "dcp-save"
    name = "dcp.save, 1 thread"
    threads = 1


@final
class StockSaveTwoThreads(_StockSave):
    """With two writer threads."""

    key = "dcp-save-2"
    name = "dcp.save, 2 threads"
    threads = 2


class _StockAsync(Contender):
    """`dcp.async_save`; a subclass chooses stager and executor."""

    kind: ClassVar[Kind] = "stock"
    executor: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._stager = self.make_stager()

    def make_stager(self) -> DefaultStager | None:
        """The stager for all saves; None lets every save make its own."""
        return None

    def start(self, number: int) -> InFlight:
        """Save; it returns when the state is staged."""
        response = dcp.async_save(
            {"model": dict(self.task.tensors)},
            storage_writer=FileSystemWriter(self.directory(number)),
            async_stager=self._stager,
            async_checkpointer_type=self.executor,
        )
        if isinstance(response, Future):
            return InFlight(durable=response)
        return InFlight(durable=response.upload_completion, staged=response.staging_completion)

    def close(self) -> None:
        """Close the stager."""
        if self._stager is not None:
            self._stager.close()


@final
class StockAsyncDefault(_StockAsync):
    """A thread, and a new stager every time: what one gets without asking."""

    key = "dcp-async"
    name = "dcp.async_save, default"
    passing_copies = 1


@final
class StockAsyncReused(_StockAsync):
    """A thread, and one stager for all saves: its buffers are reused, on CUDA pinned."""

    key = "dcp-async-reused"
    name = "dcp.async_save, reused stager"
    copies = 1

    def make_stager(self) -> DefaultStager:
        """On CUDA with the non-blocking copies that pinned memory is for."""
        return DefaultStager(_staging(self.task, shared=False))


@final
class StockAsyncProcess(_StockAsync):
    """A process, fed through shared memory that is reused: its best mode."""

    key = "dcp-async-process"
    name = "dcp.async_save, process"
    copies = 1
    executor = AsyncCheckpointerType.PROCESS

    def make_stager(self) -> DefaultStager:
        """Without shared memory every save would copy the state once more into the pipe."""
        return DefaultStager(_staging(self.task, shared=True))

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """It asks for a process group, even of one rank; the others must not be measured with one."""
        if dist.is_initialized():
            yield
            return
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@final
class TorchSave(Contender):
    """`torch.save` of everything into one file."""

    key = "torch-save"
    name = "torch.save + fsync"
    kind = "stock"
    fsync = "the benchmark's"

    def start(self, number: int) -> InFlight:
        """Save; all of it is a stall."""
        self.directory(number).mkdir()
        with open(self.directory(number) / "state.pt", "wb") as file:
            torch.save(dict(self.task.tensors), file)
            file.flush()
            os.fsync(file.fileno())
        return InFlight(durable=ended())


def _staging(task: Task, *, shared: bool) -> StagingOptions:
    cuda = task.device.type == "cuda"
    return StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=shared, use_async_staging=cuda, use_non_blocking_copy=cuda
    )
