"""The files that a conversion writes, laid out before their bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch


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
