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


Late: TypeAlias = Callable[[Sequence[int]], bytes]
"""CRC-32 of each `Wanted` of the file so far, in order -> bytes, such as a zip's directory."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OutFile:
    """One file: its pieces, one after another.

    Attributes:
        path: below the place that is written.
    """

    path: str
    pieces: Sequence[bytes | Wanted | Late]
