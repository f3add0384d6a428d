"""The callback and the plugin for the `pytorch_lightning` package."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast, final

from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.core import saving
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities import rank_zero_info

from lightning_ckpt._ckpt_path import read_our_directories
from lightning_ckpt._hooks import CheckpointHooks, PluginHooks, PluginOptions

__all__ = ["ShardedCheckpoint", "ShardedCheckpointIO", "load_from_checkpoint"]

M = TypeVar("M", bound=LightningModule | LightningDataModule)


class _Idle(ModelCheckpoint):
    """A `ModelCheckpoint` that does nothing by itself."""

    trainer_type = Trainer
    saving = saving
    tell = staticmethod(rank_zero_info)
    module_name = __name__
    state_key = Callback.state_key  # pyright: ignore[reportIncompatibleMethodOverride]
    state_dict = Callback.state_dict
    load_state_dict = Callback.load_state_dict
    on_train_batch_end = Callback.on_train_batch_end
    on_train_epoch_end = Callback.on_train_epoch_end
    on_validation_end = Callback.on_validation_end


@final
class ShardedCheckpoint(CheckpointHooks, _Idle):  # type: ignore[misc, override]
    """Saves sharded, committed checkpoints asynchronously; resumes them exactly."""


@final
class _PluginCallback(PluginHooks, _Idle):  # type: ignore[misc, override]
    """What a `ShardedCheckpointIO` puts into its Trainer."""


@final
class ShardedCheckpointIO(PluginOptions, TorchCheckpointIO):
    """`ShardedCheckpoint` as a plugin; it works beside any checkpoint callback."""

    strategy_type = Strategy
    callback_type = _PluginCallback


def load_from_checkpoint(kind: type[M], path: str | os.PathLike[str], **options: Any) -> M:
    """Make a module with the weights and hyperparameters of a checkpoint.

    As `lightning_ckpt.lightning.load_from_checkpoint` does, for modules of this package.
    """
    read_our_directories(saving)
    plain = {"weights_only": True, **options}  # Lightning's own default for a URL is to unpickle anything
    return cast("M", cast("Any", kind).load_from_checkpoint(path, **plain))
