"""The input of the engine: payloads, and ranges of them with their destinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

MAX_TAKE_BYTES: Final = 32 << 20
"""Longest range that `take` can get; longer ones are read directly into place, or taken in parts."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The raw bytes of one tensor chunk in a data file.

    Attributes:
        path: POSIX-relative to the checkpoint directory.
        key: DCP's flattened name, for errors.
        offset: position of the first byte in the file.
        size_bytes: its length.
        crc32: CRC-32 of the whole payload; None if it cannot be verified as a whole.
        block_bytes: size of the blocks with a checksum each; the last may be shorter.
        block_crcs: CRC-32s of the blocks, so that a part can be verified; empty if there are none.

    Raises:
        ValueError: the number of checksums differs from the number of blocks.
    """

    path: str
    key: str
    offset: int
    size_bytes: int
    crc32: int | None
    block_bytes: int = 1 << 20
    block_crcs: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.block_crcs and len(self.block_crcs) != -(-self.size_bytes // self.block_bytes):
            raise ValueError(
                f"{self.path}: {self.key!r} has {len(self.block_crcs)} block checksums, which does not fit "
                f"{self.size_bytes} bytes in blocks of {self.block_bytes}"
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRead:
    """A range of a payload and its destination.

    Attributes:
        payload: the payload.
        start: first byte, counted from the start of the payload.
        stop: byte after the last, counted likewise.
        into: writable contiguous memory of exactly `stop - start` bytes, which is read into directly.
        take: without `into`, called with the bytes, on a reading thread, once for each `RangeRead`. The bytes
            are valid during the call only. At most `MAX_TAKE_BYTES`.

    A range that is only verified needs neither.

    Raises:
        ValueError: the range is not inside the payload, or `into` does not fit it.
    """

    payload: Payload
    start: int
    stop: int
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.payload.size_bytes:
            raise ValueError(
                f"bytes {self.start} to {self.stop} of {self.payload.key!r} are not inside its payload of "
                f"{self.payload.size_bytes} bytes"
            )
        into = self.into
        if into is not None and (into.readonly or not into.c_contiguous or into.nbytes != self.size_bytes):
            raise ValueError(
                f"the memory for bytes {self.start} to {self.stop} of {self.payload.key!r} must be writable, "
                f"contiguous and {self.size_bytes} bytes long; it has {into.nbytes}"
            )

    @property
    def size_bytes(self) -> int:
        """The length of the range."""
        return self.stop - self.start
