"""Checkpoints for Accelerate and the Hugging Face Trainer, made by the core."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("accelerate") is None:
    raise ModuleNotFoundError(
        "accelerate_ckpt needs accelerate: pip install 'ckpt-suite[accelerate]'", name="accelerate"
    )

if TYPE_CHECKING:
    from accelerate_ckpt._checkpoints import AcceleratorCheckpoints, checkpoints, disable, enable
    from accelerate_ckpt.trainer._checkpoints import (
        TrainerCheckpoints,
        disable_trainer,
        enable_trainer,
        trainer_checkpoints,
    )
    from ckpt_core._version import __version__

__all__ = [
    "AcceleratorCheckpoints",
    "TrainerCheckpoints",
    "__version__",
    "checkpoints",
    "disable",
    "disable_trainer",
    "enable",
    "enable_trainer",
    "trainer_checkpoints",
]

_HOMES = {
    "AcceleratorCheckpoints": "_checkpoints",
    **dict.fromkeys(("checkpoints", "disable", "enable"), "_checkpoints"),
    **dict.fromkeys(
        ("TrainerCheckpoints", "disable_trainer", "enable_trainer", "trainer_checkpoints"),
        "trainer._checkpoints",
    ),
}


def __getattr__(name: str) -> Any:
    # Accelerate users need not have transformers, which takes seconds to import; and under `python -m`
    # nothing is imported before the current directory is off the path.
    if name not in _HOMES:  # a policy or the version, or the core says what is meant
        return getattr(import_module("ckpt_core"), name)
    return getattr(import_module(f"accelerate_ckpt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
