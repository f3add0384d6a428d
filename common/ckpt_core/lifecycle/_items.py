"""Per-rank and shared items as files without pickle, and the few values that only pickle can hold."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_core.checksums import crc32
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.names import FORMAT_VERSION
from ckpt_core.state import NotEncodableError, decode, encode

PICKLED = "pickled"
"""Top-level key, in the checkpoint directory's own DCP part, of values that JSON cannot hold."""

_logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItems:
    """Items as JSON can hold them, and what it cannot hold, as `torch.save` bytes by item."""

    plain: Mapping[str, Any]
    pickled: Mapping[str, bytes]

    @property
    def content(self) -> bytes:
        """A file of all items."""
        return self.content_of({*self.plain, *self.pickled})

    def content_of(self, names: Collection[str]) -> bytes:
        """A file of some of the items."""
        document = {
            "format_version": FORMAT_VERSION,
            "items": {name: value for name, value in self.plain.items() if name in names},
            PICKLED: sorted(name for name in self.pickled if name in names),
        }
        return json.dumps(document, separators=(",", ":")).encode()

    def digest(self, name: str) -> int:
        """A number by which ranks tell whether they have the same item; 0 of what went through pickle."""
        if name not in self.plain:
            return 0
        return crc32(json.dumps(self.plain[name], sort_keys=True).encode())


def encode_items(values: Mapping[str, Any]) -> EncodedItems:
    """Serialise items now, so that later changes by the training do not reach the checkpoint."""
    plain: dict[str, Any] = {}
    pickled: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            plain[name] = encode(value)
        except NotEncodableError as error:
            _logger.debug("item %r goes through pickle: %s", name, error)
            buffer = io.BytesIO()
            torch.save(value, buffer)
            pickled[name] = buffer.getvalue()
    return EncodedItems(plain=plain, pickled=pickled)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedItems:
    """Values read from a file, and the names of those that have to be read from the pickled part."""

    values: Mapping[str, Any]
    pickled: tuple[str, ...]


def decode_items(content: bytes, path: str) -> DecodedItems:
    """Read what `encode_items` wrote.

    Raises:
        CorruptCheckpointError: it is not such a file.
    """
    try:
        document = json.loads(content)
        values = {str(name): decode(value) for name, value in document["items"].items()}
        names = tuple(str(name) for name in document[PICKLED])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptCheckpointError) as error:
        failure = FileFailure(path=path, problem=f"not a file of items: {error}")
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error
    return DecodedItems(values=values, pickled=names)


def pickled_key(scope: str, item: str) -> str:
    """Key under `PICKLED` of an item; `scope`, `shared` or the name of a rank file, keeps ranks apart."""
    return f"{scope}:{item}"
