"""Accelerate and the Hugging Face Trainer on ckpt-suite: life-cycle events in, core calls out."""

from __future__ import annotations

from accelerate_ckpt._checkpoints import AcceleratorCheckpoints
from accelerate_ckpt._patch import checkpoints, disable, enable

__all__ = ["AcceleratorCheckpoints", "checkpoints", "disable", "enable"]
