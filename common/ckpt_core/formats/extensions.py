"""The stream extensions of DCP, through which entries may be compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.formats.frames import require_zstandard
from ckpt_core.formats.zips import ZipError

_ZSTD: Final = "stream.zstd"
_MOST_AROUND_BYTES: Final = 1 << 20
"""Of an entry beside its payload."""


def plain_entry(content: bytes, descriptors: Sequence[str], most_bytes: int) -> bytes:
    """Return an entry as it was before the extensions, which DCP names in this order.

    Args:
        content: as stored.
        descriptors: name and version of each extension.
        most_bytes: the most of its payload: a few bytes could make more than there is memory.

    Raises:
        IncompatibleCheckpointError: an extension is unknown, or what it needs is not installed.
        ZipError: it is damaged.
    """
    for descriptor in descriptors:
        name, _, version = descriptor.partition("/")
        if name != _ZSTD or version.partition(".")[0] != "1":
            raise IncompatibleCheckpointError(
                f"it was written through the DCP stream extension {descriptor!r:.80}, which is unknown here; "
                "load it with stock dcp.load"
            )
        content = _decompressed(content, most_bytes + _MOST_AROUND_BYTES)
    return content


def _decompressed(content: bytes, most_bytes: int) -> bytes:
    zstandard = require_zstandard()
    try:
        with zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True) as stream:
            found: bytes = stream.read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise ZipError(f"what is compressed is damaged: {error}") from error
    if len(found) > most_bytes:
        raise ZipError(f"it holds more than the {most_bytes} bytes that it may have")
    return found
