"""What a foreign checkpoint holds, and where the bytes of each tensor lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Protocol, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_core._torch_internals import StorageInfo
from ckpt_core.dcp import ChunkLocation
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.reading import Payload

Path: TypeAlias = tuple[str | int, ...]
"""Of an entry in the nested state, as a checkpoint of ours has it: ("model", "layers.0.weight")."""
OURS: Final = "ckpt_suite"
"""Key of a file of others that was made of a checkpoint of ours: that checkpoint's `state` and `files`."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """The bytes of one box of a tensor.

    Attributes:
        path: of the file, below the directory.
        offset: of the first element, in bytes.
        offsets: of the box in the tensor.
        sizes: of the box.
        strides: of its elements, in elements; None if they lie one after another, row-major.
        crc32: of the bytes of a box without strides, where the format has it.
    """

    path: str
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    crc32: int | None = None

    def size_bytes(self, dtype: torch.dtype) -> int:
        """Return how many bytes are read for it."""
        if self.strides is None or not prod(self.sizes):
            return prod(self.sizes) * dtype.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * dtype.itemsize


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor: its chunks cover each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The content of a foreign checkpoint.

    Attributes:
        kind: what it is, for people: "a folder of Hugging Face weights".
        tensors: by the path that a checkpoint of ours would give them.
        values: everything else: plain values, by path.
        step: the training's, where the format says it.
        files: small files of a checkpoint of ours that it was made of, by name.
    """

    kind: str
    tensors: Mapping[Path, StoredTensor]
    values: Mapping[Path, Any] = field(default_factory=dict[Path, Any])
    step: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def without(self, items: Collection[str | int]) -> Layout:
        """Return what it has beside these items."""
        tensors = {path: each for path, each in self.tensors.items() if path[0] not in items}
        return replace(
            self, tensors=tensors, values={p: each for p, each in self.values.items() if p[0] not in items}
        )

    def metadata(self) -> Metadata:
        """Return it as DCP's metadata.

        Raises:
            IncompatibleCheckpointError: two entries would have one name.
        """
        found: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        places: dict[MetadataIndex, StorageInfo] = {}
        for path in (*self.tensors, *self.values):
            name = ".".join(map(str, path))
            if name in paths:
                raise IncompatibleCheckpointError(f"two entries of {self.kind} are called {name!r:.200}")
            paths[name] = path
            tensor = self.tensors.get(path)
            if tensor is None:
                found[name] = BytesStorageMetadata()
                continue
            found[name] = TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                    for each in tensor.chunks
                ],
            )
            for each in tensor.chunks:
                index = MetadataIndex(name, torch.Size(each.offsets))
                places[index] = StorageInfo(each.path, each.offset, each.size_bytes(tensor.dtype))
        return Metadata(found, planner_data=paths, storage_data=places)


class Locator(Protocol):
    """What locates entries, as `ChunkLocator` does."""

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        """Locate these entries."""
        ...


@final
class LayoutLocator:
    """Locator of the entries of a layout, and of a checkpoint of DCP beside it."""

    def __init__(self, layout: Layout, beyond: Locator | None = None) -> None:
        self._beyond = beyond
        self._names = {".".join(map(str, path)) for path in (*layout.tensors, *layout.values)}
        self._tensors = {".".join(map(str, path)): each for path, each in layout.tensors.items()}
        self._chunks: dict[str, dict[tuple[int, ...], StoredChunk]] = {}

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        wanted = list(indices)
        others = [] if self._beyond is None else [each for each in wanted if each.fqn not in self._names]
        found = {} if self._beyond is None else self._beyond.find(others)
        return found | {index: self._find(index) for index in wanted if index not in found}

    def _find(self, index: MetadataIndex) -> ChunkLocation:
        key, tensor = index.fqn, self._tensors.get(index.fqn)
        if tensor is None or index.offset is None:
            return ChunkLocation(path="", key=key, offset=0, size_bytes=0)
        if key not in self._chunks:
            self._chunks[key] = {each.offsets: each for each in tensor.chunks}
        chunk = self._chunks[key][tuple(index.offset)]
        size = chunk.size_bytes(tensor.dtype)
        payload = Payload(path=chunk.path, key=key, offset=chunk.offset, size_bytes=size, crc32=chunk.crc32)
        return ChunkLocation(
            path=chunk.path,
            key=key,
            offset=chunk.offset,
            size_bytes=size,
            dtype=tensor.dtype,
            shape=chunk.sizes,
            payload=payload if chunk.strides is None else None,
            strides=chunk.strides,
        )
