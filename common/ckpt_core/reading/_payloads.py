"""What is asked of the engine: payloads, and the ranges of them that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

MAX_TAKE_BYTES: Final = 32 << 20
"""Longest range that can be taken at once; longer ones are read straight into place, or taken in parts."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The raw bytes of one tensor chunk in a data file.

    Attributes:
        path: of the file, POSIX-relative to the checkpoint directory.
        key: DCP's flattened name, for errors.
        offset: where the first byte lies in the file.
        size_bytes: of the payload.
        crc32: CRC-32 of all of it; None if it cannot be verified as a whole.
        block_bytes: size of the blocks that have a checksum each; the last may be shorter.
        block_crcs: CRC-32s of the blocks, so that a part can be verified; empty if there are none.

    Raises:
        ValueError: there is not one checksum for each block.
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
    """A range of a payload and where it goes.

    Attributes:
        payload: what the range is part of.
        start: first byte, counted from the start of the payload.
        stop: byte after the last, likewise.
        into: writable contiguous memory of exactly `stop - start` bytes; the bytes are read straight there.
        take: where there is no `into`, called with the bytes. They are valid during the call only, which is
            made on a reading thread, once for each `RangeRead`. At most `MAX_TAKE_BYTES`.

    What is only to be verified needs neither.

    Raises:
        ValueError: the range does not lie in the payload, or `into` does not fit it.
    """

    payload: Payload
    start: int
    stop: int
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.payload.size_bytes:
            raise ValueError(
                f"bytes {self.start} to {self.stop} of {self.payload.key!r} do not lie in its payload of "
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
        """Length of the range."""
        return self.stop - self.start
