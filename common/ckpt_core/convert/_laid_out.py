"""What a conversion is: options, and files laid out before bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, TypeAlias, final

import torch

from ckpt_core.collective import collective_phase
from ckpt_core.commit import Manifest
from ckpt_core.coordination import Coordinator
from ckpt_core.loading import CheckpointPart, CommittedFiles, LocatedTensor, open_parts
from ckpt_core.sources import NameTable
from ckpt_core.storage import Storage


def ignore(_: int) -> None:
    """Ignore progress."""


def phase(ranks: Coordinator, what: str) -> AbstractContextManager[object]:
    """Open a phase that fails on all ranks or on none; errors of one process stay."""
    return nullcontext() if ranks.world_size == 1 else collective_phase(ranks, f"{what} failed", what=what)


DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """The bytes of one tensor of the source, contiguous and row-major.

    Attributes:
        name: in the source.
        dtype: to cast to; None for its own.
    """

    name: str
    dtype: torch.dtype | None = None


Span: TypeAlias = tuple[str, int, int]
"""Elements `start` to `stop` of a tensor of the source, row-major."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """A tensor that is computed from some of the source, window by window.

    Attributes:
        what: the computation and what it depends on besides those tensors; equal texts mean equal results.
        shape: of the result.
        dtype: of the result.
        spans: (start, stop), elements of the result, row-major -> what of the source they are made of.
        compute: (start, stop, those spans, flat, each of its own dtype) -> these elements, flat.
    """

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: Callable[[int, int], Sequence[Span]]
    compute: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Return a tensor of the source itself, cast to a dtype."""
        return cls(
            what="cast",
            shape=shape,
            dtype=dtype,
            spans=lambda start, stop: [(name, start, stop)],
            compute=lambda _start, _stop, origins: origins[0].to(dtype),
        )

    def cast(self, dtype: torch.dtype) -> Computed:
        """Return it cast to another dtype."""
        compute = self.compute
        return replace(self, dtype=dtype, compute=lambda *window: compute(*window).to(dtype))

    def part(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Computed:
        """Return a part of it; one that is not contiguous needs all of it."""
        end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        spans, compute = self.spans, self.compute
        if torch.empty(shape, device="meta").stride() == strides:
            return replace(
                self,
                shape=shape,
                spans=lambda start, stop: spans(offset + start, offset + stop),
                compute=lambda start, stop, origins: compute(offset + start, offset + stop, origins),
            )
        return replace(
            self,
            what=f"{self.what} by {strides}",
            shape=shape,
            spans=lambda _start, _stop: spans(offset, end),
            compute=lambda start, stop, origins: (
                compute(offset, end, origins).as_strided(shape, strides).reshape(-1)[start:stop]
            ),
        )


@final
@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that depend on those before them, such as a zip's directory.

    Attributes:
        size_bytes: how many.
        content: CRC-32 of each tensor of the file, in order, of those after it 0 -> the bytes.
    """

    size_bytes: int
    content: Callable[[Sequence[int]], bytes]


OutPiece: TypeAlias = bytes | Wanted | Computed | Late


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OutFile:
    """One file: its pieces, one after another.

    Attributes:
        path: below the place that is written; "" if the place is this file.
    """

    path: str
    pieces: Sequence[OutPiece]


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
    shard_bytes: int = 5_000_000_000
    names: NameTable | None = None

    def opened(self, source: Place) -> tuple[Manifest | None, CommittedFiles, dict[str, CheckpointPart]]:
        """Open a checkpoint, whose parameters get the names that they have there.

        Raises:
            ConfigError: two would have one name, or cannot be brought back.
        """
        manifest, files, parts = open_parts(*source[:2], file=source[2])
        if self.names is not None:
            parts = {part: each.renamed(self.names.back) for part, each in parts.items()}
        return manifest, files, parts


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Files that are laid out, and not yet written.

    Attributes:
        files: the one last that makes the others a whole.
        tensors: that they are made of.
        step: the training's; None if it is not known.
    """

    files: Sequence[OutFile]
    tensors: Mapping[str, LocatedTensor]
    step: int | None = None
