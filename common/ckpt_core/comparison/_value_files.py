"""The small files of a checkpoint: values of ours, and files of a host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from ckpt_core.comparison._values import MISSING
from ckpt_core.dcp import load_plain
from ckpt_core.errors import CheckpointError
from ckpt_core.loading import CommittedFiles
from ckpt_core.names import METADATA, SHARED, data_rank, is_own_json, shared_rank
from ckpt_core.state import decode_buffers, decode_items
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry

_SMALL_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
_ZIP: Final = b"PK"


@final
class ValueFiles:
    """The files of a checkpoint that hold no tensors of DCP; none of stock DCP."""

    def __init__(self, storage: Storage, files: CommittedFiles) -> None:
        self._storage, self._files = storage, files

    def item_files(self) -> list[str]:
        """Return the paths of our own small files of values."""
        return [each.path for each in self._files.entries if _holds_items(each.path)]

    def items(self, path: str) -> Mapping[str, Any]:
        """Read the values in one of them, by item; pickled ones are byte entries."""
        content = self._files.read(path)
        if path.startswith("local-"):
            return {
                key: value for (_, key), value in decode_buffers(content, f"{self._files.url}/{path}").items()
            }
        return decode_items(content, f"{self._files.url}/{path}").values

    def host_files(self) -> dict[str, FileEntry]:
        """Return the files of a host framework, by path."""
        return {each.path: each for each in self._files.entries if _is_of_host(each.path)}

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

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece."""
        with self._storage.open(f"{self._files.directory}/{path}") as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece


def _holds_items(path: str) -> bool:
    own = path == SHARED or shared_rank(path) is not None or is_own_json(path)
    return own and not path.startswith("chunks-")


def _is_of_host(path: str) -> bool:
    own = path == SHARED or shared_rank(path) is not None or is_own_json(path)
    return not (own or path.rpartition("/")[2] == METADATA or data_rank(path) is not None)
