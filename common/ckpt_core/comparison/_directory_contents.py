"""What one checkpoint holds: tensors, values and files, located but not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, final

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core.commit import Catalog, Manifest, stock_parts
from ckpt_core.comparison._value_files import ValueFiles
from ckpt_core.dcp import ChunkLocation, ChunkLocator, check_metadata, load_metadata
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, FileFailure
from ckpt_core.loading import CommittedFiles
from ckpt_core.names import MARKER, METADATA
from ckpt_core.storage import RangeReader, Storage

_MOST_OPEN: Final = 64


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A chunk of a tensor: the box that it fills, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ChunkLocation


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenPart:
    prefix: str
    metadata: Metadata
    places: ChunkLocator


@final
class Contents:
    """The contents of a checkpoint of ours, or of a directory of stock DCP.

    Names of entries are DCP's, with their part in front where it is not the checkpoint directory.

    Args:
        storage: the root.
        name: of the checkpoint's directory.

    Raises:
        CheckpointNotFoundError: there is neither.
        CorruptCheckpointError: a small file is damaged.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self._closing = ExitStack()
        self._readers: dict[str, RangeReader] = {}
        ours = storage.exists(f"{name}/{MARKER}")
        self.manifest: Manifest | None = Catalog(storage).manifest(name) if ours else None
        self._files = CommittedFiles(storage, name, self.manifest)
        self.files = ValueFiles(storage, self._files)
        self._parts = {part: self._open(part) for part in self._part_names()}
        if not self._parts:
            raise CheckpointNotFoundError(
                f"{self.url} holds neither a committed checkpoint ({MARKER}) nor one that "
                f"torch.distributed.checkpoint wrote ({METADATA})"
            )

    @property
    def url(self) -> str:
        """The directory's URL."""
        return self._files.url

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return every tensor by name."""
        return {
            name: entry for name, entry in self._entries().items() if isinstance(entry, TensorStorageMetadata)
        }

    def byte_entries(self) -> list[str]:
        """Return the names of the values among the tensors."""
        return [name for name, each in self._entries().items() if not isinstance(each, TensorStorageMetadata)]

    def chunks(self, name: str) -> list[StoredChunk]:
        """Locate the chunks of a tensor."""
        part, key = self._split(name)
        entry: Any = part.metadata.state_dict_metadata[key]
        indices = {MetadataIndex(key, chunk.offsets): chunk for chunk in entry.chunks}
        return [
            StoredChunk(offsets=tuple(indices[index].offsets), sizes=tuple(indices[index].sizes), place=place)
            for index, place in part.places.find(indices).items()
        ]

    def byte_entry(self, name: str) -> ChunkLocation:
        """Locate a value among the tensors."""
        part, key = self._split(name)
        index = MetadataIndex(key)
        return part.places.find([index])[index]

    def read(self, place: ChunkLocation) -> bytes:
        """Read the whole stored zip of an entry."""
        return bytes(self.read_range(place, place.offset, place.size_bytes))

    def read_range(self, place: ChunkLocation, offset: int, size_bytes: int) -> bytearray:
        """Read bytes of the file of an entry.

        Raises:
            CorruptCheckpointError: the file is missing, or ends before.
        """
        buffer = bytearray(size_bytes)
        try:
            self._reader(place.path).read_into(offset, memoryview(buffer))
        except (EOFError, FileNotFoundError) as error:
            raise self.damaged(place, str(error)) from error
        return buffer

    def close(self) -> None:
        """Close the files that were read."""
        self._readers.clear()
        self._closing.close()

    def _reader(self, path: str) -> RangeReader:
        if path not in self._readers:
            if len(self._readers) >= _MOST_OPEN:
                self.close()
            opened = self.storage.open_ranges(f"{self.name}/{path}")
            self._readers[path] = self._closing.enter_context(opened)
        return self._readers[path]

    def damaged(self, place: ChunkLocation, problem: str) -> CorruptCheckpointError:
        """Make the error of a damaged entry."""
        failure = FileFailure(path=place.path, problem=f"{place.key!r:.200}: {problem}")
        return CorruptCheckpointError(
            f"{self.url}/{failure}. Nothing can be said of the differences: see `ckpt verify {self.url}`",
            failures=(failure,),
        )

    def _entries(self) -> dict[str, Any]:
        return {
            f"{each.prefix}{key}": entry
            for each in self._parts.values()
            for key, entry in each.metadata.state_dict_metadata.items()
        }

    def _split(self, name: str) -> tuple[_OpenPart, str]:
        for part in self._parts.values():
            key = name.removeprefix(part.prefix)
            if name.startswith(part.prefix) and key in part.metadata.state_dict_metadata:
                return part, key
        raise KeyError(name)

    def _part_names(self) -> Iterator[str]:
        if self.manifest is not None:
            found: Sequence[str] = [entry.path for entry in self.manifest.files]
            yield from (path[: -len(METADATA)].rstrip("/") for path in found if _is_metadata(path))
            return
        for part in stock_parts(self.storage, self.name):
            inner = PurePosixPath(part).relative_to(self.name)
            if self.storage.exists(f"{part}/{METADATA}"):
                yield "" if str(inner) == "." else str(inner)

    def _open(self, part: str) -> _OpenPart:
        inside, url = f"{part}/" if part else "", self._files.url
        metadata = load_metadata(self._files.read(f"{inside}{METADATA}"), f"{url}/{inside}{METADATA}")
        check_metadata(metadata, f"{url}/{inside}{METADATA}", lambda data: self._files.size(inside + data))
        if self.manifest is not None:
            places = ChunkLocator(metadata, part=part, directory=url, read_table=self._files.table)
        else:
            places = ChunkLocator(metadata, part=part, directory=url, read_at=self._read_at)
        return _OpenPart(prefix=f"{part}: " if part else "", metadata=metadata, places=places)

    def _read_at(self, path: str, offset: int, size: int) -> bytes:
        reader = self._reader(path)
        buffer = bytearray(max(0, min(size, reader.size_bytes - offset)))
        reader.read_into(offset, memoryview(buffer))
        return bytes(buffer)


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA
