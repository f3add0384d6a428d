"""Compressed copies of checkpoints, which are the same checkpoints.

A data file is read, verified, compressed frame by frame, and sent, in one pass. When all are there, their
frames make the manifest of the compressed checkpoint, which names that of the plain one. What was chosen lies
beside the files from the begin of the copy on: so an interrupted one is continued, because the same bytes
make the same frames.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from ckpt_core.commit import NEWEST_FORMAT, Manifest, read_entry
from ckpt_core.crew import cpus, run_all
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, damaged
from ckpt_core.formats.checksums import Checksum, checksum, crc32
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable, FileChunks
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.frames import (
    CODECS,
    RAW,
    ZSTD,
    Frames,
    PlainFiles,
    batch_frames,
    compress,
    compress_all,
    descriptors_of,
    encode_plain,
)
from ckpt_core.names import MANIFEST, METADATA, PLAIN, chunks_name, data_rank, probe_name
from ckpt_core.reading import CheckedReader
from ckpt_core.storage import RangeReader, Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

if TYPE_CHECKING:
    from ckpt_core._torch_internals import StorageInfo

Choices: TypeAlias = Mapping[str, str]
"""Class of tensors -> codec; that of "" is for all others. Nothing is compressed if it is empty."""

Rows: TypeAlias = Mapping[str, Sequence[Any]]
"""Of compressed files, as plain values: path -> size, checksum, and the columns of the frames."""

_SMALL_BYTES: Final = 64 << 10  # what smaller entries save is less than their frames cost
_SAMPLE_BYTES: Final = 64 << 10
_SAMPLED: Final = 16
_LOOKS: Final = 0.01  # of what compressing a class could save; less shows little but the noise of the clock
_SHRINKS: Final = 0.97
_AT_ONCE: Final = 16
_THREADS: Final = 4
_PROBE_BYTES: Final = 4 << 20
_ANOTHER: Final[Choices] = {"": "another"}
"""What is chosen for no copy."""


def begun_choices(target: Storage, working: str, content: bytes) -> Choices | None:
    """Return what was chosen for a copy that was begun; None if none was.

    `content` is the manifest of the plain checkpoint.
    """
    made, plain = (_small(target, f"{working}/{name}") for name in (MANIFEST, PLAIN))
    ours = made is None and target.supports_rename  # its name is that of the save
    if made is not None:
        with suppress(CheckpointError):
            sha = hashlib.sha256(content).hexdigest()
            ours = made == content or Manifest.from_bytes(made).plain_sha256 == sha
    if not ours:
        return _ANOTHER if target.supports_rename else None
    if plain is None:
        return None if made is None else {}
    try:
        return PlainFiles.from_bytes(plain, source=PLAIN).choices
    except CheckpointError:
        return _ANOTHER


def _small(storage: Storage, key: str) -> bytes | None:
    with suppress(FileNotFoundError, NotADirectoryError, CorruptCheckpointError):
        return read_small(storage, key)
    return None


def codec_for(choices: Choices, entry: ChunkEntry, samples: Sequence[memoryview]) -> int:
    """Return the codec of an entry of a data file: none if samples hardly shrink."""
    choice = choices.get(_class_of(entry), choices.get("", NONE))
    if choice == NONE:
        return RAW
    codec = _number(choice, entry)
    stored = sum(len(compress(codec, sample)) for sample in samples)
    return codec if stored < _SHRINKS * sum(map(len, samples)) else RAW


def _number(codec: str, entry: ChunkEntry) -> int:
    width = item_bytes(entry.dtype) if codec == "planes" and entry.dtype is not None else ZSTD
    return width if width in CODECS else ZSTD


def chunk_tables(source: Storage, name: str, entries: Iterable[FileEntry]) -> dict[str, FileChunks]:
    """Read the chunk tables of data files: path -> chunks.

    Raises:
        CorruptCheckpointError: one is damaged.
    """
    found, tables = {entry.path: entry for entry in entries}, dict[str, FileChunks]()
    for rank in sorted({rank for path in found if (rank := data_rank(path)) is not None}):
        table = chunks_name(rank)
        if table in found:
            content = read_entry(source, name, found[table])
            tables |= ChunkTable.from_bytes(content, source=f"{source.url}/{name}/{table}").files
    return {path: chunks for path, chunks in tables.items() if path in found}


def cut(ranges: RangeReader, chunks: FileChunks, choices: Choices, place: str) -> list[tuple[int, int]]:
    """Return codec and size of the frames of a data file, in file order.

    Raises:
        CorruptCheckpointError: its chunk table is not of this file; `place` names the checkpoint.
    """
    found, position = list[tuple[int, int]](), 0
    if chunks.size_bytes != ranges.size_bytes:
        raise damaged(place, chunks.path, "has another size in the chunk table of its rank")
    for chunk in sorted(chunks, key=attrgetter("offset")):
        end = chunk.offset + chunk.size_bytes
        if chunk.size_bytes < _SMALL_BYTES:
            continue
        if chunk.offset < position:
            raise damaged(place, chunks.path, f"{chunk.key!r:.200} overlaps the entry before it")
        start, stop = _payload(chunk)
        codec = codec_for(choices, chunk, _samples(ranges, start, stop))
        if codec != RAW:
            found += _blocks(RAW, position, chunk.offset)
            found += _blocks(ZSTD, chunk.offset, start)
            found += _blocks(codec, start, stop)
            found += _blocks(ZSTD, stop, end)
            position = end
    found += _blocks(RAW, position, chunks.size_bytes)
    return found


def compressed(
    reader: CheckedReader,
    frames: Sequence[tuple[int, int]],
    row: list[Any],
    *,
    running: Checksum,
    progress: Callable[[int], None],
) -> Iterator[memoryview]:
    """Yield the frames of a plain data file, from `cut`, compressed, and compare it.

    Nothing has gone through the `running` checksum yet. Once all are taken, `row` is that of `Rows`.

    Raises:
        CorruptCheckpointError: the file is damaged.
    """
    stored, start, at_once = list[int](), 0, batch_frames()
    for first in range(0, len(frames), at_once):
        batch = frames[first : first + at_once]
        content = memoryview(bytearray(sum(size for _, size in batch)))
        reader.read(start, content)
        start += len(content)
        blocks = list[memoryview]()
        for _, size in batch:
            blocks.append(content[:size])
            content = content[size:]
        made = compress_all([codec for codec, _ in batch], blocks)
        stored += map(len, made)
        # Large pieces: the next frames are made in the time that a limit of the rate gives to one piece.
        for at in range(0, len(made), _AT_ONCE):
            piece = memoryview(b"".join(made[at : at + _AT_ONCE]))
            running.update(piece)
            yield piece
        progress(sum(size for _, size in batch))
    reader.finish()
    codecs, sizes = zip(*frames, strict=True) if frames else ((), ())
    row[:] = [sum(stored), str(running), list(codecs), list(sizes), stored]


def _payload(chunk: ChunkEntry) -> tuple[int, int]:
    """Return where the bytes of a tensor are; of another entry, all of it."""
    first, size = chunk.payload_offset, chunk.payload_bytes
    whole = chunk.offset, chunk.offset + chunk.size_bytes
    return whole if first is None or size is None else (first, first + size)


def _blocks(codec: int, start: int, stop: int) -> Iterable[tuple[int, int]]:
    return ((codec, min(BLOCK_BYTES, stop - at)) for at in range(start, stop, BLOCK_BYTES))


def _samples(ranges: RangeReader, start: int, stop: int) -> Sequence[memoryview]:
    """Read the begin of the first, the middle and the last block."""
    last = max(0, (stop - start - 1) // BLOCK_BYTES)
    samples: list[memoryview] = []
    for block in sorted({0, last // 2, last}):
        begin = start + block * BLOCK_BYTES
        samples.append(memoryview(bytearray(min(_SAMPLE_BYTES, stop - begin))))
        ranges.read_into(begin, samples[-1])
    return samples


def compressed_manifest(
    plain: Manifest, content: bytes, rows: Rows, choices: Choices, *, small: dict[str, bytes]
) -> Manifest:
    """Return the manifest of a compressed checkpoint.

    `small` are the small files in which the plain one differs, path -> content, `PLAIN` excepted; they become
    those of the compressed one.

    Raises:
        CorruptCheckpointError: DCP's metadata are damaged.
    """
    entries, frames = {entry.path: entry for entry in plain.originals}, dict[str, Frames]()
    for path, (size, text, *columns) in rows.items():
        entries[path] = FileEntry(path=path, size_bytes=size, checksum=text)
        frames[path] = Frames(*columns)
    before = dict(small)
    for path in [path for path in small if path in entries]:
        small[path] = _metadata(small[path], path, frames)
    small[PLAIN] = encode_plain(content, before, frames, choices)
    algorithm = plain.files[0].checksum.partition(":")[0]
    for path in [path for path in small if path in entries or path == PLAIN]:
        found = checksum(small[path], algorithm)
        entries[path] = FileEntry(path=path, size_bytes=len(small[path]), checksum=found)
    return replace(
        plain,
        files=tuple(entries.values()),
        replicas=1,
        groups=(),
        plain_sha256=hashlib.sha256(content).hexdigest(),
        format_version=NEWEST_FORMAT,
    )


def _metadata(content: bytes, path: str, files: Mapping[str, Frames]) -> bytes:
    """Return DCP's metadata with the places of what is stored."""
    from ckpt_core.dcp import encode_metadata, load_metadata

    metadata, part = load_metadata(content, path), path.removesuffix(METADATA)
    places: dict[Any, StorageInfo] = {}
    for index, info in (metadata.storage_data or {}).items():
        frames = files.get(part + info.relative_path)
        if frames is not None:
            try:
                start, stop, codec = frames.stored_range(info.offset, info.offset + info.length)
            except ValueError as error:
                raise damaged("the source", path, f"{index.fqn!r:.200}: {error}") from error
            info = replace(  # noqa: PLW2901 - the same entry, elsewhere
                info, offset=start, length=stop - start, transform_descriptors=descriptors_of(codec)
            )
        places[index] = info
    return encode_metadata(metadata, places)


