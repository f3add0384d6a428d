"""What comes with torch: `dcp.load`, and `torch.load` of one file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from typing_extensions import override

from benchmarks.contenders import Kind, Tensors
from benchmarks.loading.loader import Loader

_FILE = "state.pt"


class _Stock(Loader):
    kind: ClassVar[Kind] = "stock"


@final
class StockLoad(_Stock):
    """`dcp.load` with its own reader, as it comes: one thread, nothing verified."""

    key = "dcp-load"
    name = "dcp.load"
    format = "dcp"

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        write_dcp(directory, tensors)

    @override
    def load(self) -> None:
        dcp.load({"model": dict(self.task.tensors)}, storage_reader=FileSystemReader(self.directory))


@final
class TorchLoad(_Stock):
    """`torch.load(mmap=True)`, then every tensor copied into the live one; nothing verified."""

    key = "torch-load"
    name = "torch.load(mmap=True) + copy_"
    format = "torch-save"

    @classmethod
    @override
    def write(cls, directory: Path, tensors: Tensors) -> None:
        directory.mkdir()
        torch.save(dict(tensors), directory / _FILE)

    @override
    def load(self) -> None:
        loaded = torch.load(self.directory / _FILE, mmap=True, weights_only=True)
        for name, tensor in self.task.tensors.items():
            tensor.copy_(loaded[name])


def write_dcp(directory: Path, tensors: Tensors) -> None:
    """`dcp.save` with its own writer."""
    dcp.save({"model": dict(tensors)}, storage_writer=FileSystemWriter(directory))
