"""Positions of an accelerator's data loaders, for any number of ranks."""

from accelerate_ckpt.data._tracked import Loaders, positions_in_samples

__all__ = ["Loaders", "positions_in_samples"]
