"""Entries of data files, read by everyone but us."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib

import torch

LEGACY_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)[2:14]
"""After the first two bytes, of the layout in which torch wrote tensors before it wrote zips."""


def stored_crc(content: bytes, payload_bytes: int) -> int:
    """The checksum that an entry holds of its own payload, after a comparison with the bytes."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            return archive.getinfo("archive/data/0").CRC
    stream = io.BytesIO(content)
    magic, protocol, number = (pickle.load(stream) for _ in range(3))
    assert (magic, protocol) == (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION)
    crc, size = int(number) & 0xFFFFFFFF, int(number) >> 32
    assert size == payload_bytes, "and zeros"
    assert crc == zlib.crc32(content[len(content) - payload_bytes :])
    return crc


def payload_bytes(content: bytes) -> int:
    """The bytes of a small tensor's elements, or of a plain value's pickle and its keys."""
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    if isinstance(loaded, torch.Tensor):
        return loaded.nbytes
    return len(pickle.dumps(loaded, protocol=2)) + len(b"\x80\2].")


def load_entry(content: bytes) -> torch.Tensor:
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert isinstance(loaded, torch.Tensor)
    return loaded
