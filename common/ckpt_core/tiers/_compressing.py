"""Compressed copies of checkpoints, which are the same checkpoints.

A first pass reads a checkpoint, verified, and compresses every frame to know sizes and checksums. They make
the manifest of the compressed checkpoint, which names that of the plain one. What copies from the view of it
compresses once more: so nothing is written but the copy, and an interrupted one is continued, because the
same bytes make the same frames.
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
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from ckpt_core.commit import (
    MAX_SIGNATURE_BYTES,
    NEWEST_FORMAT,
    Manifest,
    Marker,
    plain_storage,
    read_entry,
    read_manifest,
)
from ckpt_core.crew import cpus, run_all
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.formats.checksums import Checksum, checksum, crc32
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable, FileChunks
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.frames import (
    CODECS,
    RAW,
    ZSTD,
    Buffer,
    Frames,
    PlainFiles,
    compress,
    compressor,
    descriptors_of,
    encode_plain,
)
from ckpt_core.messages import message
from ckpt_core.names import MANIFEST, MARKER, METADATA, PLAIN, SIGNATURE, chunks_name, data_rank, probe_name
from ckpt_core.reading import CheckedReader, damaged
from ckpt_core.storage import FramedStorage, RangeReader, Storage, read_small
from ckpt_core.types import ChunkEntry, FileEntry

if TYPE_CHECKING:
    from ckpt_core._torch_internals import StorageInfo

Choice: TypeAlias = Callable[[ChunkEntry, Sequence[memoryview]], int]
"""Returns the codec of an entry of a data file (`formats.frames.CODECS`), given parts of up to three blocks.

