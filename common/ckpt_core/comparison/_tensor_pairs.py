"""The comparison of one tensor of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

import torch

from ckpt_core.comparison._directory_contents import Contents, StoredChunk
from ckpt_core.dcp import load_chunk
from ckpt_core.formats.checksums import crc32
from ckpt_core.types import SavedTensor

_PIECE: Final = 1 << 20
"""Elements whose figures are computed at a time: they need 8 bytes for each, several times."""
_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Difference: TypeAlias = Literal["added", "removed", "shape", "dtype", "content"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: DCP's, with its part in front.
        difference: the kind; `added` is in the second checkpoint only.
        a, b: its form in either; None where it is not.
        changed: elements with other bytes; None if they were not counted.
        max_abs: the largest absolute difference of floating numbers; None if there are no figures.
        relative_norm: the norm of the difference over the norm of the first tensor; likewise.
    """

    name: str
    difference: Difference
    a: SavedTensor | None = None
    b: SavedTensor | None = None
    changed: int | None = None
    max_abs: float | None = None
    relative_norm: float | None = None


def whole_tensor(
    contents: Contents, chunks: Sequence[StoredChunk], form: SavedTensor, seen: Callable[[int], None]
) -> torch.Tensor:
    """Read a stored tensor, flat, and compare every chunk with its checksum.

    Raises:
        CorruptCheckpointError: one differs, or a file ends before.
    """
    dtype: torch.dtype = getattr(torch, form.dtype)
    found = torch.empty(form.shape, dtype=dtype)
    for chunk in chunks:
        place, payload = chunk.place, chunk.place.payload
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        if not math.prod(chunk.sizes):
            continue
        if payload is None:  # of stock DCP, with elements that are not contiguous in its file
            found[box] = load_chunk(contents.read(place), f"{contents.url}/{place.path}", place.form)
            seen(place.size_bytes)
            continue
        buffer = contents.read_range(place, payload.offset, payload.size_bytes)
        if payload.crc32 not in {None, crc32(buffer)}:
            raise contents.damaged(place, "its checksum differs from the saved one")
        found[box] = torch.frombuffer(buffer, dtype=dtype).view(chunk.sizes)
        seen(payload.size_bytes)
    return found.reshape(-1)


def equal_by_checksums(one: Sequence[StoredChunk], other: Sequence[StoredChunk]) -> bool | None:
    """Return whether checksums say that two tensors are equal; None if they cannot."""
    first, second = _checksums(one), _checksums(other)
    if first is None or second is None or first.keys() != second.keys():
        return None
    return first == second


def _checksums(chunks: Sequence[StoredChunk]) -> dict[Any, Any] | None:
    found: dict[Any, Any] = {}
    for chunk in chunks:
        payload = chunk.place.payload
        if payload is None or payload.crc32 is None:
            return None
        if not math.prod(chunk.sizes):
            continue  # a rank's share of a tensor with fewer rows than ranks
        found[chunk.offsets, chunk.sizes] = payload.crc32, payload.size_bytes
    return found


def figures(name: str, form: SavedTensor, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """Compare two flat tensors, piece by piece; None if their bytes are equal.

    Equal bytes are no difference, also those of infinities and NaN.
    """
    wide = torch.complex128 if a.is_complex() else torch.float64
    numeric = a.is_floating_point() or a.is_complex()
    changed, largest, squares, squares_of_a = 0, 0.0, 0.0, 0.0
    for start in range(0, a.numel(), _PIECE):
        one, other = a[start : start + _PIECE], b[start : start + _PIECE]
        differs = _differing(one, other)
        changed += (count := int(differs.sum()))
        if not numeric:
            continue
        try:
            of_a = one.to(wide)
            squares_of_a += float(torch.linalg.vector_norm(of_a)) ** 2
            if count:
                apart = other.to(wide).sub_(of_a).masked_fill_(~differs, 0).abs()
                most = float(apart.max())
                largest = most if math.isnan(most) else max(largest, most)
                squares += float(torch.linalg.vector_norm(apart)) ** 2
        except RuntimeError:
            numeric = False  # a dtype that torch does not convert, such as float4
    if not changed:
        return None
    norm, of = math.sqrt(squares), math.sqrt(squares_of_a)
    ratio = norm / of if of else (math.inf if norm else 0.0)  # 0.0 and -0.0 have other bytes
    return TensorDifference(
        name=name,
        difference="content",
        a=form,
        b=form,
        changed=changed,
        max_abs=largest if numeric else None,
        relative_norm=ratio if numeric else None,
    )


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements of two flat tensors have other bytes."""
    size = a.dtype.itemsize
    number = _NUMBERS.get(size)
    if number is not None:
        return a.view(number) != b.view(number)
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, size).any(1)
