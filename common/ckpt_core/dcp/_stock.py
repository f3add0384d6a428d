"""Loads by stock DCP, which unpickles what it finds: what they read is checked before, and while they run."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_core.codec import corrupt
from ckpt_core.consistency import check_metadata
from ckpt_core.dcp._metadata import load_metadata
from ckpt_core.dcp._reader import load_plain
from ckpt_core.errors import UnsafeCheckpointError
from ckpt_core.names import METADATA
from ckpt_core.storage import BIGGEST_SMALL_FILE


def check_stock(directory: str | os.PathLike[str]) -> None:
    """Check that a DCP directory can be loaded without running code that it holds.

    Its `.metadata` has to pass the allow-list, which also tells what may be read, and what it calls a value
    that is not a tensor has to be one that torch loads with `weights_only=True`. Not collective; ask on one
    rank. Links are followed, as stock DCP follows them: the directory is one that a person has named.

    Raises:
        UnsafeCheckpointError: stock DCP could run what is in it; `allow_pickle=True` is the way out.
        CorruptCheckpointError: a file is missing, or what `.metadata` says is impossible.
    """
    place = Path(directory)
    source = str(place / METADATA)
    try:
        content = read_linked(place / METADATA)
    except FileNotFoundError as error:
        raise corrupt(source, "missing: the save did not end, DCP cannot load this") from error
    metadata = _metadata(content, source)
    check_metadata(metadata, source, lambda path: (place / path).stat().st_size)
    for index, info in metadata.storage_data.items():
        if type(metadata.state_dict_metadata[index.fqn]) is BytesStorageMetadata:
            with (place / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                load_plain(stream.read(info.length), f"{place / info.relative_path}: {index.fqn!r:.200}")


def read_linked(path: Path) -> bytes:
    """Read a small file of a host's, links followed, once it is known to be a file and its size to be sane.

    Raises:
        FileNotFoundError: there is none.
        CorruptCheckpointError: it is something else, which could be waited for in vain, or is too large.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(str(path), "is a directory, pipe or device, where a file should be")
    if found.st_size > BIGGEST_SMALL_FILE:
        raise corrupt(str(path), f"has {found.st_size} bytes, and may have {BIGGEST_SMALL_FILE} at most")
    return path.read_bytes()


@contextmanager
def without_pickle() -> Generator[None]:
    """Have stock DCP read `.metadata` through the allow-list and values with `weights_only=True`.

    `check_stock` refuses with better words, before anything live has changed; this holds for the bytes that
    are used. It changes DCP's own classes for as long as it lasts: for one thread at a time.
    """
    reader: Any = FileSystemReader
    planner: Any = DefaultLoadPlanner
    stock = reader.read_metadata, planner.load_bytes
    reader.read_metadata, planner.load_bytes = _stock_metadata, _stock_value
    try:
        yield
    finally:
        reader.read_metadata, planner.load_bytes = stock


def _metadata(content: bytes, source: str) -> Metadata:
    try:
        return load_metadata(content, source)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{error}. If you trust who wrote this checkpoint, load it with allow_pickle=True"
        ) from error


def _stock_metadata(self: Any, *_: Any, **asked: Any) -> Metadata:
    """Stands for `FileSystemReader.read_metadata`."""
    path = self._get_metadata_path(asked.get("rank"))
    with self.fs.create_stream(path, "rb") as stream:
        metadata = _metadata(stream.read(), str(path))
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _stock_value(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Stands for `DefaultLoadPlanner.load_bytes`."""
    key = read_item.dest_index.fqn
    loaded = load_plain(value.getvalue(), repr(key))
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded
