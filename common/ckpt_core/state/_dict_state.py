"""A plain nested mapping as a state, as `dcp.save` and `dcp.load` take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from ckpt_core.errors import ConfigError
from ckpt_core.state._items import is_stateful, load_item
from ckpt_core.state._nested import get, is_leaf, under
from ckpt_core.state._tensors import template
from ckpt_core.types import CapturedState, SavedEntries, SavedState

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
    if is_stateful(value):
        return template(value.state_dict(), under(saved, *prefix))
    return None if is_leaf(value) else [_targets(each, saved, *prefix, i) for i, each in enumerate(value)]


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
