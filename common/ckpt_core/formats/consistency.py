"""Consistency of `.metadata` with the files beside it.

Checked by a save before it commits, by a load before it reads, and by a verification, which works without
torch. What tensors have in common is checked once, and places by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckpt_core.formats.codec import MAX_COUNT, damage
from ckpt_core.formats.dcp_metadata import ImpossibleError
from ckpt_core.formats.index import Boxes, Index, Ints, Places, index_of

__all__ = ["MAX_DIMS", "ImpossibleError", "check", "check_boxes", "check_metadata"]

MAX_DIMS: Final = 64
"""What torch itself allows."""

_MOST_PAIRS: Final = 20_000_000
_MOST_ELEMENTS: Final = 1 << 62
"""Up to here numpy counts exactly."""
_BITS_PER_BYTE: Final = 8


def check_metadata(metadata: Any, path: str, sizes: Callable[[str], int]) -> None:
    """Check DCP's `Metadata`, or what stands for it, as `check` does."""
    try:
        index = index_of(metadata)
    except (ImpossibleError, OverflowError) as error:
        raise damage(path, f"says what cannot be: {error}") from error
    check(index, path, sizes)


def check(index: Index, path: str, size_of: Callable[[str], int]) -> None:
    """Check that an index describes whole tensors in files that can hold them.

    Every entry is inside its file; every tensor's chunks are inside its shape and cover each element exactly
    once; every chunk has an entry of at least a bit for each element. `size_of` tells the size of a data file
    by its path in `.metadata`, or raises FileNotFoundError.

    Raises:
        CorruptCheckpointError: it does not.
    """
    places = index.stored()
    try:
        _check_files(index, places, size_of)
        if (missing := _missing(index, places)) is not None:
            raise ImpossibleError(missing)
        known: dict[int, Ints] = {}
        for name, each in zip(index.names, index.entries, strict=True):
            if each is not None and id(each) not in known:
                known[id(each)] = check_boxes(name, each.size, each.boxes)
        _check_lengths(index, places, known)
    except ImpossibleError as error:
        raise damage(path, f"says what cannot be: {error}") from error


def _check_files(index: Index, places: Places, size_of: Callable[[str], int]) -> None:
    stops = places.offset + places.length
    ends = np.full(len(places.files), -1, np.int64)
    np.maximum.at(ends, places.file, stops)
    for number, (file, end) in enumerate(zip(places.files, ends.tolist(), strict=True)):
        if end < 0:
            continue
        try:
            size = size_of(file)
        except FileNotFoundError as error:
            raise ImpossibleError(f"{file!r} is missing") from error
        if end > size:
            row = np.flatnonzero((places.file == number) & (stops == end))[0]
            key = index.names[places.name[row]]
            raise ImpossibleError(f"{key!r:.200} ends at byte {end} of {file!r}, which has {size}")


def _missing(index: Index, places: Places) -> str | None:
    """Describe a chunk without a place; no two places are of one chunk."""
    distinct = {id(each): len(set(map(tuple, each.starts.tolist()))) for each in index.boxes}
    numbers = [1 if each is None else distinct[id(each.boxes)] for each in index.entries]
    if sum(numbers) == len(places.name):
        return None
    found = np.bincount(places.name, minlength=len(numbers)).tolist()
    name = next(name for name, number in enumerate(numbers) if number != found[name])
    entry = index.entries[name]
    if entry is None:
        return f"{index.names[name]!r:.200} is nowhere"
    there = {tuple(each) for each in entry.boxes.starts[places.box[places.name == name]].tolist()}
    start = next(start for start in map(tuple, entry.boxes.starts.tolist()) if start not in there)
    return f"the chunk of {index.names[name]!r:.200} at {start} is nowhere"


