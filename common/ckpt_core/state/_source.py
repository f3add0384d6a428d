"""Sources of training state: the protocol, and nested mappings as a source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import nn

from ckpt_core.data import is_stateful
from ckpt_core.errors import ConfigError
from ckpt_core.state._groups import Fit, fit_of
from ckpt_core.state._items import check_kind, item_state, item_target, load_item
from ckpt_core.state._nested import Path, get, is_leaf, under
from ckpt_core.state._override import Override
from ckpt_core.state._tensors import template
from ckpt_core.state._train_state import TrainState
from ckpt_core.types import CapturedState, SavedEntries, SavedState


@runtime_checkable
class StateSource(Protocol):
    """A training state that can be saved and loaded.

    Calls on every rank, on the training thread:

    1. save: `capture()`. Its tensors are live: they must be copied before the next optimizer step, and those
       that are not parameters or optimizer state before training continues. Its `per_rank` and `shared`
       values are live, too: they must be encoded before training continues.
    2. load: `target(saved)` before anything large is read; its tensors are filled in place and each None is
       replaced by the value read; then `apply(loaded, saved)` with the same structure. Before `apply`, only
       tensors change; if `target` raises, nothing has changed.

    Methods may be collective over the ranks that hold the state. With `begin` (see `CarefulSource`), a
    refused load leaves everything unchanged.
    """

    def capture(self) -> CapturedState:
        """Return the present state."""
        ...

    def target(self, saved: SavedState) -> Mapping[str, dict[str, Any]]:
        """Return part directory -> nested dict: tensors, and None for every plain value.

        It has an entry for every saved entry to be loaded; other entries of the checkpoint need not be read.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another training state.
        """
        ...

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Put everything back; return notes for the user, such as what was not restored.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses what was loaded.
        """
        ...


@runtime_checkable
class CarefulSource(StateSource, Protocol):
    """A training state that first puts back what may refuse, and can undo it."""

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[Path] | None]:
        """Put back small values that may refuse, before any tensor is read.

        Called between `target` and `apply`. In `loaded`, plain values are present, tensors are not.

        Returns:
            A function that undoes it, and returns the paths of values, in `per_rank` or `shared`, that it
            cannot undo: if the load fails later, another that has them must replace them.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses; everything is unchanged.
        """
        ...


@runtime_checkable
class AdjustableSource(StateSource, Protocol):
    """A training state whose hyperparameters a load may change."""

    def check_override(self, change: Override) -> None:
        """Refuse names and values that cannot be changed, before anything is read.

        Raises:
            ConfigError: there is one.
        """
        ...

    def override(self, change: Override) -> None:
        """Change hyperparameters, after `apply`."""
        ...


@runtime_checkable
class SelectiveSource(StateSource, Protocol):
    """A training state that may be a part of what was saved."""

    def takes_all(self, saved: SavedState) -> bool:
        """Return whether a load uses every model and optimizer of a checkpoint."""
        ...


_PART = ""


