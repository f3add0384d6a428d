"""Loads by stock DCP, which unpickles files: checked before and during the load."""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_core._torch_internals import metadata_path, set_element
from ckpt_core.dcp._metadata import load_metadata
from ckpt_core.dcp._torch_zip import checked_zip
from ckpt_core.errors import ALLOW_PICKLE, UnsafeCheckpointError
from ckpt_core.formats.codec import corrupt, damage
from ckpt_core.formats.consistency import check_metadata
from ckpt_core.names import METADATA
from ckpt_core.storage import BIGGEST_SMALL_FILE


def load_plain(content: bytes, name: str) -> Any:
    """Check and deserialise a host's small file of `torch.save`: plain values only."""
    checked_zip(content, name)
    return load_value(content, name, allow_pickle=False)


def load_value(content: bytes, name: str, *, allow_pickle: bool) -> Any:
    """Deserialise the output of `torch.save`; run no code unless pickle is allowed.

    Raises:
        CorruptCheckpointError: `torch.save` did not write it like that.
        UnsafeCheckpointError: it holds objects that only pickle can rebuild.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        raise UnsafeCheckpointError(
            f"{name} holds Python objects that only pickle can rebuild. If you trust who wrote this "
            f"checkpoint, give {ALLOW_PICKLE}"
        ) from error
    except Exception as error:  # a forged archive raises nearly anything; the error names entry and cause
        raise damage(name, f"{type(error).__name__}: {error!s:.500}") from error


def load_chunk(
    content: bytes, name: str, form: tuple[torch.dtype, tuple[int, ...]] | None = None
) -> torch.Tensor:
    """Verify and load a tensor chunk that is not raw bytes, such as a transposed one.

    `form` is the dtype and shape that `.metadata` says, None if it is not known.

    Raises:
        CorruptCheckpointError: it is damaged, or holds no tensor, or one of another form.
        UnsafeCheckpointError: the tensor cannot be rebuilt without executing foreign code.
    """
    checked_zip(content, name)
    try:
        tensor = load_value(content, name, allow_pickle=False)
    except UnsafeCheckpointError as error:
        reason = str(error.__cause__).strip().splitlines()[0]
        raise UnsafeCheckpointError(
            f"{name} is not a plain tensor, and none of its code was executed: {reason}"
        ) from error.__cause__
    if not isinstance(tensor, torch.Tensor):
        raise damage(name, f"holds a {type(tensor).__name__}, not a tensor")
    own = tensor.dtype, tuple(tensor.shape)
    if form not in {None, own}:
        raise damage(name, f".metadata says {form}, its own pickle {own!s:.200}")
    return tensor


def check_stock(directory: str | os.PathLike[str]) -> None:
    """Check that a DCP directory can be loaded without running code that it holds.

    Its `.metadata` must pass the allow-list, and torch must be able to load its byte entries with
    `weights_only=True`. Not collective; call it on one rank. Links are followed, as stock DCP follows them:
    the user has named the directory.

    Raises:
        UnsafeCheckpointError: stock DCP could run code in it; `allow_pickle=True` permits that.
        CorruptCheckpointError: a file is missing, or `.metadata` is impossible.
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
    """Read a host's small file, links followed, after a check of its type and size.

    Raises:
        CorruptCheckpointError: it is too large, or no regular file: a read of a pipe could block forever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(str(path), "is a directory, pipe or device, where a file should be")
    if found.st_size > BIGGEST_SMALL_FILE:
        raise corrupt(str(path), f"has {found.st_size} bytes, and may have {BIGGEST_SMALL_FILE} at most")
    return path.read_bytes()


@contextmanager
def without_pickle() -> Generator[None]:
    """Restrict stock DCP to the allow-list for `.metadata`, and to plain values.

    `check_stock` refuses with better messages, before anything live has changed; this covers the bytes that
    are actually read. It patches DCP's own classes meanwhile: for one thread at a time.
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
            f"{error}. If you trust who wrote this checkpoint, give {ALLOW_PICKLE}"
        ) from error


def _stock_metadata(self: Any, *_: Any, **asked: Any) -> Metadata:
    """Replace `FileSystemReader.read_metadata`."""
    path = metadata_path(self, asked.get("rank"))
    with self.fs.create_stream(path, "rb") as stream:
        metadata = _metadata(stream.read(), str(path))
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _stock_value(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Replace `DefaultLoadPlanner.load_bytes`."""
    key = read_item.dest_index.fqn
    loaded = load_plain(value.getvalue(), repr(key))
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded
