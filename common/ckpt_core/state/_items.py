"""Objects with a state of their own: `state_dict` out, `load_state_dict` in."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, final

import torch

from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state._nested import leaves, rekeyed, with_empties
from ckpt_core.state._packed import PACKED
from ckpt_core.state._tensors import is_sharded, local_bytes

MAX_SHARED_BYTES = 1 << 20
"""Items with more tensor bytes than this go where the model goes, into the sharded data."""


@final
class Counters(SimpleNamespace):
    """Plain values that a run counts and a checkpoint should hold: `Counters(epoch=0, tokens=0)`."""

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved values; names that the checkpoint lacks keep theirs."""
        vars(self).update(state)


def is_stateful(value: Any) -> bool:
    """Whether `value` can tell and take its state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_stateful(name: str, value: Any) -> None:
    """Refuse what has no state.

    Raises:
        ConfigError: it lacks `state_dict` or `load_state_dict`.
    """
    if not is_stateful(value):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict; "
            "keep plain values in ckpt_core.state.Counters"
        )


def is_large(state: Any) -> bool:
    """Whether an item's state belongs into the sharded data: it is sharded itself, or big."""
    values = [value for _, value in leaves(state)]
    return any(map(is_sharded, values)) or local_bytes(values) > MAX_SHARED_BYTES


def function_free(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the functions that some keep in it: the live one was built with its own."""
    return {key: value for key, value in state.items() if not isinstance(value, FunctionType | MethodType)}


def _keys(item: Any) -> Any:
    """A state with the keys that `item` expects."""
    state = item.state_dict()
    if isinstance(item, torch.optim.Optimizer) and state.keys() >= PACKED:
        # One that has made no step yet has no state to take the keys from.
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return {**state, "state": {number: state["state"].get(number) for number in numbers}}
    return state


def load_item(name: str, item: Any, state: Any, *, of_tree: bool = False) -> None:
    """Give an object its saved state.

    Args:
        name: for errors.
        item: the object.
        state: what `item.state_dict()` returned at the save.
        of_tree: whether it was in the sharded data, where empty mappings leave no trace.

    Raises:
        IncompatibleCheckpointError: it refuses.
    """
    try:
        live = _keys(item)
        state = rekeyed(state, live)
        item.load_state_dict(with_empties(state, live) if of_tree else state)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise IncompatibleCheckpointError(
            f"{name} ({type(item).__name__}) refused its saved state: {type(error).__name__}: {error}"
        ) from error
