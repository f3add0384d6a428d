"""Verified reads from storage into memory, independent of DCP, ranks, live state."""

from ckpt_core.reading._checked_reader import CheckedReader, damaged
from ckpt_core.reading._data_files import Buffers, Lender, page_memory
from ckpt_core.reading._engine import Engine
from ckpt_core.reading._requests import MAX_TAKE_BYTES, REQUEST_BYTES, Payload, RangeRead

__all__ = [
    "MAX_TAKE_BYTES",
    "REQUEST_BYTES",
    "Buffers",
    "CheckedReader",
    "Engine",
    "Lender",
    "Payload",
    "RangeRead",
    "damaged",
    "page_memory",
]
