"""What is wanted of a checkpoint's data files: payloads, ranges of them, and where these go."""

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
        size_bytes: how many bytes there are.
        crc32: of all of it; None if it cannot be verified.
        block_bytes: the size of the blocks of `block_crcs`, in bytes.
        block_crcs: as `ChunkEntry.block_crcs`.
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
        payload: of which it is a range.
        start: in the payload, in bytes.
        stop: likewise, exclusive.
        into: writable, exactly `stop - start` bytes: read straight there.
        take: else called with the bytes, which are valid during the call only; from a reading thread, never
            twice at once for one `Wanted`.
    """

    payload: Payload
    start: int
    stop: int
    into: memoryview | None = None
    take: Callable[[memoryview], None] | None = None
