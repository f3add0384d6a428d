"""Checksums of tensors that do not depend on how ranks share them.

A checksum is the sum, modulo 2^64, of the tensor's words of 8 bytes, each times an odd factor that depends on
its position in the whole tensor. Ranks add up the sums of their shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

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
        if coordinate is None or not local.numel():
            return 0
        placed = zip(tensor.placements, coordinate, strict=True)
        if any(isinstance(placement, Replicate) and at for placement, at in placed):
            return 0
        (chunk,) = chunks_of(tensor)
        return _of_box(local, chunk.offsets, tensor.shape)
    if is_wrapped(tensor):
        parts = [part for _, part in inner_tensors(tensor)]
        keyed = zip(_mixed(torch.arange(1, len(parts) + 1)).tolist(), parts, strict=True)
        return _wrapped(sum((2 * key + 1) * own_checksum(part) for key, part in keyed))
    return _of_box(tensor, [0] * tensor.dim(), tensor.shape)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the checksums of tensors, in hexadecimal.

    Collective over each mesh; the tensors are the same on all ranks that share them.
    """
    sums = {name: own_checksum(each) for name, each in tensors.items()}
    shared: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            groups: tuple[Any, ...] = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
            shared.setdefault(groups, []).append(name)
        elif isinstance(tensor, ShardedTensor):
            shared.setdefault((process_group_of(tensor),), []).append(name)
    for groups, names in shared.items():
        backends = [dist.get_backend_config(group) for group in groups]
        device = next((each.partition(":")[0] for each in backends if "cpu:" not in each), "cpu")
        total = torch.tensor([sums[name] for name in names], dtype=torch.int64, device=device)
        for group in groups:
            dist.all_reduce(total, group=group)
        sums |= dict(zip(names, total.tolist(), strict=True))
    return {name: f"{total & (1 << 64) - 1:016x}" for name, total in sums.items()}


def _of_box(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Sum the words of a region of a tensor of `shape`."""
    units, per_element = _as_integers(local)
    starts, sizes, whole = [*offsets] or [0], [*local.shape] or [1], [*shape] or [1]
    for each in (starts, sizes, whole):
        each[-1] *= per_element
    if sizes[1:] == whole[1:]:
        return int(_of_run(units, starts[0] * math.prod(whole[1:])).item())
    # Its rows are apart in the whole tensor: the place of each unit, some at once.
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    row = max(1, sizes[-1])
    rows, per_turn = units.numel() // row, max(1, _UNITS_AT_ONCE // row)
    for first in range(0, rows, per_turn):
        last = min(first + per_turn, rows)
        index = torch.arange(first, last, device=units.device)
        place, stride = torch.full_like(index, starts[-1]), whole[-1]
        for size, start, length in zip(sizes[-2::-1], starts[-2::-1], whole[-2::-1], strict=True):
            place += (index % size + start) * stride
            index, stride = index // size, stride * length
        places = place[:, None] + torch.arange(row, device=units.device)
        total += _of_units(units[first * row : last * row], places.reshape(-1))
    return int(total.item())


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View a tensor as flat integers; return how many make an element."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    size = min(flat.element_size(), _WORD)
    per_element = flat.element_size() // size
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    return flat.view(torch.uint8).view(_INTEGERS[size]), per_element


def _of_run(units: torch.Tensor, start: int) -> torch.Tensor:
    """Sum neighbouring units, the first of which is at `start`."""
    total = torch.zeros((), dtype=torch.int64, device=units.device)
    per_word = _WORD // units.element_size()
    head = min(-start % per_word, units.numel())
    words = (units.numel() - head) // per_word
    tail = head + words * per_word
    for first, last in ((0, head), (tail, units.numel())):
        if last > first:
            places = torch.arange(start + first, start + last, device=units.device)
            total += _of_units(units[first:last], places)
    if not words:
        return total
    body = units[head:tail]
    whole = (body.clone() if head else body).view(torch.int64)
    table, place, at = _table(units.device), (start + head) // per_word, 0
    while at < words:
        row, column = divmod(place + at, _TABLE)
        count = min(_TABLE - column, words - at)
        total += ((table[column : column + count] ^ _of_row(row)) * whole[at : at + count]).sum()
        at += count
    return total


def _of_units(units: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum units, each times the factor of its word, shifted to its place in it."""
    size = units.element_size()
    values = units.to(torch.int64)
    if size < _WORD:
        values = values & ((1 << 8 * size) - 1)
    word = places * size // _WORD
    factors = _table(units.device)[word % _TABLE] ^ _of_rows(word // _TABLE)
    return (values * (factors << places * size % _WORD * 8)).sum()


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
