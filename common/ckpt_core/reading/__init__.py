"""Bytes from storage into memory, verified."""

from ckpt_core.reading._types import Payload, Wanted

__all__ = ["Payload", "Wanted"]