NONE: Final = "none"
"""The choice that stores bytes as they are."""


@final
class Gain(NamedTuple):
    """What a codec makes of a class of tensors.

    Attributes:
        ratio: plain bytes for each stored byte.
        rate: plain bytes that one core compresses in a second.
    """

    ratio: float
    rate: float


def choose_codecs(
    sizes: Mapping[str, int],
    measured: Mapping[str, Mapping[str, Gain]],
    *,
    write_rate: float,
    cores: float,
    reading: float = 0.0,
) -> dict[str, str]:
    """Choose the codec, or `NONE`, of each class of tensors; `sizes` are in bytes.

    The model is a pipeline: cores read and compress while the place is written to, so that all of it takes as
    long as the slower of both, max((reading + sum(size / rate)) / cores, sum(size / ratio) / write_rate). No
    other choice takes less by that; of those that take as much, the one that stores the fewest bytes. What is
    not `measured` of a class cannot be chosen for it. `write_rate` is in stored bytes a second, `reading` the
    seconds in which one core reads all of it, and compares it.
    """
    # Of the classes so far: every choice that another one does not beat in both seconds and bytes. The first
    # compresses nothing.
    front: list[tuple[float, float, dict[str, str]]] = [(0.0, 0.0, {})]
    for kind, size in sizes.items():
        codecs = {NONE: Gain(1.0, math.inf), **measured.get(kind, {})}
        longer = [
            (seconds + size / each.rate, stored + size / each.ratio, choice | {kind: codec})
            for seconds, stored, choice in front
            for codec, each in codecs.items()
        ]
        front.clear()
        for option in sorted(longer, key=lambda option: option[:2]):
            if not front or option[1] < front[-1][1]:
                front.append(option)

    def cost(option: tuple[float, float, dict[str, str]]) -> tuple[float, float]:
        return max((reading + option[0]) / cores, option[1] / write_rate), option[1]

    return min(front, key=cost)[2]


