"""What a conversion is: from a source, by options, to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

import torch

from ckpt_core.convert._laid_out import OutFile
from ckpt_core.loading import LocatedTensor
from ckpt_core.storage import Storage

Adapters: TypeAlias = Literal["merge", "keep"]
Place: TypeAlias = tuple[Storage, str, str]
"""A storage, a directory in it, and a file in that; "" for the directory itself."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """How a checkpoint is exported; see `export`."""

    like: Place | None = None
    dtype: torch.dtype | None = None
    adapters: Adapters | None = None
    include: Sequence[str] = ()
    ema: str | None = None
    shard_bytes: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Files that are laid out, and not yet written.

    Attributes:
        files: the one last that makes the others a whole.
        tensors: that they are made of.
        step: the training's; None if it is not known.
        left_out: names of tensors that are in no file.
    """

    files: Sequence[OutFile]
    tensors: Mapping[str, LocatedTensor]
    step: int | None = None
    left_out: Sequence[str] = field(default_factory=tuple[str, ...])
