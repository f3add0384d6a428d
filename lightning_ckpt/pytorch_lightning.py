"""The callback and the plugin for the `pytorch_lightning` package."""

from __future__ import annotations

from typing import final

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector

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
