"""What one checkpoint holds: tensors, values and files, located but not read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, final

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ckpt_core.dcp import load_plain
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.loading import CheckpointPart, LocatedTensor, located, open_parts
from ckpt_core.names import IN_FILES, METADATA, SHARED, data_rank, is_own_json, shared_rank
from ckpt_core.state import decode_buffers, decode_items
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry

MISSING: Final = object()
"""Stands for no value."""
_SMALL_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
_ZIP: Final = b"PK"


@final
class Contents:
    """The contents of a checkpoint of ours or of others.

    Attributes:
        tensors: by name, of a file of the host that holds others the file in front.
        byte_entries: the values among them: part and key there.
        items: the values in our own small files, by name; those of a rank with its file in front.
        host_files: the files of a host framework, but those of tensors.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: a small file is damaged.
    """

    def __init__(self, storage: Storage, name: str, file: str = "") -> None:
        self._storage = storage
        _, self._files, parts = open_parts(storage, name, file=file, whole="state")
        self.url = self._files.url
        self.entries = {entry.path: entry for entry in self._files.entries}
        self.tensors = located(parts)
        self.byte_entries: dict[str, tuple[CheckpointPart, MetadataIndex]] = {
            f"{directory}: {key}" if directory else key: (part, MetadataIndex(key))
            for directory, part in parts.items()
            for key, entry in part.metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        }
        self.items: dict[str, Any] = {}
        self.host_files: dict[str, FileEntry] = {}
        for path, entry in sorted(self.entries.items()):
            if path == SHARED or shared_rank(path) is not None or is_own_json(path):
                self._read_items(path)
            elif path.rpartition("/")[2] != METADATA and data_rank(path) is None:
                self.host_files[path] = entry
        self.items.pop(IN_FILES, None)  # where tensors lie, not what they are
        known = {self.host_file(each) for each in self.tensors.values()} if self.host_files else ()
        for path in [path for path in self.host_files if path.endswith(".safetensors")]:
            try:
                inside = {} if path in known else located(open_parts(storage, name, file=path)[2])
            except (CorruptCheckpointError, IncompatibleCheckpointError):
                self.verify(path)  # damaged, or else the bytes of the host's own file are compared
                continue
            for each in inside.values():
                named = f"{path}: {'.'.join(map(str, each.path[1:]))}"
                self.tensors[named] = replace(each, name=named)
            del self.host_files[path]

    def _read_items(self, path: str) -> None:
        """Read the values in one of our own small files; pickled ones are byte entries."""
        if path.startswith("chunks-"):
            return
        content, source = self._files.read(path), f"{self.url}/{path}"
        found: Mapping[str, Any] = (
            {key: value for (_, key), value in decode_buffers(content, source).items()}
            if path.startswith("local-")
            else decode_items(content, source).values
        )
        prefix = "" if path.startswith("shared") else f"{path.removesuffix('.json')}: "
        self.items |= {f"{prefix}{key}": value for key, value in found.items()}

    def host_file(self, tensor: LocatedTensor) -> str | None:
        """Return the file of a host that holds a tensor, if one does."""
        paths = {place.path for place in tensor.boxes.values()}
        return next((path for path in paths if path in self.entries and data_rank(path) is None), None)

    def verify(self, path: str) -> None:
        """Compare a file with the manifest, once.

        Raises:
            CorruptCheckpointError: it is missing, or was changed.
        """
        if failures := self._files.damaged_files([path]):
            raise self._files.damaged(path, failures[0].problem)

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece."""
        with self._storage.open(f"{self._files.directory}/{path}") as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece

    def host_values(self, entry: FileEntry) -> Any:
        """Return the plain values in a host's file; `MISSING` if it holds no such."""
        if entry.size_bytes > _SMALL_BYTES:
            return MISSING
        content = self._files.read(entry.path)
        try:
            if content.startswith(_ZIP):
                return load_plain(content, entry.path)
            return json.loads(content) if entry.path.endswith(".json") else MISSING
        except (CheckpointError, ValueError, RecursionError):
            return MISSING  # what is not plain is compared by its bytes
