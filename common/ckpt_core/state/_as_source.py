"""Whatever a user calls the state of a run, as a `StateSource`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ckpt_core.errors import ConfigError
from ckpt_core.state._dict_state import DictState
from ckpt_core.state._source import StateSource
from ckpt_core.state._train_state import TrainState
from ckpt_core.types import CapturedState, SavedState

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
