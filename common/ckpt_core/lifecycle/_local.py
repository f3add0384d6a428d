"""Tensors that should be equal on all ranks and are not: batch-norm statistics, and other module buffers.

The checkpoint holds the lowest rank's. A rank whose value differs keeps its own in a small file beside it, so
that a resume on the same ranks is exact; on other ranks everybody starts from the lowest rank's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ckpt_core.lifecycle._items import decode_items, encode_items
from ckpt_core.names import local_name
from ckpt_core.storage import Storage

LocalKey: TypeAlias = tuple[str, str]
_PIECE_BYTES = 8 << 20


def digests(local: Mapping[LocalKey, torch.Tensor]) -> dict[LocalKey, int]:
    """CRC-32 of every tensor's bytes; equality of replicas is all that is asked."""
    return {key: _crc(tensor) for key, tensor in local.items()}


def _crc(tensor: torch.Tensor) -> int:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return 0
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(array)


def diverging(of_ranks: Sequence[Mapping[LocalKey, int]]) -> list[frozenset[LocalKey]]:
    """For each rank, the keys whose value is not that of the lowest rank which has them."""
    reference: dict[LocalKey, int] = {}
    for of_rank in of_ranks:
        for key, digest in of_rank.items():
            reference.setdefault(key, digest)
    return [
        frozenset(key for key, digest in of_rank.items() if digest != reference[key]) for of_rank in of_ranks
    ]


def encode_local(
    rank: int, local: Mapping[LocalKey, torch.Tensor], keys: Collection[LocalKey]
) -> dict[str, bytes]:
    """The file of a rank's own values, by name; no file if it has none."""
    if not keys:
        return {}
    values = {json.dumps(key): _split(local[key].detach().cpu()) for key in sorted(keys)}
    return {local_name(rank): encode_items(values).content}


def read_local(storage: Storage, directory: str, rank: int) -> dict[LocalKey, torch.Tensor]:
    """A rank's own values; empty if it had none."""
    path = f"{directory}/{local_name(rank)}"
    try:
        content = storage.read_bytes(path)
    except FileNotFoundError:
        return {}
    return {_key(name): _joined(value) for name, value in decode_items(content, path).values.items()}


def _split(tensor: torch.Tensor) -> Any:
    """The tensor, or, if it is large, pieces of it: JSON takes no large ones."""
    if tensor.nbytes <= _PIECE_BYTES:
        return tensor
    pieces = torch.split(tensor.reshape(-1), _PIECE_BYTES // tensor.dtype.itemsize)
    return {"shape": tensor.shape, "pieces": list(pieces)}


def _joined(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.cat(value["pieces"]).reshape(value["shape"])


def _key(name: str) -> LocalKey:
    part, key = json.loads(name)
    return part, key


def put_local(local: Mapping[LocalKey, torch.Tensor], part: str, loaded: Mapping[str, Any]) -> None:
    """Replace the checkpoint's values by this rank's own, where it had some and they were asked for."""
    for (of_part, key), value in local.items():
        target = loaded.get(key)
        if of_part == part and isinstance(target, torch.Tensor) and target.shape == value.shape:
            target.detach().copy_(value)
