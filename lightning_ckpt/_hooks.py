"""The callback and the plugin, as calls of the session; free of either package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, ClassVar

from fsspec.core import url_to_fs

from ckpt_core.errors import ConfigError
from lightning_ckpt._ckpt_path import chosen, read_our_directories
from lightning_ckpt._committed import AsModelCheckpoint, committed_of
from lightning_ckpt._options import Configured, Settings, missing_attribute
from lightning_ckpt._pacing import Pacing
from lightning_ckpt._session import Session
from lightning_ckpt._strategy import attach


class LifeCycle(AsModelCheckpoint):
    """The hooks of a callback, to be joined with Lightning's own base class.

    That is a `ModelCheckpoint` which does nothing by itself: Lightning asks no other for `ckpt_path="last"`.

    Attributes:
        trainer_type: the Trainer of that namespace.
        tell: tells the terminal of rank 0, as Lightning does.
        module_name: where its users import from.
    """

    trainer_type: ClassVar[type[Any]]
    tell: ClassVar[Any]
    module_name: ClassVar[str]
    _session: Session | None = None
    _last: bool = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing_attribute(type(self).__name__, name))

    def settings_for(self, _trainer: Any) -> Settings | None:
        """Return the settings for a Trainer, or None to leave it alone."""
        return self.settings

    @property
    def looks_further(self) -> bool:
        """Whether no run is going on, so that there is time for further tiers."""
        return self._session is None or not self._session.is_running

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        settings = self.settings_for(trainer)
        if settings is None:
            return
        self._refuse_strangers(trainer)
        read_our_directories(type(module))
        if self._session is None or self._session.trainer is not trainer:
            self._session = Session(trainer, settings)
        attach(trainer.strategy, self._session)
        self._session.start(stage)
        trainer._checkpoint_connector.resume_start = partial(self._resume, trainer)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Answer `ckpt_path="last"` by any path; `_resume` knows the true one."""
        settings = self.settings_for(trainer)
        if settings is None or settings.root is None:
            return set()
        others = [each for each in trainer.checkpoint_callbacks if not isinstance(each, LifeCycle)]
        self._last = bool(committed_of(settings, further=True)) or not any(map(_may_have_last, others))
        return {os.devnull} if self._last else set()

    def _resume(self, trainer: Any, checkpoint_path: Any = None, *arguments: Any, **options: Any) -> None:
        """Begin with the checkpoint that is meant; called for every run, also without one."""
        connector = trainer._checkpoint_connector
        del connector.resume_start
        last, self._last = self._last, False
        if self._session is not None:
            checkpoint_path = chosen(checkpoint_path, self._session.settings, trainer, last=last)
            self._session.choose(checkpoint_path)
        connector.resume_start(checkpoint_path, *arguments, **options)
        if self._session is not None and self._session.origin is not None:
            self.tell(self._session.origin)

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

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None: ...

    on_train_epoch_end = on_validation_end = on_train_batch_end

    def on_train_start(self, *_: Any) -> None:
        """Take part in the training that begins; the Tuner's trials leave callbacks out."""
        if self._session is not None:
            self._session.take_part()

    @property
    def _pacing(self) -> Pacing | None:
        return None if self._session is None else self._session.pacing

    def on_train_batch_start(self, _trainer: Any, _module: Any, batch: Any, *_: Any) -> None:
        if self._pacing is not None:
            self._pacing.note_tokens(batch)

    def on_validation_start(self, *_: Any) -> None:
        """Finish staged copies first: averaging callbacks exchange weights now."""
        if self._session is not None:
            self._session.settle()

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._pacing is not None and trainer.state.fn == "fit":
            self._pacing.after_validation_batch()

    def on_train_end(self, *_: Any) -> None:
        if self._pacing is not None:
            self._pacing.end()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        """Note the exception; save if `on_exception` says so and all ranks are here."""
        self._last = False
        if self._session is not None:
            self._session.failed(exception)

    @property
    def preempted(self) -> bool:
        """Whether a preemption announced to any rank stopped the last fit."""
        return self._session is not None and self._session.preempted


class CheckpointHooks(LifeCycle, Configured):
    """The hooks of a checkpoint callback with options of its own."""


class PluginHooks(LifeCycle):
    """The callback behind a plugin, in the Trainer that has it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def settings_for(self, trainer: Any) -> Settings | None:
        return self.settings if isinstance(trainer.strategy._checkpoint_io, PluginOptions) else None


class PluginOptions(Configured):
    """A `CheckpointIO` that carries our options, to be joined with Lightning's own.

    Attached strategies never call it in a run of the Trainer. Lightning's spawn and fork launchers do, for
    the temporary files that pass the weights to the main process: those stay plain files.

    Lightning never tells a plugin whose it is. It asks whether there is one right before it hands it to its
    strategy, and asks the strategy for a launcher before it chooses a checkpoint: both times the one who asks
    is on the stack.

    Attributes:
        strategy_type: the strategies of that namespace.
        callback_type: the callback to put into the Trainer.
        attached: whether a Trainer's strategy has this plugin.
    """

    strategy_type: ClassVar[type[Any]]
    callback_type: ClassVar[type[PluginHooks]]
    attached = False

    def __bool__(self) -> bool:
        connector = _on_the_stack(lambda each: vars(each).get("checkpoint_io") is self)
        strategy = None if connector is None else vars(connector).get("strategy")
        if isinstance(strategy, self.strategy_type):
            self.attached = True
            attach(strategy, None)
        elif strategy is not None:
            raise ConfigError(
                "ShardedCheckpointIO serves a Trainer. With Fabric, leave it out and call "
                "lightning_ckpt.setup_fabric(fabric, root)"
            )
        return True

    def join_trainer_of(self, strategy: Any) -> None:
        """Put our callback into the Trainer that is about to run; idempotent."""
        kind = self.callback_type.trainer_type
        trainer = _on_the_stack(lambda each: isinstance(each, kind) and "callbacks" in vars(each))
        if trainer is None or trainer.strategy is not strategy:
            return
        if any(isinstance(each, PluginHooks) for each in trainer.callbacks):
            return
        # Lightning asks the first checkpoint callback for the best, and has all of them at the end.
        behind = 0 if self.settings.best is None else len(trainer.checkpoint_callbacks)
        trainer.callbacks.insert(len(trainer.callbacks) - behind, self.callback_type(self.settings))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a plain file, for a launcher or a Trainer that has not run yet."""
        if not self.attached:
            raise ConfigError(
                "no Trainer has this ShardedCheckpointIO: give it as "
                "Trainer(plugins=[ShardedCheckpointIO(...)]), not inside another plugin or alone; or use "
                "ShardedCheckpoint as a callback"
            )
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # type: ignore[misc]


def _may_have_last(callback: Any) -> bool:
    """Return False for an `OnExceptionCheckpoint` that has saved nothing."""
    if (path := getattr(callback, "ckpt_path", None)) is None:
        return True
    filesystem, place = url_to_fs(os.fspath(path))  # type: ignore[no-untyped-call]
    return bool(filesystem.exists(place))


def _on_the_stack(wanted: Callable[[Any], bool]) -> Any | None:
    """Return the nearest wanted object whose method is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if hasattr(candidate, "__dict__") and wanted(candidate):
            return candidate
        frame = frame.f_back
    return None


def life_cycles(trainer: Any) -> list[LifeCycle]:
    return [callback for callback in trainer.callbacks if isinstance(callback, LifeCycle)]
