"""Checksums of tensors that do not depend on how ranks share them.

A checksum is the sum, modulo 2^64, of the tensor's words of 8 bytes, each times an odd factor that depends on
its position in the whole tensor. Ranks add up the sums of their shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ckpt_core._torch_internals import ShardedTensor, chunks_of, inner_tensors, is_wrapped, process_group_of

_WORD: Final = 8
_TABLE: Final = 1 << 16
_UNITS_AT_ONCE: Final = 1 << 20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS: Final = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)


class _Box(NamedTuple):
    """A region of a tensor: start, size, and the tensor's shape, in units."""

    starts: Sequence[int]
    sizes: Sequence[int]
    whole: Sequence[int]


def own_checksum(tensor: torch.Tensor) -> int:
    """Compute this rank's share of the checksum of a tensor, a signed integer.

    A rank whose shard another one holds, too, has none unless it is the first of them.
    """
    if isinstance(tensor, ShardedTensor):
        shards = [(each.tensor, each.metadata.shard_offsets) for each in tensor.local_shards()]
        return _wrapped(sum(_of_box(local, offsets, tensor.metadata().size) for local, offsets in shards))
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        local = tensor.to_local()
        if coordinate is None or not local.numel() or _is_copy(tensor, coordinate):
            return 0
        (chunk,) = chunks_of(tensor)
        return _of_box(local, chunk.offsets, tensor.shape)
    if is_wrapped(tensor):
        parts = [part for _, part in inner_tensors(tensor)]
        keyed = zip(_mixed(torch.arange(1, len(parts) + 1)).tolist(), parts, strict=True)
        return _wrapped(sum((2 * key + 1) * own_checksum(part) for key, part in keyed))
    return _of_box(tensor, [0] * tensor.dim(), tensor.shape)


def add_up(tensors: Mapping[str, torch.Tensor], own: Mapping[str, int]) -> dict[str, str]:
    """Add up the ranks' shares; return the checksums in hexadecimal.

    Collective over each mesh.

    Args:
        tensors: the tensors, the same on all ranks that share them.
        own: this rank's share of each.
    """
    sums = {name: own[name] for name in tensors}
    shared: dict[Any, list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, DTensor):
            shared.setdefault(tensor.device_mesh, []).append(name)
        elif isinstance(tensor, ShardedTensor):
            shared.setdefault(process_group_of(tensor), []).append(name)
    for key, names in shared.items():
        sums |= dict(zip(names, _all_reduced([own[name] for name in names], key), strict=True))
    return {name: f"{total & (1 << 64) - 1:016x}" for name, total in sums.items()}


def _all_reduced(values: Sequence[int], key: Any) -> list[int]:
    groups = [key.get_group(dim) for dim in range(key.ndim)] if hasattr(key, "get_coordinate") else [key]
    device = torch.device("cpu")
    for group in groups:
        backend = dist.get_backend_config(group)
        if "cpu:" not in backend:
            device = torch.device(backend.partition(":")[0])
    total = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.tolist()


def _is_copy(tensor: DTensor, coordinate: Sequence[int]) -> bool:
    places = zip(tensor.placements, coordinate, strict=True)
    return any(isinstance(placement, Replicate) and at for placement, at in places)


def _of_box(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Sum the words of a region of a tensor of `shape`."""
    units, per_element = _as_integers(local)
    starts, sizes = [*offsets] or [0], [*local.shape] or [1]
    whole = [*shape] or [1]
    starts[-1], sizes[-1], whole[-1] = (each[-1] * per_element for each in (starts, sizes, whole))
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if sizes[1:] == whole[1:]:
        row = 1
        for length in whole[1:]:
            row *= length
        _add_run(units, starts[0] * row, total)
    else:
        _add_scattered(units, _Box(starts, sizes, whole), total)
    return int(total.item())


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View a tensor as flat integers; return how many make an element."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    size = min(flat.element_size(), _WORD)
    per_element = flat.element_size() // size
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    return flat.view(torch.uint8).view(_INTEGERS[size]), per_element


def _add_run(units: torch.Tensor, start: int, total: torch.Tensor) -> None:
    """Add neighbouring units, the first of which is at `start`."""
    per_word = _WORD // units.element_size()
    head = min(-start % per_word, units.numel())
    words = (units.numel() - head) // per_word
    tail = head + words * per_word
    for first, last in ((0, head), (tail, units.numel())):
        if last > first:
            _add_units(
                units[first:last], torch.arange(start + first, start + last, device=units.device), total
            )
    if not words:
        return
    body = units[head:tail]
    whole = (body if not head else body.clone()).view(torch.int64)
    table = _table(units.device)
    for place, count in _rows((start + head) // per_word, words):
        factors = table[place % _TABLE : place % _TABLE + count] ^ _of_row(place // _TABLE)
        at = place - (start + head) // per_word
        total.add_((factors * whole[at : at + count]).sum())


def _rows(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut a range of words at multiples of the table's length."""
    end = start + count
    while start < end:
        size = min(_TABLE - start % _TABLE, end - start)
        yield start, size
        start += size


def _add_scattered(units: torch.Tensor, box: _Box, total: torch.Tensor) -> None:
    """Add the units of a region that is not contiguous in the whole tensor."""
    starts, sizes, whole = box
    row = max(1, sizes[-1])
    per_turn = max(1, _UNITS_AT_ONCE // row)
    for first in range(0, units.numel() // row, per_turn):
        last = min(first + per_turn, units.numel() // row)
        index = torch.arange(first, last, device=units.device)
        place, stride = torch.full_like(index, starts[-1]), whole[-1]
        for size, start, length in zip(sizes[-2::-1], starts[-2::-1], whole[-2::-1], strict=True):
            place += (index % size + start) * stride
            index, stride = index // size, stride * length
        places = place[:, None] + torch.arange(row, device=units.device)
        _add_units(units[first * row : last * row], places.reshape(-1), total)


def _add_units(units: torch.Tensor, places: torch.Tensor, total: torch.Tensor) -> None:
    """Add units, each times the factor of its word, shifted to its place in it."""
    size = units.element_size()
    values = units.to(torch.int64)
    if size < _WORD:
        values = values & ((1 << 8 * size) - 1)
    word = places * size // _WORD
    factors = _table(units.device)[word % _TABLE] ^ _of_rows(word // _TABLE)
    total.add_((values * (factors << places * size % _WORD * 8)).sum())


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Return odd factors, one for each word of a row."""
    return (_mixed(torch.arange(1, _TABLE + 1)) | 1).to(device)


@lru_cache(maxsize=4096)
def _of_row(row: int) -> int:
    """Return the even number that makes the factors of a row its own."""
    return int(_of_rows(torch.tensor([row]))[0])


def _of_rows(rows: torch.Tensor) -> torch.Tensor:
    return _mixed(~rows) & ~1


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Scatter numbers over 64 bits, in the manner of splitmix64."""
    first, second, third = _FACTORS
    mixed = numbers * first
    mixed = (mixed ^ (mixed >> 30)) * second
    mixed = (mixed ^ (mixed >> 27)) * third
    return mixed ^ (mixed >> 31)


def _wrapped(number: int) -> int:
    """Wrap an integer to 64 bits, signed."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
