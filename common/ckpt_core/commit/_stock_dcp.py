"""Verification of stock DCP checkpoints by the CRC32s inside their zips.

They have no manifest, but every chunk is a zip, and torch writes a CRC32 for each record, which it never
verifies. `.metadata`, a pickle, tells where the chunks are; it is read without torch and safely.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from ckpt_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.extensions import plain_entry
from ckpt_core.formats.legacy import verify_small
from ckpt_core.formats.zips import ZipError, read_directory, verify_records
from ckpt_core.names import DATA_SUFFIX, METADATA, can_count
from ckpt_core.storage import BIGGEST_SMALL_FILE, Storage, read_small


def zip_problem(stream: IO[bytes], offset: int, size: int) -> str | None:
    """Read the zip at `offset` through; return the problem, or None."""

    def read_at(place: int, count: int) -> bytes:
        stream.seek(offset + place)
        return stream.read(max(0, min(count, size - place)))

    try:
        if verify_small(read_at, size):
            return None
        directory = read_directory(read_at, size)
        if not directory.has_checksums:
            return "written with torch's CRC32 switched off, so that nothing can be verified"
        verify_records(read_at, directory)
    except ZipError as error:
        return f"not a whole torch zip: {error}"
    return None


def verify_stock(
    storage: Storage, name: str, *, seen: Callable[[int], None] = lambda _: None
) -> list[FileFailure]:
    """Verify each DCP directory at or below; `seen` gets numbers of bytes compared."""
    parts = list(stock_parts(storage, name))
    if not parts:
        raise CheckpointNotFoundError(
            f"{storage.url}/{name} holds no DCP checkpoint: there is no {METADATA} and no {DATA_SUFFIX} file"
        )
    return [
        FileFailure(path=str(PurePosixPath(part).relative_to(name) / failure.path), problem=failure.problem)
        for part in parts
        for failure in verify_part(storage, part, seen=seen)
    ]


def stock_parts(storage: Storage, directory: str) -> Iterator[str]:
    """Yield the directories at or below this one that hold DCP's data."""
    children = storage.list(directory)
    files = [child.name for child in children if not child.is_directory]
    if METADATA in files or any(file.endswith(DATA_SUFFIX) for file in files):
        yield directory
    for child in children:
        if child.is_directory and can_count(child.name):
            yield from stock_parts(storage, f"{directory}/{child.name}")


def verify_part(
    storage: Storage, part: str, *, seen: Callable[[int], None] = lambda _: None
) -> list[FileFailure]:
    """Verify one directory of DCP's data, as by `verify_stock`; "" is the root."""
    from ckpt_core.formats.index import decode

    prefix = f"{part}/" if part else ""
    chunks = defaultdict[str, list[_StockChunk]](list)
    try:
        index = decode(read_small(storage, f"{prefix}{METADATA}"), METADATA)
    except FileNotFoundError:
        problem = "missing: the save did not end, DCP cannot load this"
        return [FileFailure(path=METADATA, problem=problem)]
    except CorruptCheckpointError as error:
        return list(error.failures)
    except UnsafeCheckpointError as error:
        return [FileFailure(path=METADATA, problem=str(error))]
    sizes = {name: prod(entry.size) * item_bytes(entry.dtype) for name, entry in index.tensors()}
    for name, _, file, offset, length, transforms in index.rows():
        most_bytes = sizes.get(name, BIGGEST_SMALL_FILE)
        chunks[file].append(_StockChunk(offset, length, name, tuple(transforms or ()), most_bytes))
    return [
        FileFailure(path=path, problem=why)
        for path in sorted(chunks)
        if (why := _file_problem(storage, f"{prefix}{path}", sorted(chunks[path]), seen)) is not None
    ]


class _StockChunk(NamedTuple):
    offset: int
    size_bytes: int
    key: str
    transforms: tuple[str, ...] = ()
    most_bytes: int = 0

    def problem(self, stream: IO[bytes]) -> str | None:
        if not self.transforms:
            return zip_problem(stream, self.offset, self.size_bytes)
        stream.seek(self.offset)
        try:
            content = plain_entry(stream.read(self.size_bytes), self.transforms, self.most_bytes)
        except (ZipError, IncompatibleCheckpointError) as error:
            return str(error)
        return zip_problem(io.BytesIO(content), 0, len(content))


def _file_problem(
    storage: Storage, key: str, chunks: Sequence[_StockChunk], seen: Callable[[int], None]
) -> str | None:
    damaged: list[str] = []
    try:
        size = storage.size(key)
        end = max(chunk.offset + chunk.size_bytes for chunk in chunks)
        if size < end:
            return f"truncated: has {size} bytes, its chunks need {end}"
        with storage.open(key) as stream:
            for chunk in chunks:
                problem = chunk.problem(stream)
                if problem is not None:
                    damaged.append(f"{chunk.key!r} at byte {chunk.offset}: {problem}")
                seen(chunk.size_bytes)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be verified: {error}"
    return f"{len(damaged)} of {len(chunks)} chunks damaged, first {damaged[0]}" if damaged else None
