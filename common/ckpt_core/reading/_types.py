"""What is to be read: where raw bytes lie, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The raw bytes of one tensor chunk in a data file.

    Attributes:
        path: POSIX-relative to the checkpoint directory.
        key: DCP's flattened name, for errors.
        offset: where the first byte lies in the file.
        size_bytes: how many there are.
        crc32: of all of them; None if they cannot be verified.
        block_bytes: what `block_crcs` are of.
        block_crcs: as in `ChunkEntry`.
    """

    path: str
    key: str
    offset: int
    size_bytes: int
    crc32: int | None
    block_bytes: int = 1 << 20
    block_crcs: Sequence[int] = ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A range of a payload and where it goes.

    Attributes:
        payload: what it is a range of.
        start: its first byte in the payload.
        stop: the byte after its last.
        into: writable, exactly `stop - start` bytes: read straight there.
        take: else called with the bytes, which are valid during the call only; on a reading thread, never
            twice at once for one range.
    """

    payload: Payload
    start: int
    stop: int
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None
