"""Reads of stored chunks: ranges of bytes, and the live tensors that they fill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import PLAIN, chunks_of
from ckpt_core.devices import DeviceFetch
from ckpt_core.formats.index import Ints
from ckpt_core.reading import REQUEST_BYTES, Payload, RangeRead

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in every dimension."""

Place: TypeAlias = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies into its first argument, a part of a live tensor, from its second."""


class Cut(NamedTuple):
    """A part of a stored chunk, which begins at `chunk`, and its place in a live one."""

    chunk: torch.Size
    storage_offsets: tuple[int, ...]
    dest_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@final
class Cuts:
    """What stored and live chunks have in common; of equal ones it is computed once."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Sequence[ChunkStorageMetadata], Ints, Ints]] = {}
        self._found: dict[tuple[int, torch.Size, torch.Size], list[Cut]] = {}
        self._placed: dict[Any, list[ChunkStorageMetadata]] = {}

    def of(self, chunks: Sequence[ChunkStorageMetadata], offsets: torch.Size, sizes: torch.Size) -> list[Cut]:
        """Cut a live chunk, which has elements, along the stored ones."""
        key = id(chunks), offsets, sizes
        if key not in self._found:
            if key[0] not in self._stored:
                shape = len(chunks), len(sizes)
                sides = [each.offsets for each in chunks], [each.sizes for each in chunks]
                starts, extents = (np.array(side, np.int64).reshape(shape) for side in sides)
                self._stored[key[0]] = chunks, starts, starts + extents
            _, starts, stops = self._stored[key[0]]
            own = np.array(offsets, np.int64)
            low, high = np.maximum(starts, own), np.minimum(stops, own + np.array(sizes, np.int64))
            rows = np.flatnonzero((low < high).all(axis=1))
            low, high, starts = low[rows], high[rows], starts[rows]
            columns = (map(tuple, each.tolist()) for each in (low - starts, low - own, high - low))
            self._found[key] = list(map(Cut, (chunks[row].offsets for row in rows.tolist()), *columns))
        return self._found[key]

    def live(self, value: Any) -> list[ChunkStorageMetadata]:
        """Return the chunks of a live tensor that this rank holds."""
        if type(value) in PLAIN:
            key: Any = value.shape
        elif isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                return []
            key = value.device_mesh, value.placements, value.shape
        else:
            return chunks_of(value)
        if key not in self._placed:
            self._placed[key] = chunks_of(value)
        return self._placed[key]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield row-major elements `start` to `stop` as at most 2 * ndim - 1 boxes."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, begin = divmod(start, inner)
    last, end = divmod(stop, inner)
    if begin and first == last:
        yield from _in_row(shape, first, begin, end)
        return
    if begin:
        yield from _in_row(shape, first, begin, inner)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _in_row(shape, last, 0, end)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    return (((row, row + 1), *rest) for rest in boxes_of_range(shape[1:], start, stop))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTarget:
    """A part of a stored chunk, and the tensor that it is loaded into.

    Attributes:
        shape: of the whole chunk, which is stored contiguously.
        offsets: of the part in the chunk.
        tensor: to fill, of the part's shape, on any device and of any layout. If its dtype differs, values
            are cast as by `Tensor.copy_`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def byte_range(self) -> tuple[int, int]:
        """Start and stop of the part's bytes in the payload; equal if the part is empty."""
        if self.tensor.shape == self.shape:
            return 0, self.tensor.numel() * self.dtype.itemsize
        if not self.tensor.numel():
            return 0, 0
        strides = _strides(self.shape)
        first = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        reach = sum((n - 1) * stride for n, stride in zip(self.tensor.shape, strides, strict=True))
        return first * self.dtype.itemsize, (first + reach + 1) * self.dtype.itemsize

    @property
    def memory(self) -> memoryview | None:
        """The tensor's memory, if one range of the payload can be read directly into it."""
        start, stop = self.byte_range
        tensor = self.tensor
        if (
            stop - start != tensor.nbytes
            or tensor.dtype != self.dtype
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or type(tensor) is not torch.Tensor
        ):
            return None
        return bytes_of(tensor)

    def fill(self, start: int, content: memoryview, place: Place = torch.Tensor.copy_) -> None:
        """Copy into the tensor those of the payload's bytes from `start` that are its."""
        itemsize = self.dtype.itemsize
        first = start // itemsize
        count = len(content) // itemsize
        if not count:
            return
        flat = torch.frombuffer(content, dtype=self.dtype, count=count)
        for box in boxes_of_range(self.shape, first, first + count):
            self._copy_box(box, flat, first, place)

    def _copy_box(self, box: Box, flat: torch.Tensor, first: int, place: Place) -> None:
        strides = _strides(self.shape)
        spans = [
            (max(low, offset), min(high, offset + size))
            for (low, high), offset, size in zip(box, self.offsets, self.tensor.shape, strict=True)
        ]
        if any(low >= high for low, high in spans):
            return
        begin = sum(low * stride for (low, _), stride in zip(spans, strides, strict=True)) - first
        source = flat.as_strided([high - low for low, high in spans], strides, begin)
        target = self.tensor
        for dim, ((low, high), offset) in enumerate(zip(spans, self.offsets, strict=True)):
            target = target.narrow(dim, low - offset, high - low)
        if target.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # the mode is per thread
                place(target, source)
        else:
            place(target, source)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRead:
    """A read of a part of a stored chunk; `name`, the live tensor's, is unique."""

    name: str
    payload: Payload
    target: TensorTarget

    def checked(self) -> Iterator[RangeRead]:
        """Yield what is to be verified before, without a destination."""
        begin, end = self.target.byte_range
        if begin < end:
            yield RangeRead(payload=self.payload, start=begin, stop=end)

    def ranges(self, fetch: DeviceFetch | None = None) -> Iterator[RangeRead]:
        begin, end = self.target.byte_range
        memory = self.target.memory
        if memory is not None and begin < end:
            yield RangeRead(payload=self.payload, start=begin, stop=end, into=memory)
            return
        place = torch.Tensor.copy_ if fetch is None else fetch.place
        while begin < end:
            cut = min(end, (begin // REQUEST_BYTES + 1) * REQUEST_BYTES)
            take = partial(self.target.fill, begin, place=place)
            yield RangeRead(payload=self.payload, start=begin, stop=cut, take=take)
            begin = cut

    def fill(self, start: int, content: memoryview, fetch: DeviceFetch | None = None) -> None:
        """Copy into the target those of the payload's bytes from `start` that are its."""
        memory = self.target.memory
        if memory is None:
            if fetch is None or self.target.tensor.is_cpu:
                self.target.fill(start, content)
                return
            with fetch.lend(start, len(content)) as pinned:
                pinned[:] = content
                self.target.fill(start, pinned, fetch.place)
            return
        first, last = self.target.byte_range
        begin, end = max(first, start), min(last, start + len(content))
        if begin < end:
            memory[begin - first : end - first] = content[begin - start : end - start]
