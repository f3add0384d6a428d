"""Layouts of live tensors: their boxes on every rank, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ckpt_core._torch_internals import ShardedTensor, StridedShard, chunks_of

IntArray: TypeAlias = npt.NDArray[np.int64]

_KNOWN: Final = frozenset({Shard, StridedShard, Replicate})

_Place: TypeAlias = tuple[IntArray, int, Placement]
"""Of one dimension of a mesh: the coordinate of every rank, its length, and a tensor's placement."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """The parts of one tensor on all ranks; ranks may share a part or hold several.

    Attributes:
        ranks: int64 [N], the rank that holds each box.
        lo: int64 [N, D], start of each box, in elements of the whole tensor.
        hi: int64 [N, D], its stop, exclusive. A box may be empty.
    """

    ranks: IntArray
    lo: IntArray
    hi: IntArray

    def __post_init__(self) -> None:
        if not self.ranks.shape == self.lo.shape[:1] == self.hi.shape[:1] or self.lo.shape != self.hi.shape:
            raise ValueError(f"boxes of shapes {self.ranks.shape}, {self.lo.shape}, {self.hi.shape}")

    def of(self, rank: int) -> Boxes:
        """Select the boxes of one rank."""
        own = self.ranks == rank
        return Boxes(ranks=self.ranks[own], lo=self.lo[own], hi=self.hi[own])

    def overlap(self, lo: IntArray, hi: IntArray) -> npt.NDArray[np.bool_]:
        """Return [M, N]: whether these boxes (N) overlap the given ones (rows of [M, D])."""
        own, others = np.all(self.hi > self.lo, axis=1), np.all(hi > lo, axis=1)
        common: npt.NDArray[np.bool_] = own[None, :] & others[:, None]
        for dim in range(lo.shape[1]):
            common &= (lo[:, None, dim] < self.hi[None, :, dim]) & (self.lo[None, :, dim] < hi[:, None, dim])
        return common

    def contain(self, chunk: ChunkStorageMetadata) -> bool:
        """Return whether one of these boxes contains all of `chunk`."""
        lo = np.array(chunk.offsets, dtype=np.int64)
        hi = lo + np.array(chunk.sizes, dtype=np.int64)
        if not (hi > lo).all():
            return True
        return bool(((self.lo <= lo) & (hi <= self.hi)).all(axis=1).any())


@final
class Layouts:
    """The boxes of live tensors, cached by layout. For one load only: it holds meshes.

    Nothing is communicated: a DTensor's mesh and placements and a ShardedTensor's metadata are equal on all
    of its ranks, and a plain tensor is assumed to be whole on every rank of the job.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._known: dict[Any, Boxes | None] = {}

    def boxes_of(self, value: torch.Tensor) -> Boxes | None:
        """Compute every rank's box of `value`; None if unknown: then it cannot be shared.

        Unknown are pending sums (`Partial`), shards that are not boxes, placements of unknown kinds, and
        tensors whose own shard contradicts the layout.
        """
        boxes = self._of_layout(value)
        if boxes is None or not _holds_its_own(value, boxes.of(self._rank)):
            return None
        return boxes

    def _of_layout(self, value: torch.Tensor) -> Boxes | None:
        if isinstance(value, ShardedTensor):
            return _sharded_boxes(value)
        key: Any = (value.shape,)
        if isinstance(value, DTensor):
            key = (value.shape, value.device_mesh, value.placements)
        if key not in self._known:
            self._known[key] = self._compute(value)
        return self._known[key]

    def _compute(self, value: torch.Tensor) -> Boxes | None:
        if isinstance(value, DTensor):
            mesh: IntArray = value.device_mesh.mesh.numpy().astype(np.int64)
            return placed_boxes(value.shape, mesh, value.placements)
        ranks = np.arange(self._world_size, dtype=np.int64)
        return placed_boxes(value.shape, ranks, [Replicate()])


