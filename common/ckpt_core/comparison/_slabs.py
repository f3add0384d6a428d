"""The comparison of one tensor of two checkpoints, slab by slab."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

import torch

from ckpt_core.comparison._directory_contents import Contents, StoredChunk
from ckpt_core.dcp import load_chunk
from ckpt_core.formats.checksums import crc32
from ckpt_core.types import SavedTensor

SLAB_ELEMENTS: Final = 1 << 20
"""Elements that are compared at a time: figures need 8 bytes for each, several times."""

_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Difference: TypeAlias = Literal["added", "removed", "shape", "dtype", "content"]
Slab: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index and the lengths of a part of a tensor, contiguous in the order of its elements."""


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


def slabs(shape: Sequence[int], most: int) -> Iterator[Slab]:
    """Divide a tensor into slabs of at most so many elements, in order.

    The overlap of a slab with any box of the tensor is contiguous in that box, and all overlaps with it are
    in the order of its elements.
    """
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    if not shape[0] or not inner:
        return
    if inner <= most:
        rows = most // inner
        for start in range(0, shape[0], rows):
            yield (start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:])
        return
    for row in range(shape[0]):
        for offsets, sizes in slabs(shape[1:], most):
            yield (row, *offsets), (1, *sizes)


@final
class TensorStream:
    """Reads a stored tensor slab by slab, and compares every chunk with its checksum.

    Args:
        contents: of the checkpoint.
        chunks: of the tensor.
        dtype: of the tensor.
        seen: called with a number of bytes read.
    """

    def __init__(
        self,
        contents: Contents,
        chunks: Sequence[StoredChunk],
        dtype: torch.dtype,
        seen: Callable[[int], None],
    ) -> None:
        self._contents = contents
        self._chunks = sorted(chunks, key=lambda chunk: chunk.offsets)
        self._dtype = dtype
        self._seen = seen
        self._crcs = [0] * len(self._chunks)
        self._whole: dict[int, torch.Tensor] = {}

    def read(self, slab: Slab) -> torch.Tensor:
        """Read the next slab, in the order of `slabs`; return its elements in a row."""
        offsets, sizes = slab
        found = torch.empty(sizes, dtype=self._dtype)
        for number, chunk in enumerate(self._chunks):
            starts = tuple(map(max, offsets, chunk.offsets))
            stops = tuple(
                min(o + s, p + t)
                for o, s, p, t in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            )
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            view = found[tuple(slice(a - o, z - o) for a, z, o in zip(starts, stops, offsets, strict=True))]
            inside = tuple(a - o for a, o in zip(starts, chunk.offsets, strict=True))
            view.copy_(self._read_part(number, inside, view.numel()).view(view.shape))
        return found.reshape(-1)

    def finish(self) -> None:
        """Compare the checksums of all chunks, of which every byte was read.

        Raises:
            CorruptCheckpointError: one differs.
        """
        for number, chunk in enumerate(self._chunks):
            payload = chunk.place.payload
            if payload is not None and payload.crc32 not in {None, self._crcs[number]}:
                raise self._contents.damaged(chunk.place, "its checksum differs from the saved one")

    def _read_part(self, number: int, inside: Sequence[int], count: int) -> torch.Tensor:
        chunk, start = self._chunks[number], 0
        for index, length in zip(inside, chunk.sizes, strict=True):
            start = start * length + index
        if chunk.place.payload is None:
            return self._not_raw(number)[start : start + count]
        size, payload = self._dtype.itemsize, chunk.place.payload
        buffer = self._contents.read_range(chunk.place, payload.offset + start * size, count * size)
        self._crcs[number] = crc32(buffer, self._crcs[number])
        self._seen(len(buffer))
        return torch.frombuffer(buffer, dtype=self._dtype)

    def _not_raw(self, number: int) -> torch.Tensor:
        """Return a chunk of stock DCP whose elements are not contiguous in its file."""
        if number not in self._whole:
            place = self._chunks[number].place
            loaded = load_chunk(self._contents.read(place), f"{self._contents.url}/{place.path}")
            self._whole = {number: loaded.reshape(-1)}
            self._seen(place.size_bytes)
        return self._whole[number]


def equal_by_checksums(one: Sequence[StoredChunk], other: Sequence[StoredChunk]) -> bool | None:
    """Return whether checksums say that two tensors are equal; None if they cannot."""
    first, second = _checksums(one), _checksums(other)
    if first is None or second is None or first.keys() != second.keys():
        return None
    return first == second


def _checksums(chunks: Sequence[StoredChunk]) -> dict[Slab, Any] | None:
    found: dict[Slab, Any] = {}
    for chunk in chunks:
        payload = chunk.place.payload
        if payload is None or payload.crc32 is None:
            return None
        if not math.prod(chunk.sizes):
            continue  # a rank's share of a tensor with fewer rows than ranks
        found[chunk.offsets, chunk.sizes] = payload.crc32, payload.size_bytes
    return found


@final
class Figures:
    """Running figures of the difference of two tensors, slab after slab."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.changed = 0
        self._wide = torch.complex128 if dtype.is_complex else torch.float64
        self._numeric = dtype.is_floating_point or dtype.is_complex
        self._max_abs = self._squares = self._squares_of_a = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a slab, flat."""
        differs = _differing(a, b)
        changed = int(differs.sum())
        self.changed += changed
        if not self._numeric:
            return
        try:
            wide = a.to(self._wide)
            self._squares_of_a += float(torch.linalg.vector_norm(wide)) ** 2
            if changed:
                self._add_apart(b.to(self._wide).sub_(wide).masked_fill_(~differs, 0).abs())
        except RuntimeError:
            self._numeric = False  # a dtype that torch does not convert, such as float4

    def _add_apart(self, apart: torch.Tensor) -> None:
        """Add absolute differences; equal bytes are none, also of infinities and NaN."""
        largest = float(apart.max())
        self._max_abs = largest if math.isnan(largest) else max(self._max_abs, largest)
        self._squares += float(torch.linalg.vector_norm(apart)) ** 2

    def of(self, name: str, form: SavedTensor) -> TensorDifference:
        """Return the difference."""
        norms = math.sqrt(self._squares), math.sqrt(self._squares_of_a)
        return TensorDifference(
            name=name,
            difference="content",
            a=form,
            b=form,
            changed=self.changed,
            max_abs=self._max_abs if self._numeric else None,
            relative_norm=_ratio(*norms) if self._numeric else None,
        )


def _ratio(norm: float, of: float) -> float:
    if of:
        return norm / of
    return math.inf if norm else 0.0  # 0.0 and -0.0 have other bytes


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements of two flat tensors have other bytes."""
    size = a.dtype.itemsize
    number = _NUMBERS.get(size)
    if number is not None:
        return a.view(number) != b.view(number)
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, size).any(1)
