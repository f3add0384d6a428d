"""Storage of bytes: the `Storage` contract, its backends, and `open_storage`."""

from ckpt_core.storage._base import (
    ALIGNMENT,
    BIGGEST_SMALL_FILE,
    ForeignFileError,
    Lock,
    MappedReader,
    Pace,
    RangeReader,
    RangeStream,
    Space,
    SpreadReader,
    Storage,
    StorageEntry,
    Throttle,
    is_full,
    read_intact,
    read_small,
)
from ckpt_core.storage._framed import FramedStorage
from ckpt_core.storage._layered import LayeredStorage
from ckpt_core.storage._open import (
    around,
    is_in_bucket,
    object_storage,
    open_around,
    open_storage,
    unwritable,
)
from ckpt_core.storage.local import LocalStorage, excludes_others
from ckpt_core.storage.object import ObjectStorage

__all__ = [
    "ALIGNMENT",
    "BIGGEST_SMALL_FILE",
    "ForeignFileError",
    "FramedStorage",
    "LayeredStorage",
    "LocalStorage",
    "Lock",
    "MappedReader",
    "ObjectStorage",
    "Pace",
    "RangeReader",
    "RangeStream",
    "Space",
    "SpreadReader",
    "Storage",
    "StorageEntry",
    "Throttle",
    "around",
    "excludes_others",
    "is_full",
    "is_in_bucket",
    "object_storage",
    "open_around",
    "open_storage",
    "read_intact",
    "read_small",
    "unwritable",
]
