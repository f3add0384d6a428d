"""Optimizer state by parameter name: captured as live tensors, restored exactly.

Torch's `get_optimizer_state_dict` is not used: it steps an optimizer without state (AdamW's step count then
starts at 1), and a save must never change training. The names are the same as torch's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import _fsdp1, _groups
from ckpt_core.state._groups import is_flat, nested, probe
from ckpt_core.state._nested import leaves, rekeyed
from ckpt_core.state._packed import PACKED, packed_state, speaker
from ckpt_core.state._parameter_names import ParameterNames

_logger = logger_of(__name__)
CLASS: Final = "optimizer_class"
"""Key of the names of its classes, beside `PACKED`."""


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a framework's wrapper.

    Raises:
        ConfigError: it is no torch optimizer, or one with state on other ranks.
    """
    while (inner := _inner(optimizer)) is not None:
        optimizer = inner
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ConfigError(
            "ZeroRedundancyOptimizer hides its shards from a checkpoint; use FSDP2's fully_shard instead"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        # A wrapper with state of its own (such as Lookahead) is an optimizer itself.
        if (
            isinstance(inner, torch.optim.Optimizer)
            and inner is not optimizer
            and inner.state is optimizer.state
        ):
            return inner
    return None


def optimizer_state(
    model: nn.Module, optimizer: Any, *, names: ParameterNames | None = None
) -> dict[str, Any]:
    """Return state and groups by parameter name, with live state tensors.

    The form is `{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}`. Tensor
    hyperparameters are copied, because a scheduler changes them before the next step.

    Args:
        model: the model that it trains.
        optimizer: the optimizer, wrapped or not.
        names: the names of `model`, if known.

    Raises:
        ConfigError: the optimizer trains parameters that the model does not hold, or has state that a load
            could not put back.
    """
    inner = unwrap_optimizer(optimizer)
    if _fsdp1.is_fsdp1(model):
        own = packed_state(optimizer, inner) if optimizer is not inner else {}
        _refuse_beside(inner, set(own) - PACKED)
        return _complete(inner, _fsdp1.optimizer_state(model, inner))
    members_of_groups = (names or ParameterNames.of(model)).of_groups(inner)
    packed = packed_state(optimizer, inner)
    by_index: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    for group, members in zip(packed["param_groups"], members_of_groups, strict=True):
        by_index.update(zip(group["params"], members, strict=True))
        groups.append({**group, "params": list(members)})
    state = {by_index.get(key, str(key)): values for key, values in packed["state"].items()}
    beside = {key: value for key, value in packed.items() if key not in PACKED}
    return _complete(inner, {**beside, "state": state, "param_groups": groups})


def _refuse_beside(optimizer: torch.optim.Optimizer, keys: Collection[str]) -> None:
    if keys:
        raise ConfigError(
            f"a wrapper around {type(optimizer).__name__} has state of its own "
            f"({', '.join(sorted(keys))}), which cannot be saved under FSDP1; use FSDP2's fully_shard"
        )


def _complete(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Add what the optimizer is, and copy tensors among its hyperparameters."""
    groups = [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
        }
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups, CLASS: _groups.class_names(optimizer)}


def load_optimizer_state(
    model: nn.Module, optimizer: Any, state: Mapping[str, Any], *, fit: _groups.Fit = "same"
) -> None:
    """Load optimizer state, nested as by `optimizer_state` or in torch's flat form.

    Calls `optimizer.load_state_dict`, so that its hooks run; values that it casts to the parameter's dtype
    are restored as loaded. Groups are matched by their parameters; `fit` says which others the saved groups
    may hold. Live state that the checkpoint lacks is dropped.

    Raises:
        IncompatibleCheckpointError: the groups do not match; the optimizer is then unchanged.
    """
    inner = unwrap_optimizer(optimizer)
    if is_flat(state):
        state = nested(state)
    indexed = (
        _fsdp1_index_form(model, inner, state, fit=fit)
        if _fsdp1.is_fsdp1(model)
        else _index_form(model, inner, state, fit=fit)
    )
    beside = {key: value for key, value in state.items() if key not in {*PACKED, CLASS}}
    try:
        speaker(optimizer, inner).load_state_dict({**beside, **indexed})
    except (ValueError, TypeError, KeyError) as error:
        raise IncompatibleCheckpointError(
            f"{type(optimizer).__name__} refused the loaded state: {error}"
        ) from error
    _undo_casts(inner, indexed["state"])


def check_groups(
    model: nn.Module, optimizer: Any, state: Mapping[str, Any] | None, *, fit: _groups.Fit = "same"
) -> None:
    """Check that saved state is of the optimizer's kind and parameters.

    Tensors are not compared.

    Raises:
        IncompatibleCheckpointError: it is not.
    """
    optimizer = unwrap_optimizer(optimizer)
    if state is not None and CLASS in state and fit != "any":
        _groups.check_class(optimizer, state[CLASS])
    elif state is not None and state.get("state") and fit != "any":
        _logger.warning(
            "the checkpoint does not record the class of its optimizer, as none of stock DCP does: that it "
            "was %s is not known, only that names fit, as those of Adam, AdamW and RAdam do to one another",
            type(optimizer).__name__,
        )
    if state is None or _fsdp1.is_fsdp1(model):
        return  # `load_optimizer_state` checks it; under FSDP1 a check is a collective
    names = ParameterNames.of(model)
    state = nested(state) if is_flat(state) else state
    groups = state.get("param_groups", ())
    _groups.check_entries(optimizer, {path: None for path, _ in leaves(state)})
    _groups.check_members(names.of_groups(optimizer), groups, names.resolve, fit=fit)


def _index_form(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, fit: _groups.Fit
) -> dict[str, Any]:
    names = ParameterNames.of(model)
    members = names.of_groups(optimizer)
    saved = state.get("param_groups", ())
    groups = _groups.arrange(optimizer.param_groups, members, saved, names.resolve, fit=fit)
    index_of = {name: index for index, name in enumerate(name for own in members for name in own)}
    group_of = {name: index for index, own in enumerate(members) for name in own}

    def entry(name: str, values: Any) -> tuple[int | str, Any]:
        own = names.resolve(name)
        if own not in index_of:
            return name, values
        return index_of[own], _with_own_keys(optimizer, names.by_name[own], group_of[own], values)

    return {
        "state": dict(entry(*item) for item in state.get("state", {}).items()),
        "param_groups": [
            {**group, "params": [index_of[name] for name in own]}
            for group, own in zip(groups, members, strict=True)
        ],
    }


def _with_own_keys(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: int, values: Any) -> Any:
    """Restore keys that are no strings, from live state or a probed first step."""
    plain = isinstance(values, Mapping) and not any(
        isinstance(value, Mapping) or not str(key).isidentifier() for key, value in values.items()
    )
    if plain:
        return dict(values)
    return rekeyed(values, optimizer.state.get(parameter) or probe(optimizer, group, parameter))


def _fsdp1_index_form(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, fit: _groups.Fit
) -> dict[str, Any]:
    members = _fsdp1.group_names(model, optimizer)
    saved = state.get("param_groups", ())
    groups = _groups.arrange(optimizer.param_groups, members, saved, str, fit=fit)
    named = {
        "state": {name: dict(values) for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": own} for group, own in zip(groups, members, strict=True)],
    }
    return _fsdp1.to_index_form(model, optimizer, named)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Mapping[Any, Any]) -> None:
    """Undo the casts of `Optimizer.load_state_dict` to the parameter's dtype."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for key, values in loaded.items():
        parameter = parameters.get(key)
        if parameter is not None and parameter in optimizer.state:
            optimizer.state[parameter] = _uncast(optimizer.state[parameter], values, parameter.dtype)


def _uncast(live: Any, loaded: Any, cast_to: torch.dtype) -> Any:
    if isinstance(live, torch.Tensor) and isinstance(loaded, torch.Tensor):
        was_cast = live.dtype == cast_to and loaded.dtype != cast_to
        return loaded.to(live.device) if was_cast else live
    if isinstance(live, dict) and isinstance(loaded, Mapping):
        live.update({key: _uncast(live[key], loaded[key], cast_to) for key in loaded if key in live})
        return live
    if isinstance(live, list) and isinstance(loaded, list):
        return [_uncast(one, other, cast_to) for one, other in zip(live, loaded, strict=False)]
    # `load_state_dict` also turns a string into the repr of a generator.
    return loaded if isinstance(loaded, str) else live


def stable_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the tensors that only a step of the optimizers changes.

    These are the model's parameters and the optimizers' state, for `CapturedState.stable`; none without
    optimizers, because then any code may change a parameter.
    """
    if not optimizers:
        return []
    state = (value for each in optimizers for values in each.state.values() for value in values.values())
    return [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
