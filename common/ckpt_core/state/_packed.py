"""The `state_dict` of an optimizer and its wrapper: saved in full, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ckpt_core.errors import ConfigError

PACKED: Final = frozenset({"state", "param_groups"})
"""The keys of every torch optimizer's `state_dict`. Keys of wrappers are saved beside them."""

_AS_AN_ITEM: Final = (
    "save the whole of it as an item of its own: TrainState(model=..., opt=optimizer) instead of "
    "TrainState(model=..., optimizer=optimizer)"
)


def packed_state(optimizer: Any, inner: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return the state of an optimizer and its wrapper, in torch's form.

    Args:
        optimizer: the optimizer that training steps.
        inner: the torch optimizer in it, with state and parameter groups; the same object without a wrapper.

    Raises:
        ConfigError: some of the state cannot be stored by parameter names.
    """
    packed = speaker(optimizer, inner).state_dict()
    if not isinstance(packed, Mapping) or not packed.keys() >= PACKED or not _same_groups(packed, inner):
        keys = ", ".join(map(str, packed)) if isinstance(packed, Mapping) else type(packed).__name__
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() is not in torch's form of state and param_groups "
            f"({keys}), so that its state cannot be kept by parameter names; {_AS_AN_ITEM}"
        )
    beside = {key: value for key, value in packed.items() if key not in PACKED}
    if beside and not _is_named(beside):
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() has state beside state and param_groups "
            f"({', '.join(map(str, beside))}) that is not kept by names, so that it could be given back to "
            f"the wrong parameters; {_AS_AN_ITEM}"
        )
    _check_hidden(optimizer, inner, packed)
    return packed


def speaker(optimizer: Any, inner: torch.optim.Optimizer) -> Any:
    """Return the object whose `state_dict` counts: the wrapper, if it has its own."""
    inherited = getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict
    return inner if inherited else optimizer


def _same_groups(packed: Mapping[str, Any], inner: torch.optim.Optimizer) -> bool:
    groups = packed["param_groups"]
    counts = [len(group["params"]) for group in inner.param_groups]
    return isinstance(packed["state"], Mapping) and [len(group["params"]) for group in groups] == counts


def _is_named(value: Any) -> bool:
    """Return whether all keys of nested mappings are strings, as in a checkpoint."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_named(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_named, value))
    return True


def _check_hidden(optimizer: Any, inner: torch.optim.Optimizer, packed: Mapping[str, Any]) -> None:
    """Refuse an optimizer with an inner one whose state its `state_dict` omits."""
    for name, other in _held(optimizer, inner):
        if other.state is inner.state or not other.state:
            continue
        included = {id(tensor) for tensor in _tensors(packed)}
        if any(id(tensor) not in included for tensor in _tensors(other.state)):
            raise ConfigError(
                f"{type(optimizer).__name__} steps another optimizer, {name} "
                f"({type(other).__name__}), whose state its own state_dict() does not return: it would be "
                f"lost. Save that one: TrainState(model=..., optimizer=optimizer.{name})"
            )


def _held(optimizer: Any, inner: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for owner in {id(each): each for each in (optimizer, inner)}.values():
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, torch.optim.Optimizer) and value is not inner:
                yield name, value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
