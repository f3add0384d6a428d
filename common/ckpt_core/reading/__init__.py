"""Verified reads from storage into memory, independent of DCP, ranks, live state."""

from ckpt_core.reading._checked_reader import CheckedReader
from ckpt_core.reading._data_files import Buffers, page_memory
from ckpt_core.reading._engine import Engine
from ckpt_core.reading._requests import REQUEST_BYTES, Payload, RangeRead

__all__ = [
    "REQUEST_BYTES",
    "Buffers",
    "CheckedReader",
    "Engine",
    "Payload",
    "RangeRead",
    "page_memory",
]
