"""The callback and the plugin for the `lightning` package."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast, final

from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_ckpt._connector import find_our_checkpoints
from lightning_ckpt._hooks import CheckpointHooks, PluginHooks, PluginOptions, plugins_alive
from lightning_ckpt._weights import read_our_directories, refuse_our_directories

__all__ = [
    "PluginAttacher",
    "ShardedCheckpoint",
    "ShardedCheckpointIO",
    "load_from_checkpoint",
    "plugins_alive",
]

M = TypeVar("M", bound=LightningModule | LightningDataModule)


@final
class ShardedCheckpoint(CheckpointHooks, Checkpoint):
    """Saves sharded, committed checkpoints asynchronously; resumes them exactly."""

    trainer_type = Trainer
    module_name = __name__


@final
class ShardedCheckpointIO(PluginOptions, TorchCheckpointIO):
    """`ShardedCheckpoint` as a plugin; it works beside any checkpoint callback."""


@final
class PluginAttacher(PluginHooks, Callback):
    """Attaches a `ShardedCheckpointIO`; Lightning adds it by itself."""

    trainer_type = Trainer
    module_name = __name__


def load_from_checkpoint(kind: type[M], path: str | os.PathLike[str], **options: Any) -> M:
    """Make a module with the weights and hyperparameters of a checkpoint.

    It is `kind.load_from_checkpoint`, which reads checkpoints of ours as soon as this module is imported.

    Args:
        kind: the class of the module or data module.
        path: a checkpoint, a root, which stands for its newest, or a file that Lightning wrote.
        **options: what that method takes: `map_location`, `strict`, `weights_only`, hyperparameters.

    Raises:
        CheckpointError: it cannot be read; see `CheckpointManager.load`.
    """
    plain = {"weights_only": True, **options}  # Lightning's own default for a URL is to unpickle anything
    return cast("M", cast("Any", kind).load_from_checkpoint(path, **plain))


find_our_checkpoints(_CheckpointConnector)
read_our_directories(saving)
refuse_our_directories(torch_io)
