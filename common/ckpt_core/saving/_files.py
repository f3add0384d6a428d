"""The files of one rank in one save, hashed on their way to storage."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Final, Self, final

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.crew import Workers
from ckpt_core.dcp import Image
from ckpt_core.formats.checksums import CRC32, Checksum, checksum, crc32
from ckpt_core.formats.chunks import ChunkColumns, TableEntry
from ckpt_core.names import data_name
from ckpt_core.saving._reports import ReportCache
from ckpt_core.saving._twins import TwinSession
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry

# The data files of a rank: tensors in one, byte entries, whose sizes vary, in another.
_SHARDS: Final = 0
_VALUES: Final = 1


@final
class RankFiles:
    """Writer of one rank's files, which stock `dcp.load` reads.

    `reports` has the algorithm of checksums and the rate of tensor writes; `tables` gets what the rank's
    chunk table says of each data file.

    Concurrency: used by one thread. Pieces must not change until the context has ended.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        rank: int = 0,
        *,
        reports: ReportCache | None = None,
        twins: TwinSession | None = None,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._rank = rank
        self._reports = reports or ReportCache()
        self._twins = twins
        self._entries: list[FileEntry] = []
        self._hashed: dict[str, tuple[Checksum, Generator[memoryview]]] = {}
        self.tables: list[TableEntry] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, pieces in self._hashed.values():
            pieces.close()  # of a write that failed: its thread ends

    def write_image(self, part: str, image: Image, wait_for: Callable[[int], None] | None = None) -> None:
        """Write the image of this rank's tensors; for `wait_for` see `Image.pieces`."""
        if image.layout.slots:
            path, pace = self._path(part, _SHARDS), self._reports.pace
            pieces = self.follow(path, image.pieces(wait_for))
            self._storage.write_pieces(self._key(path), pieces if pace is None else pace(pieces))
            self._entries.append(image.file_entry(path))
            self.tables.append(image.table_entry(path))

    def write_values(self, part: str, values: Mapping[MetadataIndex, bytes]) -> None:
        """Write this rank's byte entries, each the result of `value_entry`."""
        if values:
            path, content = self._path(part, _VALUES), b"".join(values.values())
            self.write(path, content)
            columns = _value_columns(tuple(i.fqn for i in values), tuple(map(len, values.values())))
            self.tables.append(
                TableEntry(
                    path=path,
                    size_bytes=len(content),
                    num_chunks=len(values),
                    columns=columns,
                    crcs=np.array(list(map(crc32, values.values())), dtype="<u4").tobytes(),
                    lengths=np.array(list(map(len, values.values())), np.int64).tobytes(),
                )
            )

    def write(self, path: str, content: bytes) -> None:
        self._storage.write_bytes(self._key(path), content)
        if self._twins is not None:
            self._twins.add(path, content)
        text = checksum(content, self._reports.algorithm)
        self._entries.append(FileEntry(path=path, size_bytes=len(content), checksum=text))

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Pass on the pieces of a file, and hash them on a thread meanwhile.

        For CRC-32, which the image computes, nothing is hashed here.
        """
        if self._twins is not None:
            pieces = self._twins.follow(path, pieces)
        if self._reports.algorithm == CRC32:
            return pieces
        running = Checksum(self._reports.algorithm)
        hashed = _hashed(running, pieces)
        self._hashed[path] = running, hashed
        return hashed

    def hashes(self) -> dict[str, str]:
        """Return the checksum of every followed file, by path, once all are written."""
        return {path: str(running) for path, (running, _) in self._hashed.items()}

    @property
    def entries(self) -> list[FileEntry]:
        known = self.hashes()
        return [replace(each, checksum=known.get(each.path, each.checksum)) for each in self._entries]

    def _path(self, part: str, number: int) -> str:
        name = data_name(self._rank, number)
        return f"{part}/{name}" if part else name

    def _key(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path


def _hashed(running: Checksum, pieces: Iterable[memoryview]) -> Generator[memoryview]:
    with Workers(running.update, 1, name="ckpt-hash") as hasher:
        for piece in pieces:
            hasher.take(piece)
            yield piece
    hasher.raise_first()


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
