"""Asynchronous, sharded, committed checkpoints for Lightning.

One callback or one plugin is all that a Trainer needs; `setup_fabric` is for Fabric.

Those for a Trainer are of the `lightning` package, or of `pytorch_lightning` where only that is installed.
With both installed, users of the latter import them from `lightning_ckpt.pytorch_lightning`: the two packages
do not accept each other's classes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckpt_core._version import __version__

if TYPE_CHECKING:
    from lightning_ckpt._fabric import FabricCheckpoints, setup_fabric
    from lightning_ckpt.lightning import ShardedCheckpoint, ShardedCheckpointIO, load_from_checkpoint

__all__ = [
    "FabricCheckpoints",
    "ShardedCheckpoint",
    "ShardedCheckpointIO",
    "__version__",
    "load_from_checkpoint",
    "setup_fabric",
]

_FABRIC = {"FabricCheckpoints", "setup_fabric"}


def __getattr__(name: str) -> Any:
    if name not in __all__:  # a policy, or the core says what is meant
        return getattr(import_module("ckpt_core"), name)
    if name in _FABRIC:  # without a Trainer's package, which takes seconds to import
        return getattr(import_module("lightning_ckpt._fabric"), name)
    for package in ("lightning", "pytorch_lightning"):
        if find_spec(package) is not None:
            value = getattr(import_module(f"lightning_ckpt.{package}"), name)
            globals()[name] = value
            return value
    raise ImportError("lightning_ckpt needs Lightning: pip install 'ckpt-suite[lightning]'")


def __dir__() -> list[str]:
    return sorted(__all__)
