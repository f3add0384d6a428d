"""The plugin's side: options, and the plain files that Lightning's launchers pass from process to process."""

from __future__ import annotations

import os
from typing import Any, Self
from weakref import WeakSet

from ckpt_core.errors import ConfigError
from lightning_ckpt._hooks import LifeCycle
from lightning_ckpt._options import Configured, Settings

_plugins: WeakSet[PluginOptions] = WeakSet()


def plugins_alive() -> bool:
    """Whether this process holds a plugin of ours at all."""
    return len(_plugins) > 0


class PluginOptions(Configured):
    """A `CheckpointIO` that carries our options; a namespace module adds Lightning's own behind it.

    Attached strategies never call it. What is left are the temporary files in which Lightning's spawn and
    fork launchers bring the weights home: those stay plain files.

    Attributes:
        attached: whether a Trainer's strategy saves and loads through us on behalf of this plugin.
    """

    attached = False

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Note that there is a plugin, which some Trainer will want attached."""
        plugin = super().__new__(cls, *arguments, **options)
        _plugins.add(plugin)
        return plugin

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a launcher's plain file.

        Raises:
            ConfigError: nothing is attached to a strategy, so this is no launcher.
        """
        if not self.attached:
            raise ConfigError(
                "ShardedCheckpointIO serves a Trainer, and is attached to none. With Fabric, save and load "
                "with ckpt_core.CheckpointManager, for example manager.save(step, TrainState(model=model, "
                "optimizer=optimizer)). With a Trainer, Lightning did not call our entry point: install "
                "ckpt-suite instead of putting it on the path, or use ShardedCheckpoint as a callback"
            )
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # type: ignore[misc]


class PluginHooks(LifeCycle):
    """The callback behind a plugin: inert in every Trainer that has none."""

    def settings_for(self, trainer: Any) -> Settings | None:
        """The options of the Trainer's plugin."""
        plugin = trainer.strategy._checkpoint_io
        return plugin.settings if isinstance(plugin, PluginOptions) else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """As any callback of ours, on behalf of the plugin."""
        super().setup(trainer, pl_module, stage)
        plugin = trainer.strategy._checkpoint_io
        if isinstance(plugin, PluginOptions):
            plugin.attached = True
