"""Rank-local buffers: module buffers that differ between ranks, as in batch norm.

The checkpoint holds the values of the lowest rank. A rank with different values stores its own in a small
file beside it, so that a resume on the same number of ranks is exact; otherwise every rank starts from those
of the lowest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, final

import torch

from ckpt_core.devices import to_host
from ckpt_core.formats.codec import corrupt
from ckpt_core.names import local_name
from ckpt_core.state._items import decode_items, encode_items
from ckpt_core.state._tensor_sums import own_checksum

BufferKey: TypeAlias = tuple[str, str]
_PIECE_BYTES = 8 << 20
_DIGEST_BYTES = 8
_MAX_DIGESTS = 64  # keys with a digest each; with more, the message would grow with the model


@final
class RankBuffers:
    """Copies of rank-local buffers, made on the main thread, read on the save thread.

    On a device the copies are enqueued on the current stream, so that the host does not wait for it.
    """

    def __init__(self, live: Mapping[BufferKey, torch.Tensor]) -> None:
        copies, self._events = to_host(list(live.values()))
        self._copies = dict(zip(live, copies, strict=True))

    def digests(self) -> bytes:
        """Return digests by which ranks with the same keys compare their values.

        Beyond `_MAX_DIGESTS` keys it is one digest of all.
        """
        values = self._whole()
        sums = [own_checksum(values[key]) for key in sorted(values)]
        each = [number.to_bytes(_DIGEST_BYTES, "little", signed=True) for number in sums]
        if len(each) <= _MAX_DIGESTS:
            return b"".join(each)
        return hashlib.blake2b(b"".join(each), digest_size=_DIGEST_BYTES).digest()

    def differing(self, reference: bytes) -> frozenset[BufferKey]:
        """Return the keys whose values differ from another rank's `digests()`."""
        keys, own = sorted(self._copies), self.digests()
        if len(own) != _DIGEST_BYTES * len(keys) or len(own) != len(reference):
            return frozenset() if own == reference else frozenset(keys)
        ends = range(_DIGEST_BYTES, len(own) + 1, _DIGEST_BYTES)
        parts = [slice(end - _DIGEST_BYTES, end) for end in ends]
        return frozenset(key for key, at in zip(keys, parts, strict=True) if own[at] != reference[at])

    def encode(self, rank: int, keys: Collection[BufferKey] | None = None) -> dict[str, bytes]:
        """Encode the file of a rank's own values, all or some; none without values."""
        values = self._whole()
        return encode_buffers(rank, values, values.keys() if keys is None else keys)

    def _whole(self) -> Mapping[BufferKey, torch.Tensor]:
        for event in self._events:
            event.synchronize()
        return self._copies


def encode_buffers(
    rank: int, local: Mapping[BufferKey, torch.Tensor], keys: Collection[BufferKey]
) -> dict[str, bytes]:
    """Encode the file of a rank's own values, by file name; none without values."""
    if not keys:
        return {}
    values: dict[str, Any] = {}
    for key in sorted(keys):
        value = local[key].detach().cpu()
        # JSON takes no large tensors.
        pieces = torch.split(value.reshape(-1), _PIECE_BYTES // value.dtype.itemsize)
        is_small = value.nbytes <= _PIECE_BYTES
        values[json.dumps(key)] = value if is_small else {"shape": value.shape, "pieces": list(pieces)}
    return {local_name(rank): encode_items(values).content}


def decode_buffers(content: bytes, path: str) -> dict[BufferKey, torch.Tensor]:
    """Decode a rank's own values from the content of its file at `path`.

    Raises:
        CorruptCheckpointError: it is no output of `encode_buffers`.
    """
    found: dict[BufferKey, torch.Tensor] = {}
    try:
        for name, value in decode_items(content, path).values.items():
            part, key = json.loads(name)
            is_whole = isinstance(value, torch.Tensor)
            found[part, key] = value if is_whole else torch.cat(value["pieces"]).reshape(value["shape"])
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise corrupt(path, f"is malformed: {error}") from error
    return found


def put_buffers(local: Mapping[BufferKey, torch.Tensor], part: str, loaded: Mapping[str, Any]) -> None:
    """Replace the checkpoint's values by this rank's own, where both exist."""
    for (of_part, key), value in local.items():
        target = loaded.get(key)
        if of_part == part and isinstance(target, torch.Tensor) and target.shape == value.shape:
            target.detach().copy_(value)
