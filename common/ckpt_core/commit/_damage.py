"""Which tensors a damaged data file has lost, by the chunk table of the rank that wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Final

from ckpt_core.checksums import checksum, crc32, crc32_value
from ckpt_core.chunks import ChunkTable, FileChunks
from ckpt_core.commit._manifest import Manifest
from ckpt_core.errors import CheckpointError
from ckpt_core.names import chunks_name, data_rank
from ckpt_core.storage import Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

_MOST_NAMED: Final = 8
_READ_BYTES: Final = 8 << 20


def damage_in(storage: Storage, name: str, manifest: Manifest, entry: FileEntry) -> str:
    """What is damaged in a file whose checksum is wrong, in words; "" if that cannot be told.

    Raises:
        OSError: storage is unwell.
    """
    chunks = _chunks(storage, name, manifest, entry)
    if chunks is None:
        return ""
    with storage.open(f"{name}/{entry.path}") as stream:
        damaged = [found for chunk in chunks if (found := _damaged_range(stream, chunk)) is not None]
    if not damaged and crc32_value(entry.checksum) is None:
        return "; every value in it has its CRC-32, so the damage lies between them, or was made on purpose"
    if not damaged:
        return "; every value in it is intact, the damage lies between them"
    named = [f"{key} (bytes {start} to {end})" for key, start, end in damaged[:_MOST_NAMED]]
    more = len(damaged) - len(named)
    return "; damaged: " + ", ".join(named) + (f" and {more} more" if more else "")


def _chunks(storage: Storage, name: str, manifest: Manifest, entry: FileEntry) -> FileChunks | None:
    """What the chunk table says of the file; None if there is no table, or it is not what was committed."""
    rank = data_rank(entry.path)
    path = None if rank is None else chunks_name(rank)
    table = next((each for each in manifest.files if each.path == path), None)
    if table is None:
        return None
    try:
        content = read_small(storage, f"{name}/{table.path}")
        if checksum(content, table.checksum.partition(":")[0]) != table.checksum:
            return None
        chunks = ChunkTable.from_bytes(content, source=table.path).files.get(entry.path)
    except (FileNotFoundError, CheckpointError, ValueError):
        return None
    return None if chunks is None or chunks.size_bytes != entry.size_bytes else chunks


def _damaged_range(stream: IO[bytes], chunk: ChunkEntry) -> tuple[str, int, int] | None:
    """The key of the chunk, and from where to where in the file it is damaged as far as checksums tell."""
    start, size = chunk.offset, chunk.size_bytes
    if chunk.payload_offset is not None and chunk.payload_bytes is not None:
        start, size = chunk.payload_offset, chunk.payload_bytes
    stream.seek(start)
    if not chunk.block_crcs:
        return None if _crc(stream, size) == chunk.crc32 else (chunk.key, start, start + size)
    wrong = [
        place
        for place, expected in enumerate(chunk.block_crcs)
        if _crc(stream, min(chunk.block_bytes, size - place * chunk.block_bytes)) != expected
    ]
    if not wrong:
        return None
    end = min(size, (wrong[-1] + 1) * chunk.block_bytes)
    return chunk.key, start + wrong[0] * chunk.block_bytes, start + end


def _crc(stream: IO[bytes], size: int) -> int:
    running = 0
    for block in _blocks(stream, size):
        running = crc32(block, running)
    return running


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (block := stream.read(min(size, _READ_BYTES))):
        size -= len(block)
        yield block
