"""Memory for training-safe copies of live state."""

from ckpt_core.staging._arena import Arena, Arenas, free_memory, whole_pages
from ckpt_core.staging._copies import Copy
from ckpt_core.staging._overlap import DeferredCopies
from ckpt_core.staging._waves import Waves, flat_parts

__all__ = ["Arena", "Arenas", "Copy", "DeferredCopies", "Waves", "flat_parts", "free_memory", "whole_pages"]