def _check_lengths(index: Index, places: Places, elements: dict[int, Ints]) -> None:
    """Check that every chunk has a place of at least a bit for each element."""
    firsts = dict(zip(elements, np.cumsum([1, *map(len, elements.values())]).tolist(), strict=False))
    flat = np.concatenate([np.zeros(1, np.int64), *elements.values()])  # a byte entry has none
    first = np.array([1 if each is None else firsts[id(each)] for each in index.entries], np.int64)
    needed = flat[first[places.name] + places.box] if len(first) else flat[:0]
    # Quantised tensors have fewer bytes than their dtype says; where a chunk is found, it is compared.
    for row in np.flatnonzero(needed > places.length * _BITS_PER_BYTE).tolist():
        if places.transforms is None or not places.transforms[row]:
            key, entry = index.names[places.name[row]], index.entries[places.name[row]]
            start = () if entry is None else tuple(entry.boxes.starts[places.box[row]].tolist())
            raise ImpossibleError(
                f"the chunk of {key!r:.200} at {start} has {needed[row]} elements, its "
                f"place in {places.files[places.file[row]]!r} {places.length[row]} bytes"
            )


def check_boxes(key: str, shape: Sequence[int], boxes: Boxes) -> Ints:
    """Check that boxes make up a tensor; return the elements of each, at most 2**62.

    Raises:
        ImpossibleError: they overlap, leave holes or exceed the shape.
    """
    if len(shape) > MAX_DIMS or any(not 0 <= length <= MAX_COUNT for length in shape):
        raise ImpossibleError(f"{key!r:.200} has the shape {tuple(shape)!s:.200}")
    starts, sizes, whole = boxes.starts, boxes.sizes, prod(shape)
    full = (sizes != 0).all(axis=1)
    inside = (sizes <= np.array(shape, np.int64) - starts) | ~full[:, None]
    wrong = np.flatnonzero(~(inside & (starts >= 0) & (sizes >= 0)).all(axis=1))
    if len(wrong):
        start, size = (tuple(each[wrong[0]].tolist()) for each in (starts, sizes))
        raise ImpossibleError(
            f"the chunk of {key!r:.200} at {start!s:.200} of shape {size!s:.200} is "
            f"not inside the tensor's {tuple(shape)!s:.200}"
        )
    exact: npt.NDArray[Any] = sizes if whole < _MOST_ELEMENTS else sizes.astype(object)
    elements = exact.prod(axis=1)
    volume = sum(elements.tolist())
    if full.sum() > 1 and volume >= whole:
        _check_disjoint(key, starts[full], sizes[full])
    if volume != whole:
        raise ImpossibleError(f"the chunks of {key!r:.200} have {volume} of its {whole} elements")
    capped: Ints = np.minimum(elements, _MOST_ELEMENTS).astype(np.int64)
    return capped


def _check_disjoint(key: str, starts: Ints, sizes: Ints) -> None:
    if _is_grid(starts, sizes):
        return
    order = np.lexsort(starts.T[::-1]) if starts.shape[1] else np.arange(len(starts))
    starts, stops = starts[order], starts[order] + sizes[order]
    pairs = 0
    active = np.empty(0, np.int64)
    for row in range(len(starts)):
        active = active[(stops[active, :1] > starts[row, :1]).all(axis=1)]
        pairs += len(active)
        if pairs > _MOST_PAIRS:
            raise ImpossibleError(f"{key!r:.200} has too many irregular chunks to check for overlap")
        both = (starts[active] < stops[row]) & (starts[row] < stops[active])
        for other in active[both.all(axis=1)].tolist():
            one, two = tuple(starts[other].tolist()), tuple(starts[row].tolist())
            raise ImpossibleError(f"the chunks of {key!r:.200} at {one} and {two} overlap")
        active = np.append(active, row)


def _is_grid(starts: Ints, sizes: Ints) -> bool:
    """Return whether the chunks are distinct cells of one grid, and so disjoint.

    Nearly all shardings are.
    """
    if not starts.shape[1] or len(np.unique(starts, axis=0)) != len(starts):
        return False
    for start, size in zip(starts.T, sizes.T, strict=True):
        cuts = np.unique(np.stack([start, start + size], axis=1), axis=0)
        if (cuts[:-1, 1] > cuts[1:, 0]).any():
            return False
    return True
