"""Accelerate and the Hugging Face Trainer on ckpt-suite: life-cycle events in, core calls out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import accelerate as _accelerate  # noqa: F401 - whether it is there
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"accelerate_ckpt needs accelerate ({error}): pip install 'ckpt-suite[accelerate]'", name=error.name
    ) from error

from accelerate_ckpt._checkpoints import AcceleratorCheckpoints
from accelerate_ckpt._patch import checkpoints, disable, enable

if TYPE_CHECKING:
    from accelerate_ckpt._trainer import (
        TrainerCheckpoints,
        disable_trainer,
        enable_trainer,
        trainer_checkpoints,
    )

__all__ = [
    "AcceleratorCheckpoints",
    "TrainerCheckpoints",
    "checkpoints",
    "disable",
    "disable_trainer",
    "enable",
    "enable_trainer",
    "trainer_checkpoints",
]


def __getattr__(name: str) -> Any:
    # Accelerate users need not have transformers, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module 'accelerate_ckpt' has no attribute {name!r}")
    from accelerate_ckpt import _trainer

    return getattr(_trainer, name)
