"""Zips of `torch.save`, laid out ahead: one file, and the entries of DCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final, final

import numpy as np
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
from ckpt_core.convert._laid_out import Late, OutFile, OutPiece, Wanted
from ckpt_core.dcp import TensorForm, build_archive, bytes_of, encode_metadata, pickled_state, tensor_pickle
from ckpt_core.formats.checksums import crc32
from ckpt_core.names import METADATA, data_name
from ckpt_core.sources import Path

_ALIGNMENT: Final = 64
"""That of torch's own zips, which `mmap=True` relies on."""
FILE_BYTES: Final = 4 << 30
"""A data file of DCP begins no entry beyond it, so that several can be written and read at a time."""


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the source, as it will be in the output."""

    wanted: Wanted
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> Leaf:
        return Leaf(replace(self.wanted, dtype=dtype), dtype, self.shape)


def torch_file(path: str, state: Any) -> OutFile:
    """Lay out what `torch.save(state, path)` writes.

    A state is nested dicts, lists and tuples of plain values, tensors, arrays and `Leaf`s. Equal leaves are
    one storage, as tied tensors are.
    """
    payloads: list[Leaf | bytes] = []
    keys: dict[Leaf, str] = {}

    def stored(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stored(each) for key, each in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(map(stored, value))
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Leaf | torch.Tensor):
            return value.item() if isinstance(value, np.generic) else value
        key = str(len(payloads))
        if isinstance(value, Leaf):
            key = keys.setdefault(value, key)
        if key == str(len(payloads)):
            payloads.append(value if isinstance(value, Leaf) else bytes(bytes_of(value.cpu().contiguous())))
        return TensorForm(value.dtype, tuple(value.shape), key)

    return OutFile(path=path, pieces=_archive(pickled_state(stored(state)), payloads)[0])


def dcp_files(
    leaves: Mapping[str, tuple[Path, Leaf]], values: Mapping[str, tuple[Path, bytes]]
) -> list[OutFile]:
    """Lay out a checkpoint of stock DCP: data files, and `.metadata` last.

    By DCP's name there are paths in the nested state, with tensors, and with values as of `torch.save`.
    """
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in values}
    paths = {name: path for name, (path, _) in (*values.items(), *leaves.items())}
    places: dict[MetadataIndex, StorageInfo] = {}
    files: list[list[OutPiece]] = [[]]
    size = first = 0
    for name, (_, content) in values.items():
        places[MetadataIndex(name)] = StorageInfo(data_name(0, 0), size, len(content))
        files[0].append(content)
        size += len(content)
    for name, (_, leaf) in leaves.items():
        if size >= FILE_BYTES:
            files.append([])
            size = first = 0
        offsets = torch.Size([0] * len(leaf.shape))
        pieces, length = _archive(tensor_pickle(leaf.dtype, leaf.shape), [leaf], offset=size, first=first)
        entries[name] = TensorStorageMetadata(
            TensorProperties(leaf.dtype),
            torch.Size(leaf.shape),
            [ChunkStorageMetadata(offsets, torch.Size(leaf.shape))],
        )
        places[MetadataIndex(name, offsets)] = StorageInfo(data_name(0, len(files) - 1), size, length)
        files[-1] += pieces
        size, first = size + length, first + 1
    metadata = encode_metadata(Metadata(entries, planner_data=paths), places)
    data = [
        OutFile(path=data_name(0, number), pieces=pieces) for number, pieces in enumerate(files) if pieces
    ]
    return [*data, OutFile(path=METADATA, pieces=[metadata])]


def _archive(
    pickled: bytes, payloads: Sequence[Leaf | bytes], *, offset: int = 0, first: int = 0
) -> tuple[list[OutPiece], int]:
    """Lay out one zip behind so many bytes, and `Wanted`s; return its pieces and size."""
    known = [
        (len(each), crc32(each)) if isinstance(each, bytes) else (each.size_bytes, 0) for each in payloads
    ]
    archive = build_archive(pickled, known, offset=offset, alignment=_ALIGNMENT, streamed=True)
    pieces: list[OutPiece] = [archive.frames[0]]
    at, number = len(archive.frames[0]), first
    numbers: dict[int, int] = {}
    for place, (payload, (size, _)) in enumerate(zip(payloads, known, strict=True)):
        is_last = place + 1 == len(payloads)
        frame, at = archive.frames[place + 1], at + size
        if not isinstance(payload, bytes):
            numbers[place], number = number, number + 1
        filled = numbers.items() if is_last else [(place, numbers[place])] if place in numbers else []
        late = [
            (field - at, index)
            for each, index in filled
            for field in archive.crc_fields[each]
            if at <= field < at + len(frame)
        ]
        pieces += [payload if isinstance(payload, bytes) else payload.wanted]
        pieces.append(Late(len(frame), partial(_with_checksums, frame, late)) if late else frame)
        at += len(frame)
    return pieces, archive.size_bytes


def _with_checksums(frame: bytes, fields: Sequence[tuple[int, int]], crcs: Sequence[int]) -> bytes:
    """Fill in CRC-32s: (offset in the frame, number of the `Wanted`)."""
    content = bytearray(frame)
    for offset, index in fields:
        content[offset : offset + 4] = crcs[index].to_bytes(4, "little")
    return bytes(content)
