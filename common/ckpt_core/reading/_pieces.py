"""What can be verified by itself: a block, a whole payload, or a step of one that is too large to hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpt_core.reading._buffers import REQUEST_BYTES
from ckpt_core.reading._types import Payload


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a payload.

    `crc32` is None in a step of a larger piece: only when all steps are read can they be compared.
    """

    payload: Payload
    start: int
    stop: int
    crc32: int | None

    @property
    def file_start(self) -> int:
        """Where it starts in the file."""
        return self.payload.offset + self.start

    @property
    def file_stop(self) -> int:
        """Where it ends in the file."""
        return self.payload.offset + self.stop

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells it from other pieces of the checkpoint."""
        return self.payload.path, self.payload.offset, self.start


def is_verifiable(payload: Payload) -> bool:
    """Whether there is any checksum to go by."""
    return payload.crc32 is not None or bool(payload.block_crcs)


def pieces_around(payload: Payload, ranges: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """The pieces with a checksum that some of the ranges touch, each once, in order."""
    if not payload.block_crcs:
        yield Piece(payload, 0, payload.size_bytes, payload.crc32)
        return
    size, end = payload.block_bytes, payload.size_bytes
    next_block = 0
    for start, stop in sorted(ranges):
        last = -(-stop // size)
        for block in range(max(next_block, start // size), last):
            yield Piece(payload, block * size, min((block + 1) * size, end), payload.block_crcs[block])
        next_block = max(next_block, last)


def steps_of(piece: Piece) -> Iterator[Piece]:
    """The piece itself, or what it is read by if it is larger than a request."""
    if piece.stop - piece.start <= REQUEST_BYTES:
        yield piece
        return
    for start in range(piece.start, piece.stop, REQUEST_BYTES):
        yield Piece(piece.payload, start, min(start + REQUEST_BYTES, piece.stop), None)
