"""Attachment to a strategy, which then saves and loads through the core.

`attach` gives the strategy object a generated subclass of its own class. No public seam will do: a plugin
(`CheckpointIO`) gets the gathered dictionary on one rank, never the shards; a Strategy of ours would have to
be chosen by the user, one for each stock strategy; and the Trainer makes its strategy before any callback,
keeps it, and tests its class, so that a wrapper cannot take its place.

The subclass has a single base, for Python refuses to change an object's class to one with another layout; and
it keeps its name, for logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import load_model_state, load_optimizer_state, model_state, optimizer_state
from lightning_ckpt._session import Session, in_lightnings_words, refuse_what_is_passed_over
from lightning_ckpt._state import check_optimizers

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
    if session is None or session.loaded is None:
        return bool(_stock(self).lightning_restore_optimizer)
    return _trains(self.optimizers) or bool(session.loaded.checkpoint.get("optimizer_states"))


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
    if session.loaded is None:
        _stock(self).load_model_state_dict(checkpoint, strict=strict)
    else:
        load_model_state(self.model, checkpoint["state_dict"], strict=strict, base=session.loaded.base)


def load_optimizer_state_dict(self: Any, session: Session, checkpoint: Mapping[str, Any]) -> None:
    if session.loaded is None or session.loaded.saved is None:
        _stock(self).load_optimizer_state_dict(checkpoint)
        return
    states = checkpoint["optimizer_states"]
    try:
        check_optimizers(self, states)
    except IncompatibleCheckpointError as error:
        what = "its weights were loaded before the optimizers were made, and nothing else"
        raise in_lightnings_words(error, session.loaded.saved.name, error, what) from error
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
