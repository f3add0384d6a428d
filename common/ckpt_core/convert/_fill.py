"""The content of the files that a conversion writes, read window by window."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final, Self, final

import torch

from ckpt_core.convert._laid_out import Computed, Late, OutFile, OutPiece, Wanted
from ckpt_core.dcp import ChunkLocation, TensorRead, TensorTarget, boxes_of_range, bytes_of
from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.formats.checksums import crc32
from ckpt_core.loading import CheckpointPart, LocatedTensor
from ckpt_core.reading import REQUEST_BYTES, Engine, RangeRead, page_memory

WINDOW_BYTES: Final = 16 << 20
"""Of a file, read and passed on at once. Writers hold five of them."""


def size_of(piece: OutPiece, tensors: Mapping[str, LocatedTensor]) -> int:
    """Return how many bytes a piece of a file has."""
    if isinstance(piece, bytes):
        return len(piece)
    if isinstance(piece, Late):
        return piece.size_bytes
    if isinstance(piece, Computed):
        return prod(piece.shape) * piece.dtype.itemsize
    tensor = tensors[piece.name]
    return prod(tensor.shape) * (piece.dtype or tensor.dtype).itemsize


@final
class FileFill:
    """A reader of what files are made of, verified wherever the source has checksums.

    Extra memory: a window and, of what is cast or computed in it, its origin. A chunk whose elements are not
    one after another is read whole.

    Concurrency: one thread; the reads are on threads of their own.
    """

    def __init__(self, tensors: Mapping[str, LocatedTensor]) -> None:
        self._tensors = tensors
        self._closing = ExitStack()
        self._engines: dict[int, Engine] = {}
        self._pending: dict[int, tuple[CheckpointPart, list[TensorRead]]] = {}
        self._then: list[Callable[[], None]] = []
        self._verified: set[tuple[str, int]] = set()
        self._crcs: list[int] = []
        self._chunk: tuple[ChunkLocation, torch.Tensor] | None = None
        self._free: list[memoryview] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def windows(self, file: OutFile) -> Iterator[memoryview]:
        """Yield the content of a file, each window in memory of its own.

        Raises:
            CorruptCheckpointError: the source is damaged.
            IncompatibleCheckpointError: a tensor is made of others.
            OSError: storage failed.
        """
        self._crcs = []
        wants_crcs = any(isinstance(each, Late) for each in file.pieces)
        window, at = self._window(), 0
        for piece in file.pieces:
            is_tensor = isinstance(piece, Wanted | Computed)
            if is_tensor:
                self._crcs.append(0)
            start, size = 0, size_of(piece, self._tensors)
            while start < size:
                stop = min(size, start + WINDOW_BYTES - at)
                into = window[at : at + stop - start]
                self._fill(piece, start, stop, into)
                if wants_crcs and is_tensor:
                    self._then.append(partial(self._count, len(self._crcs) - 1, into))
                at, start = at + stop - start, stop
                if at == WINDOW_BYTES:
                    self._read()
                    yield window
                    window, at = self._window(), 0
        self._read()
        if at:
            yield window[:at]

    def _window(self) -> memoryview:
        """Return memory for a window, of an earlier one that nobody refers to."""
        # The kernel clears new memory, which costs as much as to read into it.
        memory = self._free.pop() if self._free else page_memory(WINDOW_BYTES)
        loan = (ctypes.c_ubyte * WINDOW_BYTES).from_buffer(memory)
        weakref.finalize(loan, self._free.append, memory)
        return memoryview(loan).cast("B")

    def read_into(self, ranges: Iterable[tuple[Wanted, int, memoryview]]) -> None:
        """Fill memory with a tensor's bytes, row-major, from an offset on."""
        for piece, start, into in ranges:
            if into:  # a tensor may be empty
                self._fill(piece, start, start + len(into), into)
        self._read()

    def _count(self, number: int, content: memoryview) -> None:
        self._crcs[number] = crc32(content, self._crcs[number])

    def _fill(self, piece: OutPiece, start: int, stop: int, into: memoryview) -> None:
        """Plan to fill memory with bytes `start` to `stop` of a piece."""
        if isinstance(piece, bytes):
            into[:] = piece[start:stop]
            return
        if isinstance(piece, Late):
            late = piece.content
            self._then.append(lambda: into.__setitem__(slice(None), late(self._crcs)[start:stop]))
            return
        if isinstance(piece, Wanted):
            dtype = piece.dtype or self._tensors[piece.name].dtype
            if dtype == self._tensors[piece.name].dtype:
                self._plan(piece.name, start, stop, torch.frombuffer(into, dtype=torch.uint8))
                return
            piece = Computed.of(piece.name, self._tensors[piece.name].shape, dtype)
        first, last = start // piece.dtype.itemsize, -(-stop // piece.dtype.itemsize)
        origins: list[torch.Tensor] = []
        for name, begin, end in piece.spans(first, last):
            tensor = self._tensors[name]
            origins.append(torch.empty(end - begin, dtype=tensor.dtype))
            size = tensor.dtype.itemsize
            self._plan(name, begin * size, end * size, origins[-1].view(torch.uint8))
        compute = partial(piece.compute, first, last, origins)
        skipped = start - first * piece.dtype.itemsize

        def finish() -> None:
            into[:] = bytes_of(compute().contiguous())[skipped : skipped + len(into)]

        self._then.append(finish)

    def _plan(self, name: str, start: int, stop: int, flat: torch.Tensor) -> None:
        """Plan to read bytes `start` to `stop` of a tensor, row-major, into memory."""
        tensor = self._tensors[name]
        size = tensor.dtype.itemsize
        done = 0
        for wanted in boxes_of_range((*tensor.shape, size), start, stop):
            sizes = [high - low for low, high in wanted]
            target = flat[done : done + prod(sizes)].view(sizes)
            done += prod(sizes)
            for (offsets, of_chunk), place in tensor.boxes.items():
                stored = [(low, low + n) for low, n in zip((*offsets, 0), (*of_chunk, size), strict=True)]
                spans = [
                    (max(a, low), min(b, high)) for (a, b), (low, high) in zip(wanted, stored, strict=True)
                ]
                if all(low < high for low, high in spans):
                    part = target
                    for dim, ((low, high), (begin, _)) in enumerate(zip(spans, wanted, strict=True)):
                        part = part.narrow(dim, low - begin, high - low)
                    inner = tuple(low - begin for (low, _), (begin, _) in zip(spans, stored, strict=True))
                    goal = TensorTarget(
                        shape=(*of_chunk, size), dtype=torch.uint8, offsets=inner, tensor=part
                    )
                    self._plan_chunk(tensor, place, goal)

    def _plan_chunk(self, tensor: LocatedTensor, place: ChunkLocation, target: TensorTarget) -> None:
        """Plan to read a box of the bytes of a chunk; of one that is not contiguous, do."""
        if place.wrapped:
            raise IncompatibleCheckpointError(
                f"{tensor.part.files.url}: {tensor.name!r:.200} is made of other tensors, which no other "
                "format holds; save it as a plain tensor, or leave it out by `include`"
            )
        if place.payload is None:
            if self._chunk is None or self._chunk[0] is not place:
                self._chunk = None
                whole = tensor.part.read_chunk(place).contiguous()
                self._chunk = place, whole.reshape(-1).view(torch.uint8).view(target.shape)
            source = self._chunk[1]
            for dim, (begin, count) in enumerate(zip(target.offsets, target.tensor.shape, strict=True)):
                source = source.narrow(dim, begin, count)
            target.tensor.copy_(source)
            return
        read = TensorRead(name=tensor.name, payload=place.payload, target=target)
        self._pending.setdefault(id(tensor.part), (tensor.part, []))[1].append(read)

    def _read(self) -> None:
        """Read what is planned, then cast, compute and count."""
        for key, (part, reads) in self._pending.items():
            files = part.files
            if key not in self._engines:
                self._engines[key] = self._closing.enter_context(part.engine())
            engine, ranges = self._engines[key], [each for read in reads for each in read.ranges()]
            twin_of = files.twin if files.has_twins else None
            on_arrival = twin_of is None
            bare = (each.payload.path for each in ranges if not each.payload.has_checksum)
            try:
                failures = files.damaged_files(bare) or engine.verify(
                    self._unverified(ranges), twin_of=twin_of, on_arrival=on_arrival
                )
            except FileNotFoundError as error:
                raise CorruptCheckpointError(f"{files.url}: a file is missing: {error}") from error
            if failures := files.without_mended(failures):
                more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
                raise CorruptCheckpointError(f"{files.url}/{failures[0]}{more}", failures=tuple(failures))
            engine.fetch(ranges)
        self._pending.clear()
        for act in self._then:
            act()
        self._then.clear()

    def _unverified(self, ranges: Sequence[RangeRead]) -> Iterator[RangeRead]:
        """Yield the ranges to verify; what has one checksum for all windows once, whole."""
        for each in ranges:
            payload = each.payload
            if payload.block_crcs or (payload.crc32 is not None and payload.size_bytes <= REQUEST_BYTES):
                yield each
            elif payload.crc32 is not None and (payload.path, payload.offset) not in self._verified:
                self._verified.add((payload.path, payload.offset))
                yield replace(each, start=0, stop=payload.size_bytes, into=None, take=None)
