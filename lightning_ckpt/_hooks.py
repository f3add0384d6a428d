"""The callback and the plugin, as calls of the session; free of either package."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, ClassVar, Self
from weakref import WeakSet

from ckpt_core.errors import ConfigError
from lightning_ckpt._committed import best_of, newest_of, path_of_best
from lightning_ckpt._options import Configured, Settings
from lightning_ckpt._session import Session
from lightning_ckpt._strategy import attach

_plugins: WeakSet[PluginOptions] = WeakSet()


class LifeCycle:
    """The hooks of a callback, to be joined with Lightning's own base class.

    Attributes:
        trainer_type: the Trainer of that namespace.
        module_name: where its users import from.
        selected_path: what the current run of the Trainer loads; noted before `setup`.
    """

    trainer_type: ClassVar[type[Any]]
    module_name: ClassVar[str]
    selected_path: str | None = None
    _session: Session | None = None

    @abstractmethod
    def settings_for(self, trainer: Any) -> Settings | None:
        """Return the settings for `trainer`, or None to leave it alone."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the strategy, before Lightning loads anything.

        Raises:
            ConfigError: the Trainer, its strategy or its other callbacks do not go together with this.
        """
        del pl_module
        settings = self.settings_for(trainer)
        if settings is None:
            return
        self._refuse_strangers(trainer)
        if self._session is None or self._session.trainer is not trainer:
            self._session = Session(trainer, settings)
        attach(trainer.strategy, self._session)
        self._session.start(stage, self.selected_path)

    def _refuse_strangers(self, trainer: Any) -> None:
        if not isinstance(trainer, self.trainer_type):
            package = type(trainer).__module__.partition(".")[0]
            raise ConfigError(
                f"this ShardedCheckpoint was imported from {self.module_name}, but the Trainer is from the "
                f"package {package}: import it from lightning_ckpt.{package}"
            )
        active = [each for each in life_cycles(trainer) if each.settings_for(trainer) is not None]
        if len(active) > 1:
            raise ConfigError(
                "one ShardedCheckpoint or one ShardedCheckpointIO per Trainer, not several: join their "
                "policies with |, e.g. save=EverySteps(500) | OnPreemption()"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take part in the training that begins; the Tuner's trials leave callbacks out."""
        del trainer, pl_module
        if self._session is not None:
            self._session.take_part()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the tokens of the batch."""
        del trainer, pl_module, batch_idx
        if self._session is not None and self._session.pacing is not None:
            self._session.pacing.counts.note(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Finish staged copies first: averaging callbacks exchange weights now."""
        del pl_module
        if self._session is not None:
            self._session.settle()
            if self._session.pacing is not None and trainer.state.fn == "fit":
                self._session.pacing.before_validation()

    def on_validation_batch_end(  # noqa: PLR0917 - Lightning's signature
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave the validation if a preemption was announced."""
        del pl_module, outputs, batch, batch_idx, dataloader_idx
        if self._session is not None and self._session.pacing is not None and trainer.state.fn == "fit":
            self._session.pacing.validation.after_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time."""
        del pl_module
        if self._session is not None and self._session.pacing is not None and trainer.state.fn == "fit":
            self._session.pacing.after_validation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        del trainer, pl_module
        if self._session is not None and self._session.pacing is not None:
            self._session.pacing.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Note the exception; save if `on_exception` says so and all ranks are here."""
        del trainer, pl_module
        if self._session is not None:
            self._session.failed(exception)

    @property
    def preempted(self) -> bool:
        """Whether a preemption announced to any rank stopped the last fit."""
        return self._session is not None and self._session.preempted


class CheckpointHooks(LifeCycle, Configured):
    """The hooks of a checkpoint callback with options of its own."""

    def settings_for(self, trainer: Any) -> Settings | None:
        """Return the callback's own options."""
        del trainer
        return self.settings

    @property
    def best_model_path(self) -> str:
        """Path of the best committed checkpoint by the `KeepBest` metric, or ""."""
        return path_of_best(self.settings)

    @best_model_path.setter
    def best_model_path(self, value: str) -> None:
        """Ignore what Lightning's spawn launcher hands over: storage has the same."""

    @property
    def best_model_score(self) -> float | None:
        """The metric of the best checkpoint."""
        best = best_of(self.settings)
        return None if best is None or self.settings.best is None else best.metrics[self.settings.best.metric]

    @property
    def last_model_path(self) -> str:
        """Path of the newest committed checkpoint; "" if there is none."""
        return newest_of(self.settings)


class PluginOptions(Configured):
    """A `CheckpointIO` that carries our options, to be joined with Lightning's own.

    Attached strategies never call it. Lightning's spawn and fork launchers do, for the temporary files that
    pass the weights to the main process: those stay plain files.

    Attributes:
        attached: whether a Trainer's strategy saves and loads through us on behalf of this plugin.
    """

    attached = False

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Register the plugin, which some Trainer will want attached."""
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
                "ShardedCheckpointIO serves a Trainer, and is attached to none. With Fabric, leave it out "
                "and call lightning_ckpt.setup_fabric(fabric, root). With a Trainer, Lightning did not call "
                "our entry point: install ckpt-suite instead of putting it on the path, or use "
                "ShardedCheckpoint as a callback"
            )
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # type: ignore[misc]


class PluginHooks(LifeCycle):
    """The callback behind a plugin: inert in every Trainer without one."""

    def settings_for(self, trainer: Any) -> Settings | None:
        """Return the options of the Trainer's plugin."""
        plugin = trainer.strategy._checkpoint_io
        return plugin.settings if isinstance(plugin, PluginOptions) else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the strategy on behalf of the plugin."""
        super().setup(trainer, pl_module, stage)
        plugin = trainer.strategy._checkpoint_io
        if isinstance(plugin, PluginOptions):
            plugin.attached = True


def plugins_alive() -> bool:
    """Return whether this process holds a plugin of ours."""
    return len(_plugins) > 0


def life_cycles(trainer: Any) -> list[LifeCycle]:
    """Return our callbacks of a Trainer."""
    return [callback for callback in trainer.callbacks if isinstance(callback, LifeCycle)]
