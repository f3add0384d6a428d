"""The image of a data file, laid out before any shard is copied.

The layout is a pure function of the shards' keys, dtypes and shapes; it is computed once and used by every
save until one of those changes. A save then copies each shard into its slot, fills in the CRC-32 fields, and
passes the image to storage in large aligned pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core._torch_internals import inner_tensors, is_wrapped
from ckpt_core.dcp._torch_zip import ZIP32_LIMIT, build_archive, build_legacy, tensor_pickle
from ckpt_core.dcp._wrapped_tensors import wrapped_pickle
from ckpt_core.formats.checksums import combine_crc32, crc32, crc32_text
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkColumns, TableEntry
from ckpt_core.storage import ALIGNMENT
from ckpt_core.types import FileEntry

PIECE_BYTES = 16 << 20
_SMALL_BYTES: Final = BLOCK_BYTES
"""Payloads from this size on are worth a zip, and padding to a page."""
_ALIGNMENT_OF_SMALL: Final = 64
"""Of the payloads of small wrapped shards; that of torch's own zips."""

ShardSpec = tuple[MetadataIndex, torch.dtype, tuple[int, ...]]
"""Index, dtype and shape of a shard, or of one of the tensors that a wrapped shard is made of."""

Spans: TypeAlias = npt.NDArray[np.int64]


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
class ImageLayout:
    """The slots of all shards of one data file, and the bytes around them.

    Args:
        records: `wrapped_pickle` of the shards that are wrapped; their payloads follow one another.
        zip64_from: the smallest payload size that uses the 64-bit fields of zip.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        records: Mapping[MetadataIndex, bytes] = MappingProxyType({}),
        *,
        zip64_from: int = ZIP32_LIMIT,
    ) -> None:
        self._zip64_from, self.piece_bytes = zip64_from, PIECE_BYTES
        self._frames: list[tuple[int, bytes]] = []
        slots: list[Slot] = []
        self.firsts: list[int] = []
        self.size_bytes = place = 0
        while place < len(specs):
            index = specs[place][0]
            record = records.get(index)
            end = place + 1
            while record is not None and end < len(specs) and specs[end][0] == index:
                end += 1
            self.firsts.append(place)
            slots += self._place(specs[place:end], record)
            place = end
        self.slots = tuple(slots)
        self.wrapped_indices = frozenset(records)

    def _place(self, specs: Sequence[ShardSpec], record: bytes | None) -> Iterator[Slot]:
        """Append the entry of one shard; yield the slots of its payloads."""
        start = self.size_bytes
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs]
        _, dtype, shape = specs[0]
        if record is None and sizes[0] < _SMALL_BYTES:
            archive = build_legacy(dtype, shape, offset=start)
        else:
            archive = build_archive(
                record or tensor_pickle(dtype, shape),
                [(size, 0) for size in sizes],
                offset=start,
                zip64_from=self._zip64_from,
                alignment=_ALIGNMENT_OF_SMALL if max(sizes) < _SMALL_BYTES else ALIGNMENT,
                streamed=True,
            )
        self.size_bytes = start + archive.size_bytes
        at = start
        for place, ((index, dtype, shape), size) in enumerate(zip(specs, sizes, strict=True)):
            frame = archive.frames[place]
            self._frames.append((at, frame))
            payload = at + len(frame)
            last = place + 1 == len(specs)
            yield Slot(
                index=index,
                dtype=dtype,
                shape=shape,
                start=at,
                payload=payload,
                payload_bytes=size,
                end=self.size_bytes if last else payload + size,
                crc_fields=(start + archive.crc_fields[place][0], start + archive.crc_fields[place][1]),
            )
            at = payload + size
        self._frames.append((at, archive.frames[-1]))

    def frame(self, memory: memoryview, start: int = 0) -> None:
        """Write the bytes around the payloads, without the CRC-32 fields.

        `memory` is that of the file from `start` on.
        """
        first = max(0, bisect_right(self._frames, start, key=itemgetter(0)) - 1)
        for offset, content in self._frames[first:]:
            at = offset - start
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
            begin, stop = self.payloads[place]
            small = place >= first and stop - begin <= BLOCK_BYTES
            if (from_ := max(begin, start)) < (to := stop if small else min(stop, end)):
                yield place, from_ - begin, to - begin, from_ - start

    @cached_property
    def spans(self) -> Spans:
        """Start and end in the file of every shard's archive, int64 [shards, 2]."""
        starts = np.array([self.slots[first].start for first in self.firsts], dtype=np.int64)
        return np.stack([starts, np.append(starts, self.size_bytes)[1:]], axis=1)

    @cached_property
    def crc_places(self) -> Spans:
        """Offsets of the bytes of every slot's two CRC-32 fields, int64 [slots, 2, 4]."""
        fields = np.array([slot.crc_fields for slot in self.slots], dtype=np.int64).reshape(-1, 2, 1)
        return fields + np.arange(4)

    @cached_property
    def payloads(self) -> list[tuple[int, int]]:
        """Start and end in the file of every slot's payload."""
        return [(slot.payload, slot.payload + slot.payload_bytes) for slot in self.slots]

    @cached_property
    def large(self) -> list[int]:
        """The slots whose payload is larger than a block, in order."""
        return [place for place, slot in enumerate(self.slots) if slot.payload_bytes > BLOCK_BYTES]

    @cached_property
    def batches(self) -> list[tuple[int, int, int]]:
        """For every piece of the file: its end, and its first and last (exclusive) slot."""
        starts = [slot.start for slot in self.slots]
        ends = (
            [*range(self.piece_bytes, self.size_bytes, self.piece_bytes), self.size_bytes] if starts else []
        )
        cuts = [0, *(bisect_left(starts, end) for end in ends)]
        return list(zip(ends, cuts[:-1], cuts[1:], strict=True))

    @cached_property
    def columns(self) -> bytes:
        """The shards as columns of a chunk table; a wrapped one has several payloads."""
        slots = [self.slots[first] for first in self.firsts]
        plain = [slot.index not in self.wrapped_indices for slot in slots]
        pairs = list(zip(slots, plain, strict=True))
        offsets = [slot.index.offset for slot in slots]
        return ChunkColumns(
            key=[slot.index.fqn for slot in slots],
            shard_offsets=[None if offset is None else list(offset) for offset in offsets],
            offset=[start for start, _ in self.spans.tolist()],
            size_bytes=[end - start for start, end in self.spans.tolist()],
            payload_offset=[slot.payload if one else None for slot, one in pairs],
            payload_bytes=[slot.payload_bytes if one else None for slot, one in pairs],
            dtype=[str(slot.dtype).removeprefix("torch.") if one else None for slot, one in pairs],
        ).encode()

    @cached_property
    def cuts(self) -> list[int]:
        """Where wrapped shards begin and end in the file, in order."""
        return sorted({cut for place in self.wrapped for cut in self.spans[place].tolist()})

    @cached_property
    def window_bytes(self) -> int:
        """Whole pages that hold a piece, and the small entry that may begin at its end."""
        small = (slot for slot in self.slots if slot.payload_bytes <= BLOCK_BYTES)
        longest = max((slot.payload + slot.payload_bytes - slot.start for slot in small), default=0)
        return self.piece_bytes + -(-longest // ALIGNMENT) * ALIGNMENT

    @cached_property
    def wrapped(self) -> list[int]:
        """The positions of the wrapped shards among all shards."""
        return [
            place
            for place, first in enumerate(self.firsts)
            if self.slots[first].index in self.wrapped_indices
        ]


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
            self.targets = tuple(
                memory[slot.payload : slot.payload + slot.payload_bytes].view(slot.dtype).view(slot.shape)
                for slot in layout.slots
            )
        self._begin()

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
            sums[done:place] = [crc32(content[a - start : b - start]) for a, b in layout.payloads[done:place]]
            done = max(done, place + 1)
            if place < begun.stop:
                begin, stop = (min(max(each, start), end) for each in layout.payloads[place])
                parts.append(
                    (begin, stop, self._add_part(place, content[begin - start : stop - start], begin))
                )
                known += [place] * (begin < stop == layout.payloads[place][1])
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


def spec_of(index: MetadataIndex, shard: torch.Tensor) -> ShardSpec:
    """Return index, dtype and shape of a shard."""
    return index, shard.dtype, tuple(shard.shape)


def specs_of(index: MetadataIndex, shard: torch.Tensor) -> tuple[list[ShardSpec], bytes | None]:
    """Return the payloads of a shard, and the record of it if it is wrapped."""
    if not is_wrapped(shard):
        return [spec_of(index, shard)], None
    return [spec_of(index, inner) for _, inner in inner_tensors(shard)], wrapped_pickle(shard)
