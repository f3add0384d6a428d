"""Reads of one file of a checkpoint, compared with what was committed.

A copy must not complete a file whose bytes are wrong: a later copy would find it and take it for whole. So
the last read of a file raises if its checksum is wrong. Reads may come in any order, on several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, final

from ckpt_core.errors import damaged, unreadable
from ckpt_core.formats.checksums import Checksum, combine_crc32, crc32, crc32_text, crc32_value
from ckpt_core.storage import RangeReader
from ckpt_core.types import FileEntry

_BLOCK_BYTES: Final = 4 << 20


@final
class CheckedReader:
    """Ranges of a file, which fail unless all of them together are what was committed.

    Concurrency: `read` may be called from several threads.

    Args:
        path: the file that is read: that of `entry`, or its twin.
        stop: called before every read; raises to end the copy.
    """

    def __init__(
        self, ranges: RangeReader, entry: FileEntry, *, place: str, path: str, stop: Callable[[], None]
    ) -> None:
        self._ranges = ranges
        self._entry = entry
        self._place = place
        self._path = path
        self._stop = stop
        self._guard = threading.Lock()
        self._spans: dict[int, tuple[int, int]] = {}  # offset -> size, CRC-32
        self._covered = 0
        self._whole = False
        self._in_order: tuple[int, Checksum] | None = self._running()
        if ranges.size_bytes != entry.size_bytes:
            self._refuse(f"has {ranges.size_bytes} bytes, {entry.size_bytes} were committed")
        if not entry.size_bytes:
            self._compare()

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from `offset` on.

        Raises:
            CorruptCheckpointError: the file is not the one that was committed; seen at the last range, or
                where the device lost a block.
            OSError: storage failed.
        """
        self._stop()
        self._fill(offset, buffer)
        if self._note(offset, buffer):
            self._compare()

    def finish(self) -> None:
        """Compare what was not read, unless nothing was: then the target had the file.

        Raises the same errors.
        """
        if self._spans and not self._whole:
            self._compare_by_pass()

    def _fill(self, offset: int, buffer: memoryview) -> None:
        try:
            self._ranges.read_into(offset, buffer)
        except EOFError as error:
            self._refuse(f"ends too early: {error}")
        except OSError as error:
            self._refuse(unreadable(error))

    def _note(self, offset: int, buffer: memoryview) -> bool:
        """Record a range; return whether this was the last one."""
        span = (len(buffer), crc32(buffer))
        with self._guard:
            known = self._spans.get(offset)
            if known == span:
                return False  # again, after a failed request
            if known is not None:
                self._spans, self._covered, self._whole = {}, 0, False
                self._in_order = self._running()
            self._spans[offset] = span
            self._covered += len(buffer)
            if self._in_order is not None and self._in_order[0] == offset:
                self._in_order[1].update(buffer)
                self._in_order = (offset + len(buffer), self._in_order[1])
            return self._covered == self._entry.size_bytes

    def _running(self) -> tuple[int, Checksum] | None:
        """Return the checksum of what is read in order; None where CRC-32s can be joined."""
        if crc32_value(self._entry.checksum) is not None:
            return None
        try:
            return 0, Checksum.like(self._entry.checksum)
        except ValueError as error:
            self._refuse(f"cannot be verified: {error}")

    def _compare(self) -> None:
        if self._in_order is not None and self._in_order[0] == self._entry.size_bytes:
            self._accept(str(self._in_order[1]))
        elif self._in_order is not None or not self._is_tiled():
            self._compare_by_pass()
        else:
            joined = 0
            for _, (size, crc) in sorted(self._spans.items()):
                joined = combine_crc32(joined, crc, size)
            self._accept(crc32_text(joined))

    def _is_tiled(self) -> bool:
        end = 0
        for offset, (size, _) in sorted(self._spans.items()):
            if offset != end:
                return False
            end = offset + size
        return end == self._entry.size_bytes

    def _accept(self, found: str) -> None:
        if found != self._entry.checksum:
            self._refuse(f"checksum is {found}, {self._entry.checksum} was committed")
        self._whole = True

    def _compare_by_pass(self) -> None:
        """Read the file from its beginning to its end, and compare what was read before."""
        whole = Checksum.like(self._entry.checksum)
        for offset, size, expected in self._spans_and_gaps():
            running, buffer = 0, memoryview(bytearray(min(size, _BLOCK_BYTES)))
            for at in range(0, size, _BLOCK_BYTES):
                block = buffer[: size - at]
                self._stop()
                self._fill(offset + at, block)
                whole.update(block)
                running = crc32(block, running)
            if expected not in {None, running}:
                self._refuse(f"changed while it was copied, between bytes {offset} and {offset + size}")
        self._accept(str(whole))

    def _spans_and_gaps(self) -> Iterator[tuple[int, int, int | None]]:
        end = 0
        for offset, (size, crc) in sorted(self._spans.items()):
            if offset < end:
                continue  # what overlaps is compared by its content only
            if offset > end:
                yield end, offset - end, None
            yield offset, size, crc
            end = offset + size
        if end < self._entry.size_bytes:
            yield end, self._entry.size_bytes - end, None

    def _refuse(self, problem: str) -> NoReturn:
        raise damaged(self._place, self._path, problem)