It is called on several threads. For the same entry it should return the same: else an interrupted copy begins
again."""

Rows: TypeAlias = Mapping[str, Sequence[Any]]
"""Of compressed files, as plain values: path -> size, checksum, and the columns of the frames."""

_SMALL_BYTES: Final = 64 << 10  # what smaller entries save is less than their frames cost
_SAMPLE_BYTES: Final = 64 << 10
_SAMPLED: Final = 3
_FEW: Final = 32
_MANY_BYTES: Final = 256 << 20
_SHRINKS: Final = 0.97
_BATCH: Final = 16
_THREADS: Final = 4
_PASSES: Final = 2
_PROBE_BYTES: Final = 4 << 20


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ShareTerms:
    """Files that one process is to compress, and how.

    Attributes:
        paths: the files, as in the manifest.
        codec: zstd, planes, or auto.
        bytes_per_second: the most that is sent; None for no limit.
    """

    paths: Sequence[str]
    codec: str
    bytes_per_second: int | None


def fixed(codec: str) -> Choice:
    """Return the choice of `zstd` or `planes` for every entry that it makes smaller."""

    def choose(entry: ChunkEntry, samples: Sequence[memoryview]) -> int:
        chosen = _number(codec, entry)
        stored = sum(len(compress(chosen, sample)) for sample in samples)
        return chosen if stored < _SHRINKS * sum(map(len, samples)) else RAW

    return choose


def _number(codec: str, entry: ChunkEntry) -> int:
    width = item_bytes(entry.dtype) if codec == "planes" and entry.dtype is not None else ZSTD
    return width if width in CODECS else ZSTD


def compress_share(
    source: Storage, target: Storage, name: str, share: ShareTerms, *, stop: Callable[[], None]
) -> Rows:
    """Compress those files of a checkpoint that one process has; see `view_of`.

    Args:
        source: the root.
        target: the root that they are to be copied to, which this process owns.
        name: of the checkpoint.
        share: which files, and how.
        stop: called before every read; raises to end it.

    Raises:
        CorruptCheckpointError: a file is damaged.
        OSError: a storage failed.
    """
    source, wanted = plain_storage(source, name), set(share.paths)
    manifest = Manifest.from_bytes(read_manifest(source, name))
    entries = {entry.path: entry for entry in manifest.originals if entry.path in wanted}
    tables = _tables(source, name, entries)
    if share.codec == "auto":
        rate = write_rate(target, sum(entry.size_bytes for entry in entries.values()))
        rate = min(rate, share.bytes_per_second or rate)
        choose = auto(source, name, tables, write_rate=rate, stop=stop)
    else:
        choose = fixed(share.codec)
    found: dict[str, Sequence[Any]] = {}

    def work(path: str) -> None:
        if choose is not None:
            found[path] = _compressed(source, name, entries[path], tables[path], choose=choose, stop=stop)

    run_all(work, list(tables), _THREADS, name="ckpt-compress")
    return found


def view_again(source: Storage, name: str, small: Mapping[str, bytes]) -> Storage:
    """Return a view made elsewhere, by its `FramedStorage.small`; or the root."""
    if not small:
        return source
    files = PlainFiles.from_bytes(small[PLAIN], source=PLAIN).files
    return FramedStorage(plain_storage(source, name), name, small=small, files=files, compresses=True)


def view_begun(source: Storage, name: str, target: Storage, working: str, *, codec: str) -> Storage | None:
    """Return the view that an interrupted copy was made from, if it can go on.

    Args:
        source: the root.
        name: of the checkpoint.
        target: that was copied to.
        working: the directory there.
        codec: as in `ShareTerms`; what stock DCP is to read is not continued in planes.
    """
    try:
        content = read_small(target, f"{working}/{MANIFEST}")
        made = Manifest.from_bytes(content)
        plain = read_manifest(plain_storage(source, name), name)
        if made.plain_sha256 != hashlib.sha256(plain).hexdigest():
            return None
        small = {MARKER: Marker.of(made, content).to_bytes(), MANIFEST: content}
        for entry in made.files:
            if entry.path.rpartition("/")[2] in {PLAIN, METADATA}:
                small[entry.path] = read_entry(target, working, entry)
        with suppress(FileNotFoundError):
            small[SIGNATURE] = read_small(target, f"{working}/{SIGNATURE}", MAX_SIGNATURE_BYTES)
        lacks_signature = SIGNATURE not in small and source.exists(f"{name}/{SIGNATURE}")
        found = PlainFiles.from_bytes(small[PLAIN], source=PLAIN)
        in_planes = any(max(each.codec) > ZSTD for each in found.files.values())
        wrong = lacks_signature or found.compressor != compressor() or (in_planes and codec == "zstd")
        return None if wrong else view_again(source, name, small)
    except (OSError, CheckpointError):
        return None


def _tables(source: Storage, name: str, entries: Mapping[str, FileEntry]) -> dict[str, FileChunks]:
    """Read the chunk tables of data files: path -> chunks."""
    tables: dict[str, FileChunks] = {}
    for rank in sorted({rank for path in entries if (rank := data_rank(path)) is not None}):
        table = chunks_name(rank)
        if table in entries:
            content = read_entry(source, name, entries[table])
            tables |= ChunkTable.from_bytes(content, source=f"{source.url}/{name}/{table}").files
    return {path: chunks for path, chunks in tables.items() if path in entries}


def _compressed(
    source: Storage,
    name: str,
    entry: FileEntry,
    chunks: FileChunks,
    *,
    choose: Choice,
    stop: Callable[[], None],
) -> Sequence[Any]:
    """Compress a verified plain data file; return its row of `Rows`."""
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
    codecs, sizes = zip(*frames, strict=True) if frames else ((), ())
    return [sum(stored), str(running), list(codecs), list(sizes), stored]


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
    """Yield codec and size of the frames of a file, in file order."""
    position = 0
    for chunk in sorted(chunks, key=attrgetter("offset")):
        end = chunk.offset + chunk.size_bytes
        if chunk.size_bytes < _SMALL_BYTES:
            continue
        if chunk.offset < position:
            raise damaged(place, chunk.key, "overlaps the entry before it")
        start, stop = _payload(chunk)
        codec = choose(chunk, _samples(ranges, start, stop))
        if codec != RAW:
            yield from _blocks(RAW, position, chunk.offset)
            yield from _blocks(ZSTD, chunk.offset, start)
            yield from _blocks(codec, start, stop)
            yield from _blocks(ZSTD, stop, end)
            position = end
    yield from _blocks(RAW, position, chunks.size_bytes)


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


def view_of(
    source: Storage, name: str, shares: Iterable[Rows], *, sign: Callable[[bytes], bytes] | None = None
) -> Storage:
    """Return the view of a checkpoint in which these shares are compressed.

    Args:
        source: the root.
        name: of the checkpoint.
        shares: what `compress_share` returned.
        sign: signs the new manifest; needed if the checkpoint is signed.

    Returns:
        The view; if nothing became smaller, the plain checkpoint.

    Raises:
        ConfigError: it is signed, and `sign` is None.
        CorruptCheckpointError: it is damaged.
    """
    source, files = plain_storage(source, name), dict[str, FileEntry]()
    frames: dict[str, Frames] = {}
    for path, (size, text, codecs, *sizes) in (row for rows in shares for row in rows.items()):
        if any(codecs):
            files[path] = FileEntry(path=path, size_bytes=size, checksum=text)
            frames[path] = Frames(codecs, *sizes)
    if not frames:
        return source
    if sign is None and source.exists(f"{name}/{SIGNATURE}"):
        raise ConfigError(
            f"{source.url}/{name} is signed, and a compressed copy has a manifest of its own, which is not: "
            "nothing was written; copy it as it is, or compress where it can be signed (sign_manifest=)"
        )
    content = read_manifest(source, name)
    plain = Manifest.from_bytes(content)
    entries = {entry.path: entry for entry in plain.originals} | files
    before: dict[str, bytes] = {}
    small: dict[str, bytes] = {}
    for path in [path for path in entries if path.rpartition("/")[2] == METADATA]:
        before[path] = read_entry(source, name, entries[path])
        small[path] = _metadata(before[path], f"{source.url}/{name}", path, frames)
    if source.exists(f"{name}/{SIGNATURE}"):
        before[SIGNATURE] = read_small(source, f"{name}/{SIGNATURE}", MAX_SIGNATURE_BYTES)
    small[PLAIN] = encode_plain(content, before, frames)
    algorithm = next(iter(files.values())).checksum.partition(":")[0]
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
    passes: int = 1,
    reading: float = 0.0,
) -> dict[str, str]:
    """Choose the codec of each class of tensors.

    The model is a pipeline: cores read and compress while the place is written to, so that all of it takes as
    long as the slower of both, max((reading + sum(size / rate)) / cores, sum(size / ratio) / write_rate).
    Passes before that one, as to know sizes, come in addition, if anything is compressed. No other choice
    takes less by that; of those that take as much, the one that stores the fewest bytes.

    Args:
        sizes: bytes of each class.
        measured: class -> codec -> what it makes of it; what a class lacks cannot be chosen for it.
        write_rate: stored bytes that the place takes in a second.
        cores: that compress.
        passes: how often all is read and compressed; the last time while it is written.
        reading: seconds in which one core reads all of it, and compares it.

    Returns:
        The codec of each class, or `NONE`.
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
        working, stored = (reading + option[0]) / cores, option[1]
        again = (passes - 1) * working if option[0] else 0.0
        return (again + max(working, stored / write_rate), stored)

    return min(front, key=cost)[2]


