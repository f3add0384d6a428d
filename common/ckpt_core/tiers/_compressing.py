"""Compressed copies of checkpoints: their content is the same, and so is their identity.

A first pass reads a checkpoint, verified, and compresses every frame to know sizes and checksums. They make
the manifest of the compressed checkpoint, which names that of the plain one. What copies from the view of it
compresses once more: so nothing is written but the copy, and an interrupted one is continued. The same bytes
always make the same frames.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from ckpt_core.commit import (
    NEWEST_FORMAT,
    Manifest,
    Marker,
    plain_storage,
    read_entry,
    read_manifest,
)
from ckpt_core.crew import run_all
from ckpt_core.errors import ConfigError
from ckpt_core.formats.checksums import Checksum, checksum
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable, FileChunks
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.frames import CODECS, RAW, ZSTD, Frames, compress, descriptors_of, encode_plain
from ckpt_core.names import MANIFEST, MARKER, METADATA, PLAIN, SIGNATURE, chunks_name, data_rank
from ckpt_core.reading import CheckedReader
from ckpt_core.storage import FramedStorage, RangeReader, Storage
from ckpt_core.tiers._copy import CopyTerms
from ckpt_core.types import ChunkEntry, FileEntry

Choice: TypeAlias = Callable[[ChunkEntry, Sequence[memoryview]], int]
"""Returns the codec of an entry of a data file (see `formats.frames`), of which it gets up to three blocks.

Called on several threads; the same for the same entry, or an interrupted copy begins again."""


def fixed(codec: str) -> Choice:
    """Return the choice of `zstd` or `planes` for every entry that it makes smaller."""
    raise NotImplementedError(codec)


def compressed(
    source: Storage,
    name: str,
    choose: Choice,
    terms: CopyTerms,
    *,
    sign: Callable[[bytes], bytes] | None = None,
) -> Storage:
    """Return a view of a root in which a checkpoint is compressed, to be copied from.

    Args:
        source: the root.
        name: of the checkpoint, plain or compressed otherwise.
        choose: the codec of every entry.
        terms: of which `stop` is called before every read.
        sign: signs the new manifest; needed where the checkpoint is signed.

    Raises:
        ConfigError: it is signed, and `sign` is None.
        CorruptCheckpointError: it is damaged.
        IncompatibleCheckpointError: zstandard is not installed.
    """
    raise NotImplementedError


def compress_file(
    source: Storage, name: str, entry: FileEntry, chunks: FileChunks, choose: Choice
) -> tuple[FileEntry, Frames]:
    """Compress a data file, verified, to know its frames, its size and its checksum."""
    raise NotImplementedError
