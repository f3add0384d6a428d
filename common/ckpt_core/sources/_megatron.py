"""Checkpoints of Megatron-Core (`torch_dist`): stock DCP, and more beside it.

Weights are in the item `model`; all else has its own name, as `optimizer.state.exp_avg.…` and
`chained_0.optimizer.state.…` have; `common.pt` is the item `common`. Up to 0.13 the optimizer's shards may be
ranges of flattened shards of parameters, stored as tensors with one dimension more: they are described in the
shapes of the parameters.

Source: `dist_checkpointing/strategies/{torch,resharding}.py` of Megatron-Core 0.12 and 0.16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckpt_core.dcp import ChunkLocation, boxes_of_range
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.formats.codec import damage
from ckpt_core.sources._deepspeed import find_data
from ckpt_core.sources._layout import Layout, Locator
from ckpt_core.sources._torch_save import layout_of, read_tree
from ckpt_core.storage import Storage, read_small

_CONFIG: Final = "metadata.json"
_COMMON: Final = "common.pt"
_BACKEND: Final = "torch_dist"
_ORIGINAL: Final = "nd_reformulated_orig_global_shape"
_MOST_CONFIG_BYTES: Final = 1 << 16


def find_common(storage: Storage, directory: str) -> Layout | None:
    """Describe what is beside DCP's files; None if Megatron-Core wrote none."""
    try:
        config = json.loads(read_small(storage, f"{directory}/{_CONFIG}", _MOST_CONFIG_BYTES))
        if config["sharded_backend"] != _BACKEND:
            return None
    except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):
        return None
    try:
        tree = read_tree(storage, directory, _COMMON, find=find_data)
    except FileNotFoundError as error:
        raise damage(f"{storage.url}/{directory}/{_COMMON}", "missing") from error
    step = tree.get("iteration") if isinstance(tree, dict) else None
    return layout_of("a checkpoint of Megatron-Core", {"common": tree}, step=step)


@final
@dataclass(frozen=True, slots=True)
class _Run:
    """A box of a tensor in a stored chunk of which it is a part.

    Attributes:
        stored: the chunk, under its name there.
        start: of the box, in elements of the chunk.
        whole: whether the box is the chunk as it is stored.
    """

    stored: MetadataIndex
    start: int
    sizes: tuple[int, ...]
    whole: bool


@final
class MegatronLocator:
    """Locator of the entries of Megatron-Core, and their metadata as it means it.

    DCP's own metadata was checked, and `places` locates its entries.

    Raises:
        CorruptCheckpointError: shapes of flattened tensors are none, or two entries have one name.
    """

    def __init__(self, stored: Metadata, places: Locator, place: str) -> None:
        self.metadata = Metadata({}, {}, {})
        self._places = places
        self._runs: dict[MetadataIndex, _Run] = {}
        for key, entry in stored.state_dict_metadata.items():
            self._add(key, entry, stored, place)
        if len(self.metadata.state_dict_metadata) != len(stored.state_dict_metadata):
            raise damage(place, "two entries have one name")

    def _add(self, key: str, entry: Any, stored: Metadata, place: str) -> None:
        is_tensor = isinstance(entry, TensorStorageMetadata)
        path = ("model", key) if is_tensor and "optimizer" not in key.split(".")[:2] else (key,)
        name = ".".join(path)
        boxes: list[tuple[MetadataIndex, _Run]] = [
            (MetadataIndex(name), _Run(MetadataIndex(key), 0, (), whole=True))
        ]
        if is_tensor:
            original = (vars(stored).get("mcore_data") or {}).get(key, {}).get(_ORIGINAL)
            try:
                runs = list(_whole(key, entry) if original is None else _flattened(key, entry, original))
            except (TypeError, ValueError) as error:
                raise damage(place, f"{key!r:.200} is flattened in a way that cannot be: {error}") from error
            size = entry.size if original is None else torch.Size(original)
            boxes = [(MetadataIndex(name, torch.Size(offsets)), run) for offsets, run in runs]
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(run.sizes)) for offsets, run in runs
            ]
            entry = TensorStorageMetadata(entry.properties, size, chunks)
        self._runs.update(boxes)
        self.metadata.state_dict_metadata[name] = entry
        self.metadata.planner_data[name] = path
        for index, run in boxes:
            self.metadata.storage_data[index] = stored.storage_data[run.stored]

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        """Locate these entries; errors as by `ChunkLocator.find`.

        Raises:
            IncompatibleCheckpointError: bytes of a flattened chunk do not lie one after another.
        """
        runs = {index: self._runs[index] for index in indices}
        places = self._places.find({run.stored for run in runs.values()})
        return {index: _narrowed(places[run.stored], run) for index, run in runs.items()}


def _whole(key: str, entry: TensorStorageMetadata) -> Iterator[tuple[tuple[int, ...], _Run]]:
    for chunk in entry.chunks:
        yield chunk.offsets, _Run(MetadataIndex(key, chunk.offsets), 0, chunk.sizes, whole=True)


def _flattened(
    key: str, entry: TensorStorageMetadata, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], _Run]]:
    """Yield offsets and boxes of a tensor of `shape` whose shards were flattened.

    It is stored as (numbers of shards in each dimension, elements of a shard), in chunks (1, …, 1, range).
    """
    *counts, length = entry.size
    shard = tuple(size // max(1, count) for size, count in zip(shape, counts, strict=True))
    if prod(shard) != length or any(
        n * count != size for n, count, size in zip(shard, counts, shape, strict=True)
    ):
        raise ValueError(f"stored as {tuple(entry.size)}, and of shape {tuple(shape)}")
    for chunk in entry.chunks:
        *at, first = chunk.offsets
        *ones, size = chunk.sizes
        if size and set(ones) - {1}:
            raise ValueError(f"a chunk of {tuple(chunk.sizes)}")
        start = 0
        for box in boxes_of_range(shard, first, first + size):
            sizes = tuple(stop - low for low, stop in box)
            offsets = tuple(n * own + low for n, own, (low, _) in zip(at, shard, box, strict=True))
            yield offsets, _Run(MetadataIndex(key, chunk.offsets), start, sizes, whole=prod(sizes) == size)
            start += prod(sizes)


def _narrowed(place: ChunkLocation, run: _Run) -> ChunkLocation:
    """Return the location of a part of a chunk."""
    if place.form is None or (run.whole and place.shape == run.sizes):
        return place
    dtype, payload = place.form[0], place.payload
    if payload is None:
        raise IncompatibleCheckpointError(f"{place.path}: {place.key!r:.200}: {place.reason or 'wrapped'}")
    size = prod(run.sizes) * dtype.itemsize
    crc32 = payload.crc32 if run.whole else None
    payload = replace(
        payload, offset=payload.offset + run.start * dtype.itemsize, size_bytes=size, crc32=crc32
    )
    return replace(place, shape=run.sizes, payload=payload)
