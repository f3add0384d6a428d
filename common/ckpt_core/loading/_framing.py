"""The bytes of data files around large payloads: headers, padding, small entries.

A load does not use them, but stock tools need them. A file's CRC-32 follows from theirs and from those of the
payloads, which the load verifies anyway; so almost nothing must be read to know that a file is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckpt_core.commit import share
from ckpt_core.errors import FileFailure
from ckpt_core.formats.checksums import combine_crc32, crc32, crc32_text, crc32_value
from ckpt_core.formats.chunks import FileChunks
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.names import data_rank
from ckpt_core.storage import ForeignFileError, RangeReader, Storage

_LARGE_BYTES: Final = 64 << 10  # reading it takes longer than combining checksums without it
_BUFFER_BYTES: Final = 4 << 20


def verify_framing(
    storage: Storage, files: CommittedFiles, *, rank: int, world_size: int
) -> list[FileFailure]:
    """Check this rank's share of data files for damage around large payloads.

    Raises:
        CorruptCheckpointError: a chunk table is damaged.
        OSError: storage failed.
    """
    if not (files.is_ours and storage.rereads_from_memory):
        return []
    found: list[FileFailure] = []
    data = [entry for entry in files.entries if data_rank(entry.path) is not None]
    for path in share(data, rank, world_size):
        chunks = files.table(data_rank(path) or 0).files.get(path)
        problem = _problem(storage, files, path, chunks)
        if problem:
            found.append(FileFailure(path=path, problem=problem, twin=files.twin(path) or ""))
    return files.without_mended(found)


def _problem(storage: Storage, files: CommittedFiles, path: str, chunks: FileChunks | None) -> str:
    if chunks is None or chunks.size_bytes != files.size(path):
        return "is not described by the chunk table of its rank"
    committed = crc32_value(files.checksum(path))
    if committed is None:
        return ""
    try:
        with storage.open_ranges(f"{files.directory}/{path}") as reader:
            found = _checksum(reader, chunks)
    except FileNotFoundError:
        return "missing"
    except (EOFError, ForeignFileError) as error:
        return str(error)
    if found == committed:
        return ""
    return (
        "the bytes around its tensors are not those that were committed: with them the checksum is "
        f"{crc32_text(found)}, {crc32_text(committed)} was committed"
    )


def _checksum(reader: RangeReader, chunks: FileChunks) -> int:
    """Compute the file's CRC-32, with those of large payloads from the table."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    running = position = 0

    def read_to(stop: int) -> int:
        crc = running
        for begin in range(position, stop, _BUFFER_BYTES):
            piece = buffer[: min(_BUFFER_BYTES, stop - begin)]
            reader.read_into(begin, piece)
            crc = crc32(piece, crc)
        return crc

    for start, size, of_payload in _large_payloads(chunks):
        running = combine_crc32(read_to(start), of_payload, size)
        position = start + size
    return read_to(chunks.size_bytes)


def _large_payloads(chunks: FileChunks) -> Iterator[tuple[int, int, int]]:
    columns = chunks.columns
    places = zip(columns.payload_offset, columns.payload_bytes, chunks.crcs, strict=True)
    for start, size, crc in places:
        if start is not None and size is not None and size > _LARGE_BYTES:
            yield start, size, crc