@final
class DictState:
    """A nested mapping of tensors, plain values and stateful objects, loaded in place.

    Keys are those that `dcp.save(mapping)` writes (and beside an optimizer's, the names of its classes), so
    either reads the other's checkpoints. As with `dcp.load`, the mapping selects what is loaded; other
    entries of the checkpoint are ignored.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping

    def capture(self) -> CapturedState:
        """Return the mapping with its live tensors, and the state of its objects."""
        return CapturedState(sharded={_PART: _states(self._mapping)})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """Return the mapping's tensors, None for plain values, and the objects' entries."""
        return {_PART: _targets(self._mapping, saved.sharded.get(_PART, {}))}

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        """Refuse the state of another kind of optimizer; nothing is put back yet.

        Raises:
            IncompatibleCheckpointError: there is one.
        """
        _check(self._mapping, loaded.get(_PART, {}), fit_of(saved))
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> list[str]:
        """Set plain values and load the objects; tensors were loaded in place.

        Raises:
            IncompatibleCheckpointError: an object refuses its state.
        """
        del saved
        _apply(self._mapping, loaded.get(_PART, {}), "")
        return []


def _states(value: Any) -> Any:
    if isinstance(value, Mapping):
        _check_keys(value)
        return {str(key): _states(each) for key, each in value.items()}
    if is_stateful(value):
        return item_state(value)
    return value if is_leaf(value) else [_states(each) for each in value]


def _check_keys(mapping: Mapping[Any, Any]) -> None:
    names = [str(key) for key in mapping]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            f"several keys of one mapping are called {', '.join(twice)} in a checkpoint, where every key is "
            "a string; only one of them would be saved"
        )


def _targets(value: Any, saved: SavedEntries, *prefix: str | int) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {str(key): _targets(each, saved, *prefix, str(key)) for key, each in value.items()}
    if isinstance(value, nn.Module):
        return _own(value.state_dict(), under(saved, *prefix))
    if is_stateful(value):
        return item_target(value, under(saved, *prefix))
    return None if is_leaf(value) else [_targets(each, saved, *prefix, i) for i, each in enumerate(value)]


def _own(live: Mapping[str, Any], saved: SavedEntries) -> dict[str, Any]:
    """Build the load target of a module: its own names, without other stages' names."""
    found = {path: entry for path, entry in saved.items() if path[0] in live}
    return {**dict.fromkeys(live), **template(live, found)}


def _check(live: Any, loaded: Any, fit: Fit) -> None:
    if is_stateful(live):
        check_kind(live, loaded, fit=fit)
    elif isinstance(live, Mapping):
        for key, value in live.items():
            _check(value, get(loaded, (str(key),)), fit)


def _apply(live: Any, loaded: Any, name: str) -> None:
    is_list = type(live) is list
    for key, value in list(enumerate(live) if is_list else live.items()):
        new = get(loaded, (key if is_list else str(key),))
        if isinstance(value, torch.Tensor) or (not is_list and str(key) not in loaded):
            continue
        if is_stateful(value):
            load_item(f"{name}{key}", value, {} if new is None else new, of_tree=True)
        elif not is_leaf(value):
            _apply(value, {} if new is None else new, f"{name}{key}.")
        else:
            live[key] = new


State: TypeAlias = StateSource | Mapping[str, Any]


def as_source(state: State, items: Collection[str] | None = None) -> StateSource:
    """Return the state as a `StateSource` of only the given items.

    Raises:
        ConfigError: it is no training state.
    """
    if isinstance(state, TrainState):
        return state if items is None else state.select(items)
    if isinstance(state, StateSource):
        return state
    if isinstance(state, Mapping):
        return DictState(state)
    raise ConfigError(
        f"a {type(state).__name__} is no training state: give TrainState(model=..., optimizer=...), "
        "or a mapping of tensors and objects with state_dict and load_state_dict"
    )


def checked_override(state: State, override: Any) -> Override:
    """Return what a user asks to change, if it can be changed in a state.

    Raises:
        ConfigError: it cannot, or `state` is no training state.
    """
    source, change = as_source(state), Override.of(override)
    if change and not isinstance(source, AdjustableSource):
        raise ConfigError(
            f"override= changes the optimizers of a TrainState, not of a {type(state).__name__}"
        )
    if change and isinstance(source, AdjustableSource):
        source.check_override(change)
    return change


def as_captured(state: State | CapturedState) -> CapturedState:
    """Return the present state; see `StateSource.capture`."""
    return state if isinstance(state, CapturedState) else as_source(state).capture()


def takes_all(state: State, saved: SavedState) -> bool:
    """Return whether a load into `state` uses every top-level entry of a checkpoint.

    For a `TrainState`, the entries are models and optimizers. Another source uses all, unless it is a
    `SelectiveSource`.
    """
    if isinstance(state, SelectiveSource):
        return state.takes_all(saved)
    there = {str(path[0]) for leaves in saved.sharded.values() for path in leaves}
    if isinstance(state, TrainState):
        return there & {"model", "optimizer"} <= state.names
    return not isinstance(state, Mapping) or there <= set(map(str, state))
