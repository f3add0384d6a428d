"""Optimizer state by parameter name: captured as live tensors, restored exactly.

Torch's `get_optimizer_state_dict` is not used: it steps an optimizer without state (AdamW's step count then
starts at 1), and a save must never change training. The names are the same as torch's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import _fsdp1, _groups
from ckpt_core.state._groups import is_flat, nested, probe
from ckpt_core.state._model import model_state
from ckpt_core.state._nested import Path, leaves, put, rekeyed
from ckpt_core.state._parameter_names import ParameterNames
from ckpt_core.state._tensors import dtype_named, empty_like, matches, shape_of
from ckpt_core.types import SavedEntries, SavedTensor

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


_NUMBERED = (
    ". It uses the numbers of parameters, as `optimizer.state_dict()` does: load it in the same form, by "
    'CheckpointManager.load({"optimizer": optimizer}) with the same parameters in the same order, and the '
    "rest with items="
)


def optimizer_target(model: nn.Module, optimizer: Any, saved: SavedEntries) -> dict[str, Any]:
    """Return a nested dict with the saved keys: tensors to fill, None for values.

    A saved tensor is loaded into the live one if it matches, else into new memory of the saved dtype with the
    parameter's placement; the live optimizer is unchanged. `saved` has paths relative to the optimizer. State
    of parameters that it does not train is omitted: another rank may train them.

    Raises:
        ConfigError: the optimizer trains parameters that the model does not hold.
        IncompatibleCheckpointError: the checkpoint is of another kind of optimizer.
    """
    optimizer = unwrap_optimizer(optimizer)
    templates = _Template.of(model, optimizer)
    tree: dict[str, Any] = {}
    for path, entry in saved.items():
        if (role := templates.role(path)) is not None:
            put(tree, path, None if entry is None else templates.tensor(role, entry))
    names = {str(path[1]) for path in saved if path[0] == "state" and len(path) > 1}
    if names and "state" not in tree and all(map(str.isdecimal, names)):
        raise IncompatibleCheckpointError(
            f"the checkpoint has optimizer state of {', '.join(sorted(names)[:5])}, which are no names of "
            f"parameters{_NUMBERED}",
            unexpected=sorted(names),
        )
    _groups.check_entries(optimizer, saved)
    return tree


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _LeafRole:
    """The role of a saved leaf: state of a parameter, hyperparameter, or neither."""

    parameter: str | None = None
    rest: Path = ()
    option: str | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Template:
    """A builder of load targets.

    Attributes:
        optimizer: the live optimizer, which is not changed.
        references: name of every parameter that it trains, aliases included -> a tensor with its shape and
            placement.
        states: the same names -> live state, if it has the same form as the saved one.
        groups: the same names -> index of the live group.
        probes: name -> state that a first step creates, where it was probed.
    """

    optimizer: torch.optim.Optimizer
    references: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[Path, Any]]
    groups: Mapping[str, int]
    probes: dict[str, Mapping[Path, Any]] = field(default_factory=dict[str, Mapping[Path, Any]])

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> _Template:
        """Inspect a live optimizer; under FSDP1, with flat parameters, the model's shards."""
        if _fsdp1.is_fsdp1(model):
            shards = model_state(model)
            groups = _numbered(_fsdp1.group_names(model, optimizer))
            return cls(
                optimizer=optimizer,
                references={name: shards[name] for name in groups},
                states={},
                groups=groups,
            )
        names = ParameterNames.of(model)
        own = _numbered(names.of_groups(optimizer))
        references = {name: each for name, each in names.by_name.items() if names.own[each] in own}
        return cls(
            optimizer=optimizer,
            references=references,
            states={
                name: dict(leaves(optimizer.state[each]))
                for name, each in references.items()
                if each in optimizer.state
            },
            groups={name: own[names.resolve(name)] for name in references},
        )

    def role(self, path: Path) -> _LeafRole | None:
        """Return the role of the leaf at `path`; None for a parameter not trained here."""
        first = str(path[0])
        if first == "param_groups" and len(path) > 2:
            return _LeafRole(option=str(path[2]))
        if first == "state" and len(path) > 2:
            return self._of_parameter(str(path[1]), path[2:])
        if first.startswith("state."):
            found = _groups.split(first, self.references)
            return None if found is None else _LeafRole(parameter=found[0], rest=(found[1], *path[1:]))
        return _LeafRole()

    def _of_parameter(self, name: str, rest: Path) -> _LeafRole | None:
        if name in self.references:
            return _LeafRole(parameter=name, rest=rest)
        # Some optimizers have state of their own beside that of parameters.
        return _LeafRole() if name in self.optimizer.state else None

    def tensor(self, role: _LeafRole, saved: SavedTensor) -> torch.Tensor:
        """Return memory for one saved tensor."""
        dtype = dtype_named(saved.dtype)
        name = role.parameter
        if name is None:
            return torch.empty(saved.shape, dtype=dtype, device=self._option_device(role.option))
        reference = self.references[name]
        live = self.states.get(name, {}).get(role.rest)
        if matches(live, saved):
            return live
        if role.rest[-1] == "step" and not saved.shape:
            return torch.empty((), dtype=dtype, device=self._step_device(name))
        fits = saved.shape == shape_of(reference)
        if saved.wrapped or (isinstance(reference, DTensor) and not fits):
            return self._like_probe(name, role.rest, saved)
        if fits:
            return empty_like(reference, dtype)
        return torch.empty(saved.shape, dtype=dtype, device=reference.device)

    def _option_device(self, option: str | None) -> torch.device:
        """Return the device of a tensor hyperparameter, from any group: order may differ."""
        values = [group.get(str(option)) for group in self.optimizer.param_groups]
        return next(
            (value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu")
        )

    def _step_device(self, name: str) -> torch.device:
        group = self.optimizer.param_groups[self.groups[name]]
        on_device = group.get("capturable") or group.get("fused")
        return self.references[name].device if on_device else torch.device("cpu")

    def _like_probe(self, name: str, rest: Path, saved: SavedTensor) -> torch.Tensor:
        """Place state of another shape than its parameter's as the optimizer would."""
        reference = self.references[name]
        if name not in self.probes:
            self.probes[name] = dict(leaves(probe(self.optimizer, self.groups[name], reference)))
        found = self.probes[name].get(rest)
        dtype = dtype_named(saved.dtype)
        if isinstance(found, torch.Tensor) and shape_of(found) == saved.shape:
            # What is made of other tensors, only the optimizer can make.
            return found if saved.wrapped else empty_like(found, dtype)
        return torch.empty(saved.shape, dtype=dtype, device=reference.device)


def _numbered(names: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: index for index, members in enumerate(names) for name in members}
