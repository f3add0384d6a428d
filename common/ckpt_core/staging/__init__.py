"""Memory for training-safe copies of live state."""

from ckpt_core.staging._arena import Arena, Arenas
from ckpt_core.staging._available import FreeMemory, free_memory
from ckpt_core.staging._copies import Copy
from ckpt_core.staging._overlap import DeferredCopies

__all__ = ["Arena", "Arenas", "Copy", "DeferredCopies", "FreeMemory", "free_memory"]
