"""Compressed copies of checkpoints: their content is the same, and so is their identity.

A first pass reads a checkpoint, verified, and compresses every frame to know sizes and checksums. They make
the manifest of the compressed checkpoint, which names that of the plain one. What copies from the view of it
compresses once more: so nothing is written but the copy, and an interrupted one is continued, because the
same bytes make the same frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckpt_core.commit import (
    MAX_SIGNATURE_BYTES,
    NEWEST_FORMAT,
    Manifest,
    Marker,
    plain_storage,
    read_entry,
    read_manifest,
)
from ckpt_core.crew import run_all
from ckpt_core.errors import ConfigError
from ckpt_core.formats.checksums import Checksum, checksum
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable, FileChunks
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.frames import (
    CODECS,
    RAW,
    ZSTD,
    Buffer,
    Frames,
    compress,
    descriptors_of,
    encode_plain,
    require_zstandard,
)
from ckpt_core.names import MANIFEST, MARKER, METADATA, PLAIN, SIGNATURE, chunks_name, data_rank
from ckpt_core.reading import CheckedReader, damaged
from ckpt_core.storage import FramedStorage, RangeReader, Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

if TYPE_CHECKING:
    from ckpt_core._torch_internals import StorageInfo

Choice: TypeAlias = Callable[[ChunkEntry, Sequence[memoryview]], int]
"""Returns the codec of an entry of a data file (`formats.frames.CODECS`), given up to three of its blocks.

