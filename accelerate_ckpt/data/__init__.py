"""Positions of an accelerator's data loaders, for any number of ranks."""

from accelerate_ckpt.data._loaders import Loaders

__all__ = ["Loaders"]
