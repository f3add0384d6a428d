"""A rank's share of a checkpoint in files that stock `dcp.load` reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Protocol, Self, TypeAlias, final

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.crew import Workers
from ckpt_core.dcp._image import Image
from ckpt_core.formats.checksums import CRC32, Checksum, checksum, crc32
from ckpt_core.formats.chunks import ChunkColumns, TableEntry
from ckpt_core.names import data_name
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry


class Twins(Protocol):
    """Writes a second file of the same bytes for every file that is shown to it."""

    def follow(self, path: str, pieces: Iterable[memoryview], /) -> Iterable[memoryview]:
        """Pass on the pieces of a file."""
        ...

    def add(self, path: str, content: bytes, /) -> None:
        """Take the content of a small file."""
        ...


@final
class Hashing:
    """The checksums of one rank's files in one save, and the twins that follow them.

    Concurrency: used by one thread. Pieces must not change until the context has ended.

    Args:
        algorithm: of the checksums; for CRC-32, which the image computes, nothing is hashed here.
        twins: is shown every file; None without twins.
    """

    def __init__(self, algorithm: str = CRC32, twins: Twins | None = None) -> None:
        self.algorithm = algorithm
        self._twins = twins
        self._files: dict[str, tuple[Checksum, Generator[memoryview]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, pieces in self._files.values():
            pieces.close()  # of a write that failed: its thread ends

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Pass on the pieces of a file, and hash them on a thread meanwhile."""
        if self._twins is not None:
            pieces = self._twins.follow(path, pieces)
        if self.algorithm == CRC32:
            return pieces
        running = Checksum(self.algorithm)
        hashed = _hashed(running, pieces)
        self._files[path] = running, hashed
        return hashed

    def checksum_of(self, path: str, content: bytes) -> str:
        """Return the checksum of a small file."""
        if self._twins is not None:
            self._twins.add(path, content)
        return checksum(content, self.algorithm)

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every followed file, by path, once all are written."""
        return {path: str(running) for path, (running, _) in self._files.items()}


def _hashed(running: Checksum, pieces: Iterable[memoryview]) -> Generator[memoryview]:
    with Workers(running.update, 1, name="ckpt-hash") as hasher:
        for piece in pieces:
            hasher.take(piece)
            yield piece
    hasher.raise_first()


# The data files of a rank: tensors in one, byte entries, whose sizes vary, in another.
_SHARDS, _VALUES = 0, 1

Pace: TypeAlias = Callable[[Iterable[memoryview]], Iterable[memoryview]]
"""Passes pieces on, no faster than they should be written."""


@final
class ShardWriter:
    """Writer of one rank's share of one part, in files that stock `dcp.load` reads.

    Args:
        storage: the root, with the checkpoint in `directory`.
        part: sub-directory of this part, "" for the checkpoint directory itself.
        pace: limits the rate of tensor writes; None for full speed.
        hashing: sees all files; None for CRC-32 alone.

    Attributes:
        files: every file written, for the manifest; that of tensors with its CRC-32.
        tables: every data file written, for the rank's chunk table.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        part: str = "",
        rank: int = 0,
        pace: Pace | None = None,
        hashing: Hashing | None = None,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._part = part
        self._rank = rank
        self._pace = pace
        self._hashing = hashing or Hashing()
        self.files: list[FileEntry] = []
        self.tables: list[TableEntry] = []

    def write_image(self, image: Image, wait_for: Callable[[int], None] | None = None) -> None:
        """Write the image of this rank's tensors; for `wait_for` see `Image.pieces`."""
        if image.layout.slots:
            path = self._path(_SHARDS)
            pieces: Iterable[memoryview] = self._hashing.follow(path, image.pieces(wait_for))
            self._storage.write_pieces(self._key(path), pieces if self._pace is None else self._pace(pieces))
            self.files.append(image.file_entry(path))
            self.tables.append(image.table_entry(path))

    def write_values(self, values: Mapping[MetadataIndex, bytes]) -> None:
        """Write this rank's byte entries, each the result of `value_entry`."""
        if not values:
            return
        path, content = self._path(_VALUES), b"".join(values.values())
        self._storage.write_bytes(self._key(path), content)
        text = self._hashing.checksum_of(path, content)
        self.files.append(FileEntry(path=path, size_bytes=len(content), checksum=text))
        self.tables.append(
            TableEntry(
                path=path,
                size_bytes=len(content),
                num_chunks=len(values),
                columns=_value_columns(tuple(i.fqn for i in values), tuple(map(len, values.values()))),
                crcs=np.array(list(map(crc32, values.values())), dtype="<u4").tobytes(),
            )
        )

    def _path(self, number: int) -> str:
        name = data_name(self._rank, number)
        return f"{self._part}/{name}" if self._part else name

    def _key(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path


@lru_cache(maxsize=8)
def _value_columns(keys: tuple[str, ...], sizes: tuple[int, ...]) -> bytes:
    """Encode byte entries as columns of a chunk table, cached between saves."""
    nothing = [None] * len(keys)
    return ChunkColumns(
        key=keys,
        shard_offsets=nothing,
        offset=[0, *accumulate(sizes[:-1])],
        size_bytes=sizes,
        payload_offset=nothing,
        payload_bytes=nothing,
        dtype=nothing,
    ).encode()
