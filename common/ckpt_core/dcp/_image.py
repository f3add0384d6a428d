"""The image of a data file, laid out before any shard is copied.

The layout is a pure function of the shards' keys, dtypes and shapes; it is computed once and used by every
save until one of those changes. A save then copies each shard into its slot, fills in the CRC-32 fields, and
passes the image to storage in large aligned pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core._torch_internals import copy_all, inner_tensors, is_wrapped
from ckpt_core.dcp._torch_zip import ZIP32_LIMIT, Archive, build_archive, build_legacy, tensor_pickle
from ckpt_core.dcp._wrapped_tensors import wrapped_pickle
from ckpt_core.formats.checksums import combine_crc32, crc32, crc32_text
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkColumns, TableEntry
from ckpt_core.storage import ALIGNMENT
from ckpt_core.types import FileEntry

PIECE_BYTES = 16 << 20
_SMALL_BYTES: Final = BLOCK_BYTES
"""Payloads from this size on are worth a zip, and padding to a page."""
_REPEATS: Final = 16
"""Bytes after which equal small tensors are laid out alike."""
_TINY_BYTES: Final = 4096
"""Payloads up to this size are copied many at once, through memory that joins them."""
_JOINED: Final = 1024
"""Tensors of one such copy: fewer cost calls, more leave the cache."""
_LEAST_JOINED: Final = 16
"""Fewer of one dtype and shape are copied one by one."""
_ALIGNMENT_OF_SMALL: Final = 64
"""Of the payloads of small wrapped shards; that of torch's own zips."""

USUAL: Final = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8}
)
"""Dtypes for which torch has every operator."""

ShardSpec = tuple[MetadataIndex, torch.dtype, tuple[int, ...]]
"""Index, dtype and shape of a shard, or of one of the tensors that a wrapped shard is made of."""

Spans: TypeAlias = npt.NDArray[np.int64]
_Row: TypeAlias = tuple[int, int, int, int, int]
"""Of a slot: start, bytes before the payload, end, and the offsets of its CRC-32 fields."""


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """The offsets of one payload in the file: with its frames, and CRC-32 fields."""

    index: MetadataIndex
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    payload: int
    payload_bytes: int
    end: int
    crc_fields: tuple[int, int]


@final
class Slots:
    """The slots of a layout as columns; each is built on access.

    Attributes:
        starts, payloads, sizes, ends: int64 [slots], bytes in the file.
        crc_fields: int64 [slots, 2].
    """

    def __init__(self, specs: Sequence[ShardSpec], rows: Sequence[tuple[int, ...]]) -> None:
        self.specs = specs
        self.starts, heads, self.ends, *crcs = np.array(rows, np.int64).reshape(-1, 5).T
        self.payloads = self.starts + heads
        self.sizes = np.fromiter(map(_payload_bytes, specs), np.int64, len(specs))
        self.crc_fields = np.stack(crcs, axis=1)

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[Slot]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Slot:
        index, dtype, shape = self.specs[place]
        columns = self.starts, self.payloads, self.sizes, self.ends
        start, payload, size, end = (int(each[place]) for each in columns)
        local, central = self.crc_fields[place].tolist()
        return Slot(index, dtype, shape, start, payload, size, end, (local, central))


def _payload_bytes(spec: ShardSpec) -> int:
    return prod(spec[2]) * spec[1].itemsize