def auto(
    source: Storage,
    name: str,
    tables: Mapping[str, FileChunks],
    *,
    write_rate: float,
    stop: Callable[[], None],
) -> Choice | None:
    """Return the choice that is at a place soonest, as samples show.

    A class of tensors is what has one dtype, the same first and last part of its name, and is of experts or
    not; a few parts of its largest tensors are compressed in every way.

    Args:
        source: the root, in which the checkpoint is plain.
        name: of the checkpoint.
        tables: path -> chunks of the files of it that are to be compressed.
        write_rate: stored bytes that the place takes in a second.
        stop: called before every read; raises to end it.

    Returns:
        The choice; None if nothing should be compressed.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    classes: dict[str, list[ChunkEntry]] = defaultdict(list)
    for chunks in tables.values():
        for chunk in chunks:
            if chunk.size_bytes >= _SMALL_BYTES:
                classes[_class_of(chunk)].append(chunk)
    sizes = {kind: sum(each.size_bytes for each in found) for kind, found in classes.items()}
    total, seconds, sampled = sum(sizes.values()), 0.0, 0
    gains: dict[str, dict[str, Gain]] = {}
    for kind, found in classes.items():
        stop()
        if sizes[kind] < total // _FEW:
            continue  # to look at it takes longer than it could save
        largest = sorted(found, key=attrgetter("size_bytes"))[-_SAMPLED:]
        content, took = _sample(source, name, largest if sizes[kind] > _MANY_BYTES else largest[-1:])
        seconds, sampled = seconds + took, sampled + len(content)
        gains[kind] = {codec: _gain(_number(codec, largest[-1]), content) for codec in ("zstd", "planes")}
    codecs = choose_codecs(
        sizes,
        gains,
        write_rate=write_rate,
        cores=min(_THREADS, cpus()),
        passes=_PASSES,
        reading=total * seconds / max(1, sampled),
    )
    choices = {kind: fixed(codec) for kind, codec in codecs.items() if codec != NONE}
    if not choices:
        return None

    def choose(entry: ChunkEntry, samples: Sequence[memoryview]) -> int:
        choice = choices.get(_class_of(entry))
        return RAW if choice is None else choice(entry, samples)

    return choose


def _class_of(chunk: ChunkEntry) -> str:
    names = chunk.key.split(".")
    return f"{names[0]} {names[-1]} {chunk.dtype} {'experts' in names}"


def _sample(source: Storage, name: str, sampled: Sequence[ChunkEntry]) -> tuple[bytes, float]:
    """Read parts of tensors; return also the seconds that it took, compared."""
    parts, seconds = list[memoryview](), 0.0
    for chunk in sampled:
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


def write_rate(target: Storage, size_bytes: int) -> float:
    """Measure how many bytes a second a place takes, by files that are removed.

    Args:
        target: a root that this process owns.
        size_bytes: of what is to be written; of the largest, 16 MiB are tried.

    Raises:
        OSError: it cannot be written.
    """
    content = os.urandom(_SMALL_BYTES) * max(1, min(_PROBE_BYTES, size_bytes // 64) // _SMALL_BYTES)
    keys = [probe_name(secrets.token_hex(4), number) for number in range(_THREADS)]
    begun = time.perf_counter()
    try:
        run_all(lambda key: target.replace(key, content), keys, _THREADS, name="ckpt-probe")
        return _THREADS * len(content) / (time.perf_counter() - begun)
    finally:
        for key in keys:
            with suppress(OSError):
                target.delete(key)