def placed_boxes(shape: Sequence[int], mesh: IntArray, placements: Sequence[Placement]) -> Boxes | None:
    """Compute a tensor's boxes on a mesh of ranks; None if its shards are not boxes."""
    coordinates = np.indices(mesh.shape, dtype=np.int64).reshape(mesh.ndim, -1)
    places = list(zip(coordinates, mesh.shape, placements, strict=True))
    if not _KNOWN.issuperset(map(type, placements)):
        return None
    ends: list[tuple[IntArray, IntArray]] = []
    for dim, size in enumerate(shape):
        cuts = [place for place in places if _cuts(place[2], dim)]
        strided = any(isinstance(placement, StridedShard) for _, _, placement in cuts)
        found = _strided_ends(size, mesh.size, cuts) if strided else _even_ends(size, mesh.size, cuts)
        if found is None:
            return None
        ends.append(found)
    return Boxes(
        ranks=mesh.reshape(-1),
        lo=_columns([lo for lo, _ in ends], mesh.size),
        hi=_columns([hi for _, hi in ends], mesh.size),
    )


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | StridedShard) and placement.dim == dim


def _columns(columns: list[IntArray], rows: int) -> IntArray:
    return np.stack(columns, axis=1) if columns else np.zeros((rows, 0), dtype=np.int64)


def _even_ends(size: int, count: int, cuts: Iterable[_Place]) -> tuple[IntArray, IntArray]:
    """Return start and stop of each rank's part of one dimension, as by `torch.chunk`."""
    lo, hi = np.zeros(count, dtype=np.int64), np.full(count, size, dtype=np.int64)
    for coordinate, parts, _ in cuts:
        length = hi - lo
        step = -(-length // parts)
        start = np.minimum(step * coordinate, length)
        lo, hi = lo + start, lo + np.minimum(start + step, length)
    return lo, hi


def _strided_ends(size: int, count: int, cuts: Iterable[_Place]) -> tuple[IntArray, IntArray] | None:
    """Do the same as `_even_ends` for strided shards; None if a rank's part has holes."""
    everything = np.arange(size, dtype=np.int64)
    kept: dict[tuple[int, ...], IntArray] = {(): everything}
    path: list[tuple[int, ...]] = [()] * count
    for coordinate, parts, placement in cuts:
        split = {before: _split(indices, parts, placement) for before, indices in kept.items()}
        kept = {(*before, part): pieces[part] for before, pieces in split.items() for part in range(parts)}
        path = [(*before, int(part)) for before, part in zip(path, coordinate, strict=True)]
    if any(len(indices) and indices[-1] - indices[0] + 1 != len(indices) for indices in kept.values()):
        return None
    ends = {way: (int(i[0]), int(i[-1]) + 1) if len(i) else (size, size) for way, i in kept.items()}
    both = np.array([ends[way] for way in path], dtype=np.int64).reshape(count, 2)
    return both[:, 0], both[:, 1]


def _split(indices: IntArray, parts: int, placement: Placement) -> list[IntArray]:
    if not isinstance(placement, StridedShard):
        return _chunks(indices, parts)
    strided = [_chunks(piece, parts) for piece in _chunks(indices, int(placement.split_factor))]
    return [np.concatenate([piece[part] for piece in strided]) for part in range(parts)]


def _chunks(indices: IntArray, parts: int) -> list[IntArray]:
    """Split as `torch.chunk` does, with empty chunks at the end."""
    step = -(-len(indices) // parts)
    return [indices[step * part : step * (part + 1)] for part in range(parts)]


def _sharded_boxes(value: ShardedTensor) -> Boxes | None:
    metadata = value.metadata()
    placements = [shard.placement for shard in metadata.shards_metadata]
    ranks = [None if place is None else place.rank() for place in placements]
    if None in ranks:
        return None
    shape = (len(ranks), len(metadata.size))
    lo = np.array([shard.shard_offsets for shard in metadata.shards_metadata], dtype=np.int64).reshape(shape)
    sizes = np.array([shard.shard_sizes for shard in metadata.shards_metadata], dtype=np.int64)
    return Boxes(ranks=np.array(ranks, dtype=np.int64), lo=lo, hi=lo + sizes.reshape(shape))


def _holds_its_own(value: torch.Tensor, own: Boxes) -> bool:
    """Return whether DCP's reads into `value` on this rank are inside its boxes."""
    if isinstance(value, DTensor):
        if not len(own.ranks):  # this rank is not in the mesh
            return True
        sizes, held = (own.hi - own.lo)[0].tolist(), list(value.to_local().shape)
        if sizes != held and not (0 in sizes and 0 in held):
            return False
    return all(own.contain(chunk) for chunk in chunks_of(value))
