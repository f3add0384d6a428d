"""The callback and the plugin for the `lightning` package."""

from __future__ import annotations

from typing import final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_ckpt._ckpt_path import load_from_checkpoint
from lightning_ckpt._hooks import CheckpointHooks, PluginOptions

__all__ = ["ShardedCheckpoint", "ShardedCheckpointIO", "load_from_checkpoint"]


@final
class ShardedCheckpoint(CheckpointHooks, ModelCheckpoint):  # type: ignore[misc, override]
    """Saves sharded, committed checkpoints asynchronously; resumes them exactly."""

    trainer_type = Trainer
    tell = staticmethod(rank_zero_info)


@final
class ShardedCheckpointIO(PluginOptions, TorchCheckpointIO):
    """`ShardedCheckpoint` as a plugin; it works beside any checkpoint callback."""

    strategy_type = Strategy
    callback_type = ShardedCheckpoint
