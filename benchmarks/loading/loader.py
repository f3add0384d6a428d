"""What a loader is: it brings what it once wrote back into the live tensors that all loaders share."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from isal.isal_zlib import crc32
from torch.distributed.tensor import DTensor

from benchmarks.contenders import Entrant, Tensors

POISON = 0xA5


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTask:
    """What every loader is given.

    Attributes:
        tensors: name -> live tensor, which a load fills in place; they hold the right values to begin with.
        checksums: name -> CRC-32 of the right bytes, on this rank.
        size_bytes: of all tensors together (global for DTensors).
        root: an existing directory on the disk to measure.
        device: where the tensors are.
        shared: what loaders share, made by the first that needs it.
    """

    tensors: Tensors
    checksums: Mapping[str, int]
    size_bytes: int
    root: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shared: dict[str, Any] = field(default_factory=dict[str, Any])

    def poison(self) -> None:
        """Overwrite every byte of this rank's tensors, so that what a load leaves out is seen."""
        for tensor in self.tensors.values():
            raw_bytes(tensor).fill_(POISON)

    def check(self) -> None:
        """Compare every tensor of this rank with what it should hold.

        Raises:
            WrongValuesError: some differ; the message names the first.
        """
        found = checksums(self.tensors)
        wrong = [name for name, checksum in self.checksums.items() if found[name] != checksum]
        if wrong:
            raise WrongValuesError(
                f"{len(wrong)} of {len(found)} tensors are not what was saved, {wrong[0]} first"
            )


class WrongValuesError(Exception):
    """A load ended without an error, and the tensors do not hold what was saved."""


class Loader(Entrant):
    """Loads into the live tensors over and over.

    Attributes:
        format: name of the directory that all loaders with these files share; "" without files.
        cached: whether it reads through the page cache.
    """

    task: LoadTask
    format: ClassVar[str]
    cached: ClassVar[bool] = True

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self.task.root / self.format

    @classmethod
    def write(cls, directory: Path, tensors: Tensors) -> None:
        """Write the files into a directory that does not exist; on several ranks called by all."""
        raise NotImplementedError(f"{cls.__name__} has no files to write")

    def prepare(self) -> None:
        """Make ready what is not a part of a load; the files only if they are not there."""
        if self.format and not self.directory.exists():
            unfinished = self.directory.with_name(f"{self.format}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            self.write(unfinished, self.task.tensors)
            unfinished.rename(self.directory)

    @abstractmethod
    def load(self) -> None:
        """Load; this is what is timed."""

    def files(self) -> list[Path]:
        """What a load reads, so that it can be brought into the page cache or dropped from it."""
        return [path for path in self.directory.rglob("*") if path.is_file()] if self.format else []

    def poison(self) -> None:
        """Make sure that what the next load leaves out is seen."""
        self.task.poison()

    def check(self) -> None:
        """Verify what the load has brought.

        Raises:
            WrongValuesError: it is not what was saved.
        """
        self.task.check()


LoaderType = type[Loader]


def checksums(tensors: Tensors) -> dict[str, int]:
    """Name -> CRC-32 of the bytes that this rank has of it."""
    return {name: crc32(raw_bytes(each).cpu().numpy().data) for name, each in tensors.items()}


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this rank's part, as a view."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().view(-1).view(torch.uint8)
