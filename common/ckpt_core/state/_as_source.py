"""Whatever a user calls the state of a run, as a `StateSource`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ckpt_core.errors import ConfigError
from ckpt_core.state._dict_state import DictState
from ckpt_core.state._source import StateSource
from ckpt_core.state._train_state import TrainState
from ckpt_core.types import CapturedState

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
