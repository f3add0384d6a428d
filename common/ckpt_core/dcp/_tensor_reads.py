"""Reads of stored chunks: ranges of bytes, and the live tensor that each window of them goes to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias, final

import torch

from ckpt_core.reading import Payload, RangeRead

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in every dimension."""


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` of a row-major array of `shape`, as at most 2 * ndim - 1 boxes."""
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
@dataclass(frozen=True, kw_only=True)
class TensorTarget:
    """A part of a stored chunk, and the tensor that it is loaded into.

    Attributes:
        shape: of the whole chunk, which is stored contiguously.
        dtype: of the chunk.
        offsets: where the part starts in the chunk.
        target: what to fill, of the part's shape; on any device and of any layout. Its dtype may be another:
            then values are cast as by `Tensor.copy_`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    target: torch.Tensor

    @cached_property
    def byte_range(self) -> tuple[int, int]:
        """From the part's first byte in the payload to behind its last; equal if the part is empty."""
        if not self.target.numel():
            return 0, 0
        strides = _strides(self.shape)
        first = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        reach = sum((n - 1) * stride for n, stride in zip(self.target.shape, strides, strict=True))
        return first * self.dtype.itemsize, (first + reach + 1) * self.dtype.itemsize

    @cached_property
    def memory(self) -> memoryview | None:
        """The target's own bytes, if the part is one run of the payload that can be read straight there."""
        start, stop = self.byte_range
        target = self.target
        if (
            stop - start != target.nbytes
            or target.dtype != self.dtype
            or target.device.type != "cpu"
            or not target.is_contiguous()
            or target.is_conj()
            or target.is_neg()
            or type(target) is not torch.Tensor
        ):
            return None
        return bytes_of(target)

    def land(self, start: int, content: memoryview) -> None:
        """Copy what the payload holds from byte `start` on into the target, as far as it belongs there."""
        itemsize = self.dtype.itemsize
        first = start // itemsize
        count = len(content) // itemsize
        if not count:
            return
        flat = torch.frombuffer(content, dtype=self.dtype, count=count)
        strides = _strides(self.shape)
        for box in boxes_of_range(self.shape, first, first + count):
            self._copy_box(box, flat, first, strides)

    def _copy_box(self, box: Box, flat: torch.Tensor, first: int, strides: Sequence[int]) -> None:
        spans = [
            (max(low, offset), min(high, offset + size))
            for (low, high), offset, size in zip(box, self.offsets, self.target.shape, strict=True)
        ]
        if any(low >= high for low, high in spans):
            return
        begin = sum(low * stride for (low, _), stride in zip(spans, strides, strict=True)) - first
        source = flat.as_strided([high - low for low, high in spans], strides, begin)
        target = self.target
        for dim, ((low, high), offset) in enumerate(zip(spans, self.offsets, strict=True)):
            target = target.narrow(dim, low - offset, high - low)
        if target.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # a mode of each thread
                target.copy_(source)
        else:
            target.copy_(source)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


_WINDOW_BYTES: Final = 8 << 20  # of what does not go straight to its place


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRead:
    """A part of one stored chunk, and where it goes; `name` is the live tensor's, unique in a load."""

    name: str
    payload: Payload
    landing: TensorTarget

    def wanted(self, start: int = 0, stop: int | None = None) -> Iterator[RangeRead]:
        """What to read, as far as it lies between two bytes of the payload."""
        first, last = self.landing.byte_range
        begin = max(first, start)
        end = last if stop is None else min(last, stop)
        if begin >= end:
            return
        memory = self.landing.memory
        if memory is not None:
            into = memory[begin - first : end - first]
            yield RangeRead(payload=self.payload, start=begin, stop=end, into=into)
            return
        while begin < end:
            cut = min(end, (begin // _WINDOW_BYTES + 1) * _WINDOW_BYTES)
            yield RangeRead(
                payload=self.payload, start=begin, stop=cut, take=partial(self.landing.land, begin)
            )
            begin = cut

    def land(self, start: int, content: memoryview) -> None:
        """Copy what the payload holds from byte `start` on into place, as far as it belongs there."""
        memory = self.landing.memory
        if memory is None:
            self.landing.land(start, content)
            return
        first, last = self.landing.byte_range
        begin, end = max(first, start), min(last, start + len(content))
        if begin < end:
            memory[begin - first : end - first] = content[begin - start : end - start]
