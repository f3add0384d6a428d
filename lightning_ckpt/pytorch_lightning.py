"""The callback and the plugin for the `pytorch_lightning` package."""

from __future__ import annotations

from typing import final

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities import rank_zero_info

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
