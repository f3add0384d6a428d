"""The callback, the plugin and the strategy; free of either package.

`attach` gives the strategy object a generated subclass of its own class. No public seam will do: a plugin
(`CheckpointIO`) gets the gathered dictionary on one rank, never the shards; a Strategy of ours would have to
be chosen by the user, one for each stock strategy; and the Trainer makes its strategy before any callback,
keeps it, and tests its class, so that a wrapper cannot take its place.

The subclass has a single base, for Python refuses to change an object's class to one with another layout; and
it keeps its name, for logs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FrameType
from typing import Any, ClassVar, Self, cast

from fsspec.core import url_to_fs

from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import load_model_state, load_optimizer_state, model_state, optimizer_state
from lightning_ckpt._ckpt_path import chosen, read_our_directories
from lightning_ckpt._committed import AsModelCheckpoint, committed_of
from lightning_ckpt._options import Configured, Settings, missing_attribute
from lightning_ckpt._pacing import Pacing
from lightning_ckpt._session import Session, in_lightnings_words, refuse_what_is_passed_over
from lightning_ckpt._state import check_optimizers


class CheckpointHooks(AsModelCheckpoint, Configured):
    """The hooks of a callback, to be joined with Lightning's own base class.

    That is a `ModelCheckpoint` which does nothing by itself: Lightning asks no other for `ckpt_path="last"`.

    Attributes:
        trainer_type: the Trainer of that namespace.
        tell: tells the terminal of rank 0, as Lightning does.
    """

    trainer_type: ClassVar[type[Any]]
    tell: ClassVar[Any]
    _session: Session | None = None
    _last: bool = False
    _of_plugin: bool = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing_attribute(type(self).__name__, name))

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return a callback with the options of a plugin."""
        made = cls.__new__(cls)
        made.settings, made._of_plugin = settings, True
        return made

    def serves(self, trainer: Any) -> bool:
        """Return whether it was given to the Trainer itself or by the plugin it has."""
        plugin = trainer.strategy._checkpoint_io
        return not self._of_plugin or getattr(plugin, "settings", None) is self.settings

    @property
    def looks_further(self) -> bool:
        """Whether no run is going on, so that there is time for further tiers."""
        return self._session is None or not self._session.is_running

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if not self.serves(trainer):
            return
        if not isinstance(trainer, self.trainer_type):
            package = type(trainer).__module__.partition(".")[0]
            raise ConfigError(
                f"this ShardedCheckpoint was imported from {type(self).__module__}, but the Trainer is from "
                f"the package {package}: import it from lightning_ckpt.{package}"
            )
        if sum(isinstance(each, CheckpointHooks) and each.serves(trainer) for each in trainer.callbacks) > 1:
            raise ConfigError(
                "one ShardedCheckpoint or one ShardedCheckpointIO per Trainer, not several: join their "
                "policies with |, e.g. save=EverySteps(500) | OnPreemption()"
            )
        read_our_directories(type(module))
        if self._session is None or self._session.trainer is not trainer:
            self._session = Session(trainer, self.settings)
        attach(trainer.strategy, self._session)
        self._session.start(stage)
        trainer._checkpoint_connector.resume_start = partial(self._resume, trainer)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Answer `ckpt_path="last"` by any path; `_resume` knows the true one."""
        if not self.serves(trainer) or self.settings.root is None:
            return set()
        others = [each for each in trainer.checkpoint_callbacks if each is not self]
        self._last = bool(committed_of(self.settings, further=True)) or not any(map(_may_have_last, others))
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
        if self._session is not None and self._session.restored is not None:
            self.tell(self._session.restored)

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
        return self._session is not None and self._session.was_preempted


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
    callback_type: ClassVar[type[CheckpointHooks]]
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
        if any(getattr(each, "settings", None) is self.settings for each in trainer.callbacks):
            return
        # Lightning asks the first checkpoint callback for the best, and has all of them at the end.
        behind = 0 if self.settings.best is None else len(trainer.checkpoint_callbacks)
        place = len(trainer.callbacks) - behind
        ours = self.callback_type.of(self.settings)
        trainer.callbacks = [*trainer.callbacks[:place], ours, *trainer.callbacks[place:]]  # a user's list

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


_SESSION = "_ckpt_session"
_MARK = "_ckpt_stock_class"


def attach(strategy: Any, session: Session | None) -> None:
    """Make `strategy` save and load through `session`, as soon as there is one."""
    if session is not None:
        refuse_what_is_passed_over(strategy)
    setattr(strategy, _SESSION, session)
    if not hasattr(type(strategy), _MARK):
        strategy.__class__ = _attached_class(cast("Any", type(strategy)))


@cache
def _attached_class(stock: type[Any]) -> type[Any]:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, _MARK: stock}
    return type(stock.__name__, (stock,), {**names, **_OVERRIDES})


def reduce_to_stock(self: Any, protocol: Any) -> Any:
    """Pickle and copy an object of the stock class, which another Trainer may attach."""
    return object.__new__, (getattr(type(self), _MARK),), *_stock(self).__reduce_ex__(protocol)[2:]


def _stock(strategy: Any) -> Any:
    return super(type(strategy), strategy)


def _session(strategy: Any) -> Session | None:
    """Return the session, unless the strategy now serves another Trainer."""
    session: Session | None = getattr(strategy, _SESSION, None)
    module = strategy.lightning_module
    if session is None or module is None or module._trainer is not session.trainer:
        return None
    return session


def _ours(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method the session; without one, call the stock method of its name."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if (session := _session(self)) is None:
            return getattr(_stock(self), method.__name__)(*arguments, **options)
        return method(self, session, *arguments, **options)

    return call


def _trains(optimizers: Sequence[Any]) -> bool:
    """Return whether there are parameters to train; Lightning has a mock of `None`."""
    return any(optimizer.param_groups for optimizer in optimizers)


def launcher(self: Any) -> Any:
    """Return the stock launcher, once a plugin has joined the Trainer that asks."""
    plugin = self._checkpoint_io
    if hasattr(plugin, "join_trainer_of"):
        plugin.join_trainer_of(self)
    return _stock(self).launcher


def lightning_restore_optimizer(self: Any) -> bool:
    session = _session(self)
    if session is None or session.resumed is None:
        return bool(_stock(self).lightning_restore_optimizer)
    return _trains(self.optimizers) or bool(session.resumed.checkpoint.get("optimizer_states"))


def lightning_module_state_dict(self: Any, _session: Session) -> dict[str, Any]:
    return model_state(self.model)


def optimizer_state_of(self: Any, optimizer: Any) -> dict[str, Any]:
    if _session(self) is None or not _trains([optimizer]):
        return dict(_stock(self).optimizer_state(optimizer))
    return optimizer_state(self.model, optimizer)


def save_checkpoint(
    _self: Any,
    session: Session,
    checkpoint: dict[str, Any],
    filepath: str | os.PathLike[str],
    storage_options: Any | None = None,
) -> None:
    if storage_options is not None:
        raise ConfigError("give storage_options= to ShardedCheckpoint, not to save_checkpoint()")
    session.save(checkpoint, filepath)


def load_checkpoint(
    self: Any,
    session: Session,
    checkpoint_path: str | os.PathLike[str],
    weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
) -> dict[str, Any]:
    return session.load(
        checkpoint_path,
        partial(_stock(self).load_checkpoint, checkpoint_path),
        trusted=weights_only is False,
        has_optimizers=self.restore_checkpoint_after_setup,
    )


def load_model_state_dict(
    self: Any,
    session: Session,
    checkpoint: Mapping[str, Any],
    strict: bool = True,  # noqa: FBT001, FBT002 - Lightning's signature
) -> None:
    if session.resumed is None:
        _stock(self).load_model_state_dict(checkpoint, strict=strict)
    else:
        load_model_state(self.model, checkpoint["state_dict"], strict=strict, base=session.resumed.base)


def load_optimizer_state_dict(self: Any, session: Session, checkpoint: Mapping[str, Any]) -> None:
    if session.resumed is None or session.resumed.saved is None:
        _stock(self).load_optimizer_state_dict(checkpoint)
        return
    states = checkpoint["optimizer_states"]
    try:
        check_optimizers(self, states)
    except IncompatibleCheckpointError as error:
        what = "its weights were loaded before the optimizers were made, and nothing else"
        raise in_lightnings_words(error, session.resumed.saved.name, error, what) from error
    for optimizer, state in zip(self.optimizers, states, strict=True):
        load_optimizer_state(self.model, optimizer, state)


def remove_checkpoint(self: Any, session: Session, filepath: str | os.PathLike[str]) -> None:
    if self.is_global_zero:
        session.remove(filepath, partial(_stock(self).remove_checkpoint, filepath))


def on_train_start(self: Any, session: Session) -> None:
    """Start training; load the exact position last, when random numbers are final."""
    _stock(self).on_train_start()
    session.begin_training()


def teardown(self: Any, session: Session) -> None:
    try:
        session.finish()
    finally:
        _stock(self).teardown()


_OVERRIDES: dict[str, Callable[..., Any] | property] = {
    "launcher": property(launcher),
    "lightning_restore_optimizer": property(lightning_restore_optimizer),
    "optimizer_state": optimizer_state_of,
    "__reduce_ex__": reduce_to_stock,
    **{
        each.__name__: _ours(each)
        for each in (
            *(lightning_module_state_dict, save_checkpoint, load_checkpoint, load_model_state_dict),
            *(load_optimizer_state_dict, remove_checkpoint, on_train_start, teardown),
        )
    },
}