def auto(
    source: Storage,
    name: str,
    tables: Mapping[str, FileChunks],
    *,
    write_rate: float,
    sending: float = 0.0,
    stop: Callable[[], None],
) -> Choices:
    """Return the choices that are at a place soonest, as samples show.

    A class of tensors is what has one dtype, the same first and last part of its name, and is of experts or
    not; a few parts of its largest tensors are compressed in every way. The largest class comes first. A
    class is not looked at where that takes as long as it could save: the seconds in which the place is
    written to, and no more of all of them than it still takes when everything has been read. The source has
    the checkpoint plain; `write_rate` is in stored bytes in a second, `sending` the seconds in which one core
    sends a byte.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    classes: dict[str, list[ChunkEntry]] = defaultdict(list)
    for chunks in tables.values():
        for chunk in chunks:
            if chunk.size_bytes >= _SMALL_BYTES:
                classes[_class_of(chunk)].append(chunk)
    sizes = {kind: sum(each.size_bytes for each in found) for kind, found in classes.items()}
    # Half of them: what a few hot samples show of a busy machine is its best moment.
    total, cores = sum(sizes.values()), min(_THREADS, cpus()) / 2
    gains: dict[str, dict[str, Gain]] = {}
    seconds = looking = reading = 0.0
    sampled = 0
    for kind in sorted(sizes, key=sizes.__getitem__, reverse=True):
        stop()
        saves = min(sizes[kind] / write_rate, total / write_rate - reading / cores)
        if saves <= looking:
            continue
        begun = time.perf_counter()
        largest = sorted(classes[kind], key=attrgetter("size_bytes"), reverse=True)[:_SAMPLED]
        content, took = _sample(source, name, largest, enough=saves * _LOOKS)
        seconds, sampled = seconds + took, sampled + len(content)
        reading = total * (seconds / max(1, sampled) + sending)
        if total / write_rate > reading / cores:
            gains[kind] = {codec: _gain(_number(codec, largest[0]), content) for codec in ("zstd", "planes")}
        looking = time.perf_counter() - begun
    chosen = choose_codecs(sizes, gains, write_rate=write_rate, cores=cores, reading=reading)
    return {kind: codec for kind, codec in chosen.items() if codec != NONE}


def _class_of(chunk: ChunkEntry) -> str:
    names = chunk.key.split(".")
    return f"{names[0]} {names[-1]} {chunk.dtype} {'experts' in names}"


def _sample(
    source: Storage, name: str, sampled: Sequence[ChunkEntry], *, enough: float
) -> tuple[bytes, float]:
    """Read parts of tensors until that takes `enough`; return also the seconds."""
    parts, seconds = list[memoryview](), 0.0
    for chunk in sampled:
        if seconds > enough:
            break
        with source.open_ranges(f"{name}/{chunk.path}") as ranges:
            begun = time.perf_counter()
            found = _samples(ranges, *_payload(chunk))
            crc32(b"".join(found))
            parts += found
            seconds += time.perf_counter() - begun
    return b"".join(parts), seconds


def _gain(codec: int, content: bytes) -> Gain:
    begun = time.perf_counter()
    stored = len(compress(codec, content))
    return Gain(len(content) / stored, len(content) / max(1e-9, time.perf_counter() - begun))


def write_rate(target: Storage, size_bytes: int) -> tuple[float, float]:
    """Measure how many bytes a second a place takes, by files that are removed.

    Returns also the seconds in which one core sends a byte. This process owns the root; of the largest sizes
    16 MiB are tried.

    Raises:
        OSError: it cannot be written.
    """
    content = os.urandom(_SMALL_BYTES) * max(1, min(_PROBE_BYTES, size_bytes // 64) // _SMALL_BYTES)
    keys = [probe_name(secrets.token_hex(4), number) for number in range(_THREADS)]
    begun, busy, size = time.perf_counter(), time.process_time(), _THREADS * len(content)
    try:
        run_all(lambda key: target.replace(key, content), keys, _THREADS, name="ckpt-probe")
        return size / (time.perf_counter() - begun), (time.process_time() - busy) / size
    finally:
        for key in keys:
            with suppress(OSError):
                target.delete(key)
