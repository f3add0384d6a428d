"""Sources of training state: the protocol, plain nested mappings, and the choice for what a user gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import nn

from ckpt_core.errors import ConfigError
from ckpt_core.state._items import is_stateful, load_item
from ckpt_core.state._nested import get, is_leaf, under
from ckpt_core.state._tensors import template
from ckpt_core.state._train_state import TrainState
from ckpt_core.types import CapturedState, SavedEntries, SavedState


@runtime_checkable
class StateSource(Protocol):
    """A training state that can be saved and loaded.

    Call sequence, on every rank and on the thread that trains:

    1. save: `capture()`. Its tensors are live: they must be copied before the next optimizer step, and those
       that are not parameters or optimizer state before training goes on. Its `per_rank` and `shared` values
       are live too: they must be encoded before training goes on.
    2. load: `target(saved)` before anything large is read, then fill its tensors in place and replace each
       None by the value read, then `apply(loaded, saved)` with the same structure. Nothing but tensors is
       changed before `apply`; if `target` raises, nothing is.

    Methods may be collective over the ranks that hold the state. A source that can also `begin` (see
    `CarefulSource`) can be loaded so that a refusal leaves everything as it was.
    """

    def capture(self) -> CapturedState:
        """The state as it is now."""
        ...

    def target(self, saved: SavedState) -> Mapping[str, dict[str, Any]]:
        """Part directory -> nested dict with a tensor for every saved tensor and None for every plain value.

        What the checkpoint holds beyond the template is not wanted and need not be read.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another training state.
        """
        ...

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Put everything back; returns what a person should know (what could not be restored).

        Raises:
            IncompatibleCheckpointError: a part of the state refuses what was loaded.
        """
        ...


@runtime_checkable
class CarefulSource(StateSource, Protocol):
    """A training state that puts back first what may refuse, and can take it back."""

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        """Between `target` and `apply`: put back what is small and may refuse, before any tensor is read.

        In `loaded` plain values are there already, tensors are not.

        Returns:
            Takes it all back.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses; everything is as it was before.
        """
        ...


_PART = ""


@final
class DictState:
    """Saves and loads a nested mapping of tensors, plain values and objects with `state_dict`, in place.

    Keys are the same as `dcp.save(mapping)` writes, so either reads the other's checkpoints. As with
    `dcp.load`, the mapping decides what is loaded; what else the checkpoint holds is left alone.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping

    def capture(self) -> CapturedState:
        """The mapping with its live tensors, and objects replaced by their state."""
        return CapturedState(sharded={_PART: _states(self._mapping)})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """The mapping's own tensors, None for plain values, and all that the checkpoint holds of objects."""
        return {_PART: _targets(self._mapping, saved.sharded.get(_PART, {}))}

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> list[str]:
        """Set plain values and give objects their state; tensors were loaded in place.

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
        return value.state_dict()
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
        return template(value.state_dict(), under(saved, *prefix))
    return None if is_leaf(value) else [_targets(each, saved, *prefix, i) for i, each in enumerate(value)]


def _own(live: Mapping[str, Any], saved: SavedEntries) -> dict[str, Any]:
    """What to load a module into: its own names, for those of other ranks' stages are beside them."""
    found = {path: entry for path, entry in saved.items() if path[0] in live}
    return {**dict.fromkeys(live), **template(live, found)}


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
    """The state as a `StateSource` of only the given items.

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


def as_captured(state: State | CapturedState) -> CapturedState:
    """The state as it is now; see `StateSource.capture`."""
    return state if isinstance(state, CapturedState) else as_source(state).capture()


def takes_all(state: State, saved: SavedState) -> bool:
    """Whether a load of that checkpoint into the state took every model, optimizer and top-level entry.

    A source that cannot be asked, such as a host's, takes all.
    """
    there = {str(path[0]) for leaves in saved.sharded.values() for path in leaves}
    if isinstance(state, TrainState):
        return there & {"model", "optimizer"} <= state.names
    return not isinstance(state, Mapping) or there <= set(map(str, state))
