"""Bytes from storage into memory, verified; knows nothing of DCP, ranks or live state."""

from ckpt_core.reading._types import Payload, Wanted

__all__ = ["Payload", "Wanted"]
