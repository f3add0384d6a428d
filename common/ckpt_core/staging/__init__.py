"""Memory for training-safe copies of live state."""

from ckpt_core.staging._arena import Arena

__all__ = ["Arena"]
