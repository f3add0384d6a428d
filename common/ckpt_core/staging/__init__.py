"""Memory for training-safe copies of live state."""

from ckpt_core.staging._arena import Arena
from ckpt_core.staging._overlap import Copy, DeferredCopies

__all__ = ["Arena", "Copy", "DeferredCopies"]
