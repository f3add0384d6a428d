"""Consistency of `.metadata` with the files beside it.

Checked by a save before it commits, by a load before it reads, and by a verification. The last works without
torch, so that nothing here needs DCP's classes: any object with their attributes will do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Any, Final, TypeAlias

from ckpt_core.formats.codec import MAX_COUNT, damage

MAX_DIMS: Final = 64
"""What torch itself allows."""

_MOST_PAIRS: Final = 20_000_000
# Of DCP, or what stands for it: `Metadata`, `TensorStorageMetadata`, `ChunkStorageMetadata`, `_StorageInfo`.
_Metadata: TypeAlias = Any
_Tensor: TypeAlias = Any
_Chunk: TypeAlias = Any
_Entry: TypeAlias = Any

_BITS_PER_BYTE: Final = 8
_Entries: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _Entry]
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class ImpossibleError(ValueError):
    """What `.metadata` says of a tensor or file cannot be."""


def check_metadata(metadata: _Metadata, path: str, sizes: Callable[[str], int]) -> None:
    """Check that metadata describes whole tensors in files that can hold them.

    Every entry is inside its file; every tensor's chunks are inside its shape and cover each element exactly
    once; every chunk has an entry of at least a bit for each element, and every entry has a chunk. `sizes`
    tells the size of a data file by its path in `metadata`, or raises FileNotFoundError.
    """
    entries: _Entries = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    try:
        _check_files(entries, sizes)
        num_chunks = 0
        for key, entry in metadata.state_dict_metadata.items():
            if _is_tensor(entry):
                num_chunks += _check_tensor(key, entry, entries)
            elif (key, None) not in entries:
                raise ImpossibleError(f"{key!r:.200} is nowhere")
            else:
                num_chunks += 1
        if num_chunks != len(entries):
            described = {
                (key, None if chunk is None else chunk.offsets)
                for key, entry in metadata.state_dict_metadata.items()
                for chunk in (entry.chunks if _is_tensor(entry) else [None])
            }
            key = next(key for key, offset in entries if (key, offset) not in described)
            raise ImpossibleError(f"{key!r:.200} has a place but is not described")
    except ImpossibleError as error:
        raise damage(path, f"says what cannot be: {error}") from error


def _is_tensor(entry: object) -> bool:
    return hasattr(entry, "chunks")


def _check_files(entries: _Entries, sizes: Callable[[str], int]) -> None:
    ends: defaultdict[str, int] = defaultdict(int)
    for info in entries.values():
        end = info.offset + info.length
        if end > ends[info.relative_path]:
            ends[info.relative_path] = end
    for file, end in ends.items():
        try:
            size = sizes(file)
        except FileNotFoundError as error:
            raise ImpossibleError(f"{file!r} is missing") from error
        if end > size:
            key = next(
                key
                for (key, _), info in entries.items()
                if info.relative_path == file and info.offset + info.length == end
            )
            raise ImpossibleError(f"{key!r:.200} ends at byte {end} of {file!r}, which has {size}")


def _check_tensor(key: str, entry: _Tensor, entries: _Entries) -> int:
    """Check one tensor; return the number of its entries."""
    for chunk in entry.chunks:
        info = entries.get((key, chunk.offsets))
        if info is None:
            raise ImpossibleError(f"the chunk of {key!r:.200} at {tuple(chunk.offsets)} is nowhere")
        # Quantised tensors have fewer bytes than their dtype says; where a chunk is found, it is compared.
        if prod(chunk.sizes) > info.length * _BITS_PER_BYTE and not info.transform_descriptors:
            raise ImpossibleError(
                f"the chunk of {key!r:.200} at {tuple(chunk.offsets)} has {prod(chunk.sizes)} elements, its "
                f"place in {info.relative_path!r} {info.length} bytes"
            )
    return check_chunks(key, entry.size, entry.chunks)


def check_chunks(key: str, shape: Sequence[int], chunks: Sequence[_Chunk]) -> int:
    """Check that chunks make up a tensor; return how many, empty ones at a place once."""
    if len(shape) > MAX_DIMS or any(not 0 <= length <= MAX_COUNT for length in shape):
        raise ImpossibleError(f"{key!r:.200} has the shape {tuple(shape)!s:.200}")
    boxes: list[_Box] = []
    empty: set[tuple[int, ...]] = set()
    volume = 0
    for chunk in chunks:
        own = _volume(key, chunk, shape)
        if own:
            volume += own
            boxes.append((chunk.offsets, chunk.sizes))
        else:
            empty.add(chunk.offsets)
    if len(boxes) > 1 and volume >= prod(shape):
        _check_disjoint(key, boxes)
    if volume != prod(shape):
        raise ImpossibleError(f"the chunks of {key!r:.200} have {volume} of its {prod(shape)} elements")
    # Several ranks without elements of a tensor may each describe the same empty chunk.
    return len(boxes) + len(empty.difference(map(itemgetter(0), boxes)))


def _volume(key: str, chunk: _Chunk, shape: Sequence[int]) -> int:
    """Return the number of elements of a chunk; it must be inside the tensor."""
    offsets: tuple[int, ...] = chunk.offsets
    lengths: tuple[int, ...] = chunk.sizes
    if not len(offsets) == len(lengths) == len(shape):
        raise ImpossibleError(f"a chunk of {key!r:.200} has other dimensions than its shape {tuple(shape)}")
    volume = prod(lengths)
    for offset, length, whole in zip(offsets, lengths, shape, strict=True):
        if offset < 0 or length < 0 or (volume and offset + length > whole):
            raise ImpossibleError(
                f"the chunk of {key!r:.200} at {tuple(offsets)!s:.200} of shape {tuple(lengths)!s:.200} is "
                f"not inside the tensor's {tuple(shape)!s:.200}"
            )
    return volume


def _check_disjoint(key: str, boxes: Sequence[_Box]) -> None:
    if _is_grid(boxes):
        return
    ordered = sorted(boxes, key=itemgetter(0))
    pairs = 0
    active: list[_Box] = []
    for box in ordered:
        start = box[0][0]
        active = [other for other in active if other[0][0] + other[1][0] > start]
        pairs += len(active)
        if pairs > _MOST_PAIRS:
            raise ImpossibleError(f"{key!r:.200} has too many irregular chunks to check for overlap")
        for other in active:
            ranges = zip(*box, *other, strict=True)
            if all(a < b + b_length and b < a + a_length for a, a_length, b, b_length in ranges):
                raise ImpossibleError(
                    f"the chunks of {key!r:.200} at {tuple(other[0])} and {tuple(box[0])} overlap"
                )
        active.append(box)


def _is_grid(boxes: Sequence[_Box]) -> bool:
    """Return whether the chunks are distinct cells of one grid, and so disjoint.

    Nearly all shardings are.
    """
    if len({offsets for offsets, _ in boxes}) != len(boxes):
        return False
    for dim in range(len(boxes[0][0])):
        cuts = sorted({(offsets[dim], offsets[dim] + lengths[dim]) for offsets, lengths in boxes})
        if any(stop > start for (_, stop), (start, _) in pairwise(cuts)):
            return False
    return True
