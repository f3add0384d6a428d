"""Verified reads from storage into memory, independent of DCP, ranks, live state."""

from ckpt_core.reading._data_files import Buffers, Lender, page_memory
from ckpt_core.reading._engine import Engine
from ckpt_core.reading._requests import MAX_TAKE_BYTES, REQUEST_BYTES, Payload, RangeRead

__all__ = [
    "MAX_TAKE_BYTES",
    "REQUEST_BYTES",
    "Buffers",
    "Engine",
    "Lender",
    "Payload",
    "RangeRead",
    "page_memory",
]