@final
class ImageLayout:
    """The slots of all shards of one data file, and the bytes around them.

    Args:
        records: `wrapped_pickle` of the shards that are wrapped; their payloads follow one another.
        zip64_from: the smallest payload size that uses the 64-bit fields of zip.

    Attributes:
        firsts: the first slot of every shard.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        records: Mapping[MetadataIndex, bytes] = MappingProxyType({}),
        *,
        zip64_from: int = ZIP32_LIMIT,
    ) -> None:
        self._zip64_from, self.piece_bytes = zip64_from, PIECE_BYTES
        self.wrapped_indices = frozenset(records)
        self._places: list[int] = []  # of the bytes around payloads
        self._frames: list[bytes] = []
        known: dict[tuple[torch.dtype, tuple[int, ...], int], Archive] = {}
        rows: list[_Row] = []
        self.firsts: list[int] = []
        self.size_bytes = at = 0
        while at < len(specs):
            index, dtype, shape = specs[at]
            record = records.get(index) if records else None
            self.firsts.append(at)
            end = at + 1
            while record is not None and end < len(specs) and specs[end][0] == index:
                end += 1
            if record is None and _payload_bytes(specs[at]) < _SMALL_BYTES:
                key = dtype, shape, self.size_bytes % _REPEATS
                if (archive := known.get(key)) is None:
                    archive = known[key] = build_legacy(dtype, shape, offset=self.size_bytes)
                rows += self._place(archive, [0])
            else:
                sizes = list(map(_payload_bytes, specs[at:end]))
                rows += self._place(self._zip(record or tensor_pickle(dtype, shape), sizes), sizes)
            at = end
        self.slots = Slots(specs, rows)

    def _zip(self, pickled: bytes, sizes: Sequence[int]) -> Archive:
        return build_archive(
            pickled,
            [(size, 0) for size in sizes],
            offset=self.size_bytes,
            zip64_from=self._zip64_from,
            alignment=_ALIGNMENT_OF_SMALL if max(sizes) < _SMALL_BYTES else ALIGNMENT,
            streamed=True,
        )

    def _place(self, archive: Archive, sizes: Sequence[int]) -> Iterator[_Row]:
        """Append the archive of one shard; yield the rows of its payloads.

        `sizes` are those of the payloads; that of the last is not needed.
        """
        start = at = self.size_bytes
        self.size_bytes += archive.size_bytes
        for place, (size, (local, central)) in enumerate(zip(sizes, archive.crc_fields, strict=True)):
            frame = archive.frames[place]
            self._places.append(at)
            self._frames.append(frame)
            end = self.size_bytes if place + 1 == len(sizes) else at + len(frame) + size
            yield at, len(frame), end, start + local, start + central
            at += len(frame) + size
        if archive.frames[-1]:
            self._places.append(self.size_bytes - len(archive.frames[-1]))
            self._frames.append(archive.frames[-1])

    def frame(self, memory: memoryview, start: int = 0) -> None:
        """Write the bytes around the payloads, without the CRC-32 fields.

        `memory` is that of the file from `start` on.
        """
        first = max(0, bisect_right(self._places, start) - 1)
        for number in range(first, len(self._places)):
            at, content = self._places[number] - start, self._frames[number]
            if at >= len(memory):
                break
            part = content[max(0, -at) : len(memory) - at]
            memory[max(0, at) : max(0, at) + len(part)] = part

    def parts(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a window on a piece holds: slot, range of its payload, place.

        Of a small payload that begins there it is all.
        """
        end, first, last = self.batches[number]
        start = number * self.piece_bytes
        for place in range(max(0, first - 1), last):
            begin, stop = self.payloads[place].tolist()
            small = place >= first and stop - begin <= BLOCK_BYTES
            if (from_ := max(begin, start)) < (to := stop if small else min(stop, end)):
                yield place, from_ - begin, to - begin, from_ - start

    @cached_property
    def spans(self) -> Spans:
        """Start and end in the file of every shard's archive, int64 [shards, 2]."""
        starts = self.slots.starts[self.firsts] if self.firsts else self.slots.starts
        return np.stack([starts, np.append(starts, self.size_bytes)[1:]], axis=1)

    @cached_property
    def crc_places(self) -> Spans:
        """Offsets of the bytes of every slot's two CRC-32 fields, int64 [slots, 2, 4]."""
        return self.slots.crc_fields[:, :, None] + np.arange(4)

    @cached_property
    def payloads(self) -> Spans:
        """Start and end in the file of every slot's payload, int64 [slots, 2]."""
        return np.stack([self.slots.payloads, self.slots.payloads + self.slots.sizes], axis=1)

    @cached_property
    def large(self) -> list[int]:
        """The slots whose payload is larger than a block, in order."""
        large: list[int] = np.flatnonzero(self.slots.sizes > BLOCK_BYTES).tolist()
        return large

    @cached_property
    def alike(self) -> tuple[list[list[int]], list[int]]:
        """Tiny slots, by dtype and shape where many have both, and the other slots."""
        groups: dict[Any, list[int]] = {}
        sizes = self.slots.sizes.tolist()
        for place, (_, dtype, shape) in enumerate(self.slots.specs):
            joins = shape and 0 < sizes[place] <= _TINY_BYTES and dtype in USUAL
            groups.setdefault((dtype, shape) if joins else None, []).append(place)
        others = groups.pop(None, [])
        others += chain.from_iterable(each for each in groups.values() if len(each) < _LEAST_JOINED)
        return [each for each in groups.values() if len(each) >= _LEAST_JOINED], others

    @cached_property
    def batches(self) -> list[tuple[int, int, int]]:
        """For every piece of the file: its end, and its first and last (exclusive) slot."""
        ends = [*range(self.piece_bytes, self.size_bytes, self.piece_bytes), self.size_bytes]
        ends = ends if self.firsts else []
        cuts = [0, *np.searchsorted(self.slots.starts, ends).tolist()]
        return list(zip(ends, cuts[:-1], cuts[1:], strict=True))

    @cached_property
    def columns(self) -> bytes:
        """The shards as columns of a chunk table; a wrapped one has several payloads."""
        specs = [self.slots.specs[first] for first in self.firsts]
        starts, ends = self.spans[:, 0].tolist(), self.spans[:, 1].tolist()
        plain = [index not in self.wrapped_indices for index, _, _ in specs]
        payloads, sizes = (
            [value if one else None for value, one in zip(column[self.firsts].tolist(), plain, strict=True)]
            for column in (self.slots.payloads, self.slots.sizes)
        )
        return ChunkColumns(
            key=[index.fqn for index, _, _ in specs],
            shard_offsets=[None if index.offset is None else list(index.offset) for index, _, _ in specs],
            offset=starts,
            size_bytes=[end - start for start, end in zip(starts, ends, strict=True)],
            payload_offset=payloads,
            payload_bytes=sizes,
            dtype=[
                str(dtype).removeprefix("torch.") if one else None
                for (_, dtype, _), one in zip(specs, plain, strict=True)
            ],
        ).encode()

    @cached_property
    def cuts(self) -> list[int]:
        """Where wrapped shards begin and end in the file, in order."""
        return sorted({cut for place in self.wrapped for cut in self.spans[place].tolist()})

    @cached_property
    def window_bytes(self) -> int:
        """Whole pages that hold a piece, and the small entry that may begin at its end."""
        slots = self.slots
        lengths = slots.payloads + slots.sizes - slots.starts
        longest = int(lengths[slots.sizes <= BLOCK_BYTES].max(initial=0))
        return self.piece_bytes + -(-longest // ALIGNMENT) * ALIGNMENT

    @cached_property
    def wrapped(self) -> list[int]:
        """The positions of the wrapped shards among all shards."""
        specs = self.slots.specs
        return [place for place, first in enumerate(self.firsts) if specs[first][0] in self.wrapped_indices]


@final
class Image:
    """A data file in memory: all of it, or the windows on it that `window` gives.

    All of it is uint8, contiguous, on the host, on a page boundary, and large enough. A window, by the number
    of its piece, has the `window_bytes` of the layout. Its payloads are filled, and it may be used again when
    nothing refers to it any more.

    Concurrency: `pieces` on one thread, which may wait for slots of `targets` that others fill.
    """

    def __init__(
        self,
        layout: ImageLayout,
        memory: torch.Tensor | None = None,
        window: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.layout = layout
        self._window = window
        self.targets: Sequence[torch.Tensor] = ()
        """The slots as tensors of their dtype and shape, in the order of the layout."""
        if memory is not None:
            array: Any = memory[: layout.size_bytes].numpy()
            self._bytes = memoryview(array)
            layout.frame(self._bytes)
            self.targets = tuple(_views(memory, layout.slots))
        self._begin()

    def fill(self, sources: Sequence[torch.Tensor], *, on_host: bool) -> None:
        """Copy tensors, of which all or not all are on the host, into the slots.

        From a device it may only be enqueued.
        """
        alike, others = self.layout.alike if on_host else ([], range(len(sources)))
        left = list(others)
        with torch.no_grad():
            for places in alike:
                for at in range(0, len(places), _JOINED):
                    some = places[at : at + _JOINED]
                    if not self._join(some, [sources[place] for place in some]):
                        left += some
        copy_all([self.targets[place] for place in left], [sources[place] for place in left])

    def _join(self, places: list[int], sources: list[torch.Tensor]) -> bool:
        """Copy tensors into equal slots by two calls; return whether all are of one kind."""
        _, dtype, shape = spec = self.layout.slots.specs[places[0]]
        if not {prod(shape)}.issuperset(map(torch.Tensor.numel, sources)):
            return False
        joined, size = torch.cat(sources).contiguous(), _payload_bytes(spec)
        if joined.dtype != dtype or joined.shape[1:] != shape[1:]:
            return False
        # Rows that begin at every byte, of which some are written.
        rows = np.ndarray(len(self._bytes) - size + 1, f"V{size}", self._bytes, strides=(1,))
        rows[self.layout.slots.payloads[places]] = joined.view(-1).view(torch.uint8).numpy().view(rows.dtype)
        return True

    def _begin(self) -> None:
        self.chunk_crcs = [0] * len(self.layout.slots)
        """CRC-32 of every slot's payload; valid after `pieces` has ended."""
        self._block_crcs: list[int] = []
        self._file_crc = 0
        # CRC-32 of the file up to the ends of wrapped archives; checksums whose fields lie in later pieces.
        self._crcs_at = {0: 0}
        self._due = np.empty(0, np.int64), np.empty(0, np.uint8)

    def pieces(self, wait_for: Callable[[int], None] | None = None) -> Generator[memoryview]:
        """Fill in the checksums and yield the file in pieces; a yielded piece is final.

        `wait_for` blocks until all is filled that lies in pieces 0 to n; it is None if all is.
        """
        self._begin()
        start = 0
        for number, (end, first, last) in enumerate(self.layout.batches):
            if wait_for is not None:
                wait_for(number)
            content = self._bytes[start:] if self._window is None else self._window(number)
            if self._window is not None:
                self.layout.frame(content[: end - start], start)
            self._fill_in(content, start, end, range(first, last))
            yield content[: end - start]
            start = end

    def _fill_in(self, content: memoryview, start: int, end: int, begun: range) -> None:
        """Fill in the checksums that lie in a piece; update the file's.

        `content` is the file from `start` on; the slots `begun` begin in the piece.
        """
        layout, sums = self.layout, self.chunk_crcs
        first, last = (bisect_left(layout.large, place) for place in (max(0, begun.start - 1), begun.stop))
        parts: list[tuple[int, int, int]] = []
        known: list[int] = []
        done = begun.start
        for place in [*layout.large[first:last], begun.stop]:
            known += range(done, place)
            sums[done:place] = [
                crc32(content[a - start : b - start]) for a, b in layout.payloads[done:place].tolist()
            ]
            done = max(done, place + 1)
            if place < begun.stop:
                payload = layout.payloads[place].tolist()
                begin, stop = (min(max(each, start), end) for each in payload)
                crc = self._add_part(place, content[begin - start : stop - start], begin)
                parts.append((begin, stop, crc))
                known += [place] * (begin < stop == payload[1])
        self._enter(content, start, end, known)
        position = start
        for begin, stop, crc in parts:
            self._add(content, start, position, begin)
            self._file_crc = combine_crc32(self._file_crc, crc, stop - begin)
            position = stop
        self._add(content, start, position, end)

    def _enter(self, content: memoryview, start: int, end: int, slots: Sequence[int]) -> None:
        """Enter the checksums of slots into their fields; those of later pieces wait."""
        crcs = np.array([self.chunk_crcs[place] for place in slots], dtype="<u4").view(np.uint8)
        fields = self.layout.crc_places[slots]
        places = np.concatenate([self._due[0], fields.ravel()])
        values = np.concatenate([self._due[1], np.broadcast_to(crcs.reshape(-1, 1, 4), fields.shape).ravel()])
        here = places < end
        np.frombuffer(content, np.uint8)[places[here] - start] = values[here]
        self._due = places[~here], values[~here]

    def _add(self, content: memoryview, start: int, position: int, stop: int) -> None:
        """Add the bytes around large payloads to the checksum of the file."""
        cuts = self.layout.cuts
        for cut in cuts[bisect_right(cuts, position) : bisect_right(cuts, stop)]:
            self._file_crc = self._crcs_at[cut] = crc32(
                content[position - start : cut - start], self._file_crc
            )
            position = cut
        self._file_crc = crc32(content[position - start : stop - start], self._file_crc)

    def _add_part(self, place: int, part: memoryview, offset: int) -> int:
        """Add a part of a large payload, at `offset` of the file, to its checksums."""
        slot, crc = self.layout.slots[place], 0
        sums = [] if slot.index in self.layout.wrapped_indices else self._block_crcs
        for at in range(-((offset - slot.payload) % BLOCK_BYTES), len(part), BLOCK_BYTES):
            block = part[max(0, at) : at + BLOCK_BYTES]
            of_block = crc32(block)
            crc = combine_crc32(crc, of_block, len(block))
            if at < 0 and sums:
                sums[-1] = combine_crc32(sums[-1], of_block, len(block))
            else:
                sums.append(of_block)
        self.chunk_crcs[place] = combine_crc32(self.chunk_crcs[place], crc, len(part))
        return crc

    def file_entry(self, path: str) -> FileEntry:
        """Return the file's entry in the manifest; valid after `pieces` has ended."""
        return FileEntry(path=path, size_bytes=self.layout.size_bytes, checksum=crc32_text(self._file_crc))

    def table_entry(self, path: str) -> TableEntry:
        """Return the file's entry in the chunk table; valid after `pieces` has ended."""
        layout, crcs = self.layout, np.array(self.chunk_crcs, dtype="<u4")
        if layout.wrapped:
            crcs = crcs[layout.firsts]
            for place in layout.wrapped:  # of the whole archive
                start, end = layout.spans[place].tolist()
                before = combine_crc32(self._crcs_at[start], 0, end - start)
                crcs[place] = self._crcs_at[end] ^ before
        return TableEntry(
            path=path,
            size_bytes=layout.size_bytes,
            num_chunks=len(layout.firsts),
            columns=layout.columns,
            crcs=crcs.tobytes(),
            block_crcs=np.array(self._block_crcs, dtype="<u4").tobytes(),
            lengths=np.diff(layout.spans).tobytes(),
        )


def _views(memory: torch.Tensor, slots: Slots) -> Iterator[torch.Tensor]:
    typed: dict[torch.dtype, torch.Tensor] = {}
    for (_, dtype, shape), payload in zip(slots.specs, slots.payloads.tolist(), strict=True):
        if dtype not in typed:
            whole = len(memory) // dtype.itemsize * dtype.itemsize
            typed[dtype] = memory[:whole].view(dtype)
        own = typed[dtype]
        at = own.storage_offset() + payload // dtype.itemsize
        yield own.as_strided(shape, _strides(shape), at)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(map(partial(max, 1), shape[dim + 1 :])) for dim in range(len(shape)))


def spec_of(index: MetadataIndex, shard: torch.Tensor) -> ShardSpec:
    return index, shard.dtype, tuple(shard.shape)


def specs_of(index: MetadataIndex, shard: torch.Tensor) -> tuple[list[ShardSpec], bytes | None]:
    if not is_wrapped(shard):
        return [spec_of(index, shard)], None
    return [spec_of(index, inner) for _, inner in inner_tensors(shard)], wrapped_pickle(shard)
