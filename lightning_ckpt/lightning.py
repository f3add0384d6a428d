"""The callback and the plugin for the `lightning` package."""

from __future__ import annotations

from typing import final

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_ckpt._connector import find_our_checkpoints
from lightning_ckpt._hooks import CheckpointHooks
from lightning_ckpt._plugin import PluginHooks, PluginOptions, plugins_alive

__all__ = ["PluginAttacher", "ShardedCheckpoint", "ShardedCheckpointIO", "plugins_alive"]


@final
class ShardedCheckpoint(CheckpointHooks, Checkpoint):
    """Saves the Trainer's checkpoints asynchronously, sharded and committed, and resumes them exactly."""

    trainer_type = Trainer
    module_name = __name__


@final
class ShardedCheckpointIO(PluginOptions, TorchCheckpointIO):
    """`ShardedCheckpoint` as a plugin: the same options and behaviour, beside any checkpoint callback."""


@final
class PluginAttacher(PluginHooks, Callback):
    """Attaches a `ShardedCheckpointIO`; Lightning adds it by itself."""

    trainer_type = Trainer
    module_name = __name__


find_our_checkpoints(_CheckpointConnector)