It is called on several threads. For the same entry it should return the same: else an interrupted copy begins
again."""

_SMALL_BYTES: Final = 64 << 10  # what smaller entries save is less than their frames cost
_SHRINKS: Final = 0.97
_BATCH: Final = 16
_THREADS: Final = 4


def fixed(codec: str) -> Choice:
    """Return the choice of `zstd` or `planes` for every entry whose blocks become smaller."""

    def choose(entry: ChunkEntry, samples: Sequence[memoryview]) -> int:
        width = item_bytes(entry.dtype) if codec == "planes" and entry.dtype is not None else ZSTD
        chosen = width if width in CODECS else ZSTD
        stored = sum(len(compress(chosen, sample)) for sample in samples)
        return chosen if stored < _SHRINKS * sum(map(len, samples)) else RAW

    return choose


def compressed(
    source: Storage,
    name: str,
    choose: Choice,
    *,
    stop: Callable[[], None],
    sign: Callable[[bytes], bytes] | None = None,
) -> Storage:
    """Return a view of a root in which a checkpoint is compressed, to be copied from.

    Args:
        source: the root.
        name: of the checkpoint, plain or compressed in another way.
        choose: the codec of every entry.
        stop: called before every read; raises to end it.
        sign: signs the new manifest; needed if the checkpoint is signed.

    Returns:
        The view; of a checkpoint in which nothing becomes smaller, one in which it is plain.

    Raises:
        ConfigError: it is signed, and `sign` is None.
        CorruptCheckpointError: it is damaged.
        CheckpointNotFoundError: it is not committed.
        IncompatibleCheckpointError: zstandard is not installed.
    """
    require_zstandard()
    source = plain_storage(source, name)
    manifest = Manifest.from_bytes(read_manifest(source, name))
    if sign is None and source.exists(f"{name}/{SIGNATURE}"):
        raise ConfigError(
            f"{source.url}/{name} is signed, and a compressed copy has a manifest of its own, which is not: "
            "nothing was written; copy it as it is, or compress where it can be signed (sign_manifest=)"
        )
    entries = {entry.path: entry for entry in manifest.originals}
    tables: dict[str, FileChunks] = {}
    for rank in sorted({rank for path in entries if (rank := data_rank(path)) is not None}):
        table = chunks_name(rank)
        if table in entries:
            content = read_entry(source, name, entries[table])
            tables |= ChunkTable.from_bytes(content, source=f"{source.url}/{name}/{table}").files
    found: dict[str, tuple[FileEntry, Frames]] = {}

    def work(path: str) -> None:
        found[path] = compress_file(
            source, name, entries[path], chunks=tables[path], choose=choose, stop=stop
        )

    run_all(work, [path for path in entries if path in tables], _THREADS, name="ckpt-compress")
    return compressed_view(source, name, found, sign=sign)


def compress_file(
    source: Storage,
    name: str,
    entry: FileEntry,
    *,
    chunks: FileChunks,
    choose: Choice,
    stop: Callable[[], None],
) -> tuple[FileEntry, Frames]:
    """Compress a plain data file, verified; return its entry when compressed, and its frames.

    Errors as by `compressed`.
    """
    place, stored, running = f"{source.url}/{name}", list[int](), Checksum.like(entry.checksum)
    with source.open_ranges(f"{name}/{entry.path}") as ranges:
        reader = CheckedReader(ranges, entry, place=place, path=entry.path, stop=stop)
        if chunks.size_bytes != entry.size_bytes:
            raise damaged(place, entry.path, "has another size in the chunk table of its rank")
        frames = list(_cut(ranges, chunks, choose, f"{place}/{entry.path}"))
        start = 0
        for first in range(0, len(frames), _BATCH):
            batch = frames[first : first + _BATCH]
            content = memoryview(bytearray(sum(size for _, size in batch)))
            reader.read(start, content)
            for each in _each_compressed(batch, content):
                running.update(each)
                stored.append(len(each))
            start += len(content)
        reader.finish()
    made = Frames([codec for codec, _ in frames], [size for _, size in frames], stored)
    return replace(entry, size_bytes=made.stored_starts[-1], checksum=str(running)), made


def _each_compressed(frames: Sequence[tuple[int, int]], content: memoryview) -> Sequence[Buffer]:
    """Compress neighbouring frames, each given by codec and size, on several threads."""
    found: list[Buffer] = [b""] * len(frames)
    parts: list[memoryview] = []
    for _, size in frames:
        parts.append(content[:size])
        content = content[size:]

    def work(at: int) -> None:
        found[at] = compress(frames[at][0], parts[at])

    run_all(work, range(len(frames)), _THREADS, name="ckpt-compress")
    return found


def _cut(ranges: RangeReader, chunks: FileChunks, choose: Choice, place: str) -> Iterator[tuple[int, int]]:
    """Yield codec and size of the frames of a file: entries that shrink, and what is between."""
    position = 0
    for chunk in sorted(chunks, key=attrgetter("offset")):
        end = chunk.offset + chunk.size_bytes
        if chunk.size_bytes < _SMALL_BYTES:
            continue
        if chunk.offset < position:
            raise damaged(place, chunk.key, "overlaps the entry before it")
        first, size = chunk.payload_offset, chunk.payload_bytes
        start, stop = (chunk.offset, end) if first is None or size is None else (first, first + size)
        codec = choose(chunk, _samples(ranges, start, stop))
        if codec != RAW:
            yield from _blocks(RAW, position, chunk.offset)
            yield from _blocks(ZSTD, chunk.offset, start)
            yield from _blocks(codec, start, stop)
            yield from _blocks(ZSTD, stop, end)
            position = end
    yield from _blocks(RAW, position, chunks.size_bytes)


def _blocks(codec: int, start: int, stop: int) -> Iterable[tuple[int, int]]:
    return ((codec, min(BLOCK_BYTES, stop - at)) for at in range(start, stop, BLOCK_BYTES))


def _samples(ranges: RangeReader, start: int, stop: int) -> Sequence[memoryview]:
    """Read the first, the middle and the last block."""
    last = max(0, (stop - start - 1) // BLOCK_BYTES)
    samples: list[memoryview] = []
    for block in sorted({0, last // 2, last}):
        begin = start + block * BLOCK_BYTES
        samples.append(memoryview(bytearray(min(BLOCK_BYTES, stop - begin))))
        ranges.read_into(begin, samples[-1])
    return samples


def compressed_view(
    source: Storage,
    name: str,
    files: Mapping[str, tuple[FileEntry, Frames]],
    *,
    sign: Callable[[bytes], bytes] | None = None,
) -> Storage:
    """Return the view of a plain checkpoint in which these data files are compressed.

    Args:
        source: the root, in which it is plain.
        name: of the checkpoint.
        files: path -> what `compress_file` returned.
        sign: as in `compressed`.
    """
    frames = {path: each for path, (_, each) in files.items() if any(each.codec)}
    if not frames:
        return source
    content = read_manifest(source, name)
    plain = Manifest.from_bytes(content)
    entries = {entry.path: entry for entry in plain.originals}
    entries |= {path: files[path][0] for path in frames}
    before: dict[str, bytes] = {}
    small: dict[str, bytes] = {}
    for path in [path for path in entries if path.rpartition("/")[2] == METADATA]:
        before[path] = read_entry(source, name, entries[path])
        small[path] = _metadata(before[path], f"{source.url}/{name}", path, frames)
    if source.exists(f"{name}/{SIGNATURE}"):
        before[SIGNATURE] = read_small(source, f"{name}/{SIGNATURE}", MAX_SIGNATURE_BYTES)
    small[PLAIN] = encode_plain(content, before, frames)
    algorithm = next(iter(files.values()))[0].checksum.partition(":")[0]
    for path, each in small.items():
        entries[path] = FileEntry(path=path, size_bytes=len(each), checksum=checksum(each, algorithm))
    made = replace(
        plain,
        files=tuple(entries.values()),
        replicas=1,
        groups=(),
        plain_sha256=hashlib.sha256(content).hexdigest(),
        format_version=NEWEST_FORMAT,
    )
    content = made.to_bytes()
    first = {MARKER: Marker.of(made, content).to_bytes(), MANIFEST: content}
    signed = {} if sign is None else {SIGNATURE: sign(content)}
    return FramedStorage(source, name, small={**first, **small, **signed}, files=frames, compresses=True)


def _metadata(content: bytes, place: str, path: str, files: Mapping[str, Frames]) -> bytes:
    """Return DCP's metadata with the places of what is stored."""
    from ckpt_core.dcp import encode_metadata, load_metadata

    metadata, part = load_metadata(content, f"{place}/{path}"), path.removesuffix(METADATA)
    places: dict[Any, StorageInfo] = {}
    for index, info in (metadata.storage_data or {}).items():
        frames = files.get(part + info.relative_path)
        if frames is not None:
            try:
                start, stop, codec = frames.stored_range(info.offset, info.offset + info.length)
            except ValueError as error:
                raise damaged(place, path, f"{index.fqn!r:.200}: {error}") from error
            info = replace(  # noqa: PLW2901 - the same entry, elsewhere
                info, offset=start, length=stop - start, transform_descriptors=descriptors_of(codec)
            )
        places[index] = info
    return encode_metadata(metadata, places)
