"""Optimizer state by parameter name: captured as live tensors, restored exactly.

Torch's `get_optimizer_state_dict` is not used: it steps an optimizer without state (AdamW's step count then
starts at 1), and a save must never change training. The names are the same as torch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import without_step_hooks
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import _fsdp1
from ckpt_core.state._model import Names, model_state
from ckpt_core.state._nested import Path, dtype_named, empty_like, leaves, matches, put, rekeyed, shape_of
from ckpt_core.types import SavedEntries, SavedState, SavedTensor

_logger = logger_of(__name__)
CLASS: Final = "optimizer_class"
"""Key of the names of its classes, beside `PACKED`."""
PACKED: Final = frozenset({"state", "param_groups"})
"""The keys of every torch optimizer's `state_dict`. Keys of wrappers are saved beside them."""

_AS_AN_ITEM: Final = (
    "save the whole of it as an item of its own: TrainState(model=..., opt=optimizer) instead of "
    "TrainState(model=..., optimizer=optimizer)"
)
_NUMBERED: Final = (
    ". It uses the numbers of parameters, as `optimizer.state_dict()` does, and FSDP1 may order them "
    "otherwise: load it into a model without FSDP1, or with FSDP2's fully_shard"
)
_OF_TORCH: Final = "torch.optim."
# How a step is computed, not its result: the live optimizer's choice is kept, because it depends on the
# device, the strategy and the torch version.
_IMPLEMENTATION: Final = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
_STATE: Final = "state."
_GROUP: Final = "param_groups."

Fit: TypeAlias = Literal["same", "part", "any"]
"""Which parameters the saved groups may hold: the `same` as the live ones; more, of which the live ones are a
`part` (other ranks train the rest); or `any`: missing ones start with fresh state."""


def fit_of(saved: SavedState) -> Fit:
    """Return how the groups of a checkpoint must fit the live ones."""
    if not saved.strict:
        return "any"
    return "part" if saved.partial else "same"


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a framework's wrapper.

    Raises:
        ConfigError: it is no torch optimizer, or one with state on other ranks.
    """

    def holds(outer: Any, inner: Any) -> bool:
        # A wrapper with state of its own (such as Lookahead) is an optimizer itself.
        return isinstance(inner, torch.optim.Optimizer) and inner is not outer and inner.state is outer.state

    while found := [
        inner
        for name in ("optimizer", "_optimizer")
        if holds(optimizer, inner := getattr(optimizer, name, None))
    ]:
        optimizer = found[0]
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ConfigError(
            "ZeroRedundancyOptimizer hides its shards from a checkpoint; use FSDP2's fully_shard instead"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def class_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the classes of an optimizer, its own first, up to one of torch."""
    names: list[str] = []
    for each in type(optimizer).__mro__[: type(optimizer).__mro__.index(torch.optim.Optimizer)]:
        names.append(f"{each.__module__}.{each.__qualname__}")
        if names[-1].startswith(_OF_TORCH):
            break
    return names


def stable_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the tensors that only a step of the optimizers changes.

    These are the model's parameters and the optimizers' state, for `CapturedState.stable`; none without
    optimizers, because then any code may change a parameter.
    """
    if not optimizers:
        return []
    state = (value for each in optimizers for values in each.state.values() for value in values.values())
    return [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]


def optimizer_state(model: nn.Module, optimizer: Any, *, names: Names | None = None) -> dict[str, Any]:
    """Return state and groups by parameter name, with live state tensors.

    The form is `{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}`. Tensor
    hyperparameters are copied, because a scheduler changes them before the next step.

    Raises:
        ConfigError: the optimizer trains parameters that the model does not hold, or has state that a load
            could not put back.
    """
    inner = unwrap_optimizer(optimizer)
    is_flat = _fsdp1.is_fsdp1(model)
    members = [] if is_flat else (names or Names(model)).of_groups(inner)
    packed = {} if is_flat and optimizer is inner else _packed_state(optimizer, inner)
    named = {key: value for key, value in packed.items() if key not in PACKED}
    if is_flat and named:
        raise ConfigError(
            f"a wrapper around {type(inner).__name__} has state of its own "
            f"({', '.join(sorted(named))}), which cannot be saved under FSDP1; use FSDP2's fully_shard"
        )
    if is_flat:
        named |= _fsdp1.optimizer_state(model, inner)
    else:
        groups = list(zip(packed["param_groups"], members, strict=True))
        name_of = {key: name for group, own in groups for key, name in zip(group["params"], own, strict=True)}
        named["state"] = {name_of.get(key, str(key)): values for key, values in packed["state"].items()}
        named["param_groups"] = [{**group, "params": list(own)} for group, own in groups]
    named["param_groups"] = [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
        }
        for group in named["param_groups"]
    ]
    return {**named, CLASS: class_names(inner)}


def _speaker(optimizer: Any, inner: torch.optim.Optimizer) -> Any:
    """Return the object whose `state_dict` counts: the wrapper, if it has its own."""
    inherited = getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict
    return inner if inherited else optimizer


def _packed_state(optimizer: Any, inner: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return the state of an optimizer and its wrapper in torch's form, or refuse."""
    kind = type(optimizer).__name__
    packed = _speaker(optimizer, inner).state_dict()
    counts = [len(group["params"]) for group in inner.param_groups]
    if (
        not isinstance(packed, Mapping)
        or not packed.keys() >= PACKED
        or not isinstance(packed["state"], Mapping)
        or [len(group["params"]) for group in packed["param_groups"]] != counts
    ):
        keys = ", ".join(map(str, packed)) if isinstance(packed, Mapping) else type(packed).__name__
        raise ConfigError(
            f"{kind}.state_dict() is not in torch's form of state and param_groups "
            f"({keys}), so that its state cannot be kept by parameter names; {_AS_AN_ITEM}"
        )
    beside = {key: value for key, value in packed.items() if key not in PACKED}
    if not _is_named(beside):
        raise ConfigError(
            f"{kind}.state_dict() has state beside state and param_groups "
            f"({', '.join(map(str, beside))}) that is not kept by names, so that it could be given back to "
            f"the wrong parameters; {_AS_AN_ITEM}"
        )
    for name, other in [*vars(inner).items(), *getattr(optimizer, "__dict__", {}).items()]:
        if not isinstance(other, torch.optim.Optimizer) or other.state is inner.state:
            continue
        included = {id(value) for _, value in leaves(packed)}
        if any(isinstance(v, torch.Tensor) and id(v) not in included for _, v in leaves(other.state)):
            raise ConfigError(
                f"{kind} steps another optimizer, {name} "
                f"({type(other).__name__}), whose state its own state_dict() does not return: it would be "
                f"lost. Save that one: TrainState(model=..., optimizer=optimizer.{name})"
            )
    return packed


def _is_named(value: Any) -> bool:
    """Return whether all keys of nested mappings are strings, as in a checkpoint."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_named(each) for key, each in value.items())
    return not isinstance(value, list | tuple) or all(map(_is_named, value))


def probe(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return the state that the first step of `optimizer` creates for `parameter`.

    Steps a throw-away copy.
    """
    groups = optimizer.param_groups
    group = next((each for each in groups if any(own is parameter for own in each["params"])), groups[0])
    copy = nn.Parameter(torch.zeros_like(parameter))
    copy.grad = torch.zeros_like(parameter)
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.__dict__.update(
        state=defaultdict(dict), param_groups=[{**group, "params": [copy]}], **without_step_hooks()
    )
    # The instance's `step` may be a scheduler's wrapper around the live optimizer.
    type(optimizer).step(double)
    state: dict[str, Any] = double.state[copy]
    return state


def _split(key: str, names: Collection[str]) -> tuple[str, str] | None:
    """Split `state.<parameter>.<name>` into (parameter, name); None without such."""
    parts = key.removeprefix(_STATE).split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:end])) in names:
            return name, ".".join(parts[end:])
    return None


def _nested(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state in the nested form; of a flat one, with a group per parameter."""
    if not any(str(key).startswith((_STATE, _GROUP)) for key in state):
        return state
    groups: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(_GROUP):
            # Hyperparameters have no dots in their names.
            name, _, option = key.removeprefix(_GROUP).rpartition(".")
            groups.setdefault(name, {"params": [name]})[option] = value
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(_STATE) and (found := _split(key, groups)):
            by_name.setdefault(found[0], {})[found[1]] = value
    return {"state": by_name, "param_groups": list(groups.values())}


def _numbered(names: Names, members: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map the numbers by which torch's `state_dict` calls parameters to live names.

    The order of the live optimizer must be that of the saved one, as torch's own `load_state_dict` needs it.
    """
    in_order = (name for own in members for name in own)
    return {str(number): name for number, name in enumerate(in_order) if str(number) not in names.by_name}


def _resolver(names: Names, members: Sequence[Sequence[str]]) -> Callable[[Any], str]:
    """Return a function from a saved name, or number, to the live name."""
    numbered = _numbered(names, members)
    return lambda name: numbered.get(str(name)) or names.resolve(str(name))


def load_optimizer_state(
    model: nn.Module, optimizer: Any, state: Mapping[str, Any], *, fit: Fit = "same"
) -> None:
    """Load optimizer state, nested as by `optimizer_state` or in torch's flat form.

    Calls `optimizer.load_state_dict`, so that its hooks run; values that it casts to the parameter's dtype
    are restored as loaded. Groups are matched by their parameters; `fit` says which others the saved groups
    may hold. Live state that the checkpoint lacks is dropped.

    Raises:
        IncompatibleCheckpointError: the groups do not match; the optimizer is then unchanged.
    """
    inner, state = unwrap_optimizer(optimizer), _nested(state)
    names = None if _fsdp1.is_fsdp1(model) else Names(model)
    members = _fsdp1.group_names(model, inner) if names is None else names.of_groups(inner)
    resolve = str if names is None else _resolver(names, members)
    options = _arrange(inner.param_groups, members, state.get("param_groups", ()), resolve, fit=fit)
    values = {resolve(name): each for name, each in state.get("state", {}).items()}
    if names is None:
        indexed = _fsdp1.to_index_form(model, inner, values, options)
    else:
        index_of = {name: index for index, name in enumerate(name for own in members for name in own)}
        trained = {name: names.by_name[name] for name in index_of}
        indexed = {
            "state": {
                index_of.get(name, name): _with_own_keys(inner, trained.get(name), each)
                for name, each in values.items()
            },
            "param_groups": [
                {**each, "params": [index_of[name] for name in own]}
                for each, own in zip(options, members, strict=True)
            ],
        }
    beside = {key: value for key, value in state.items() if key not in {*PACKED, CLASS}}
    try:
        _speaker(optimizer, inner).load_state_dict({**beside, **indexed})
    except (ValueError, TypeError, KeyError) as error:
        raise IncompatibleCheckpointError(
            f"{type(optimizer).__name__} refused the loaded state: {error}"
        ) from error
    for index, parameter in enumerate(each for group in inner.param_groups for each in group["params"]):
        if index in indexed["state"] and parameter in inner.state:
            # `load_state_dict` casts to the parameter's dtype.
            inner.state[parameter] = _uncast(inner.state[parameter], indexed["state"][index], parameter.dtype)


def _with_own_keys(optimizer: torch.optim.Optimizer, parameter: nn.Parameter | None, values: Any) -> Any:
    """Restore keys that are no strings, from live state or a probed first step."""
    if parameter is None:
        return values
    if isinstance(values, Mapping) and not any(
        isinstance(value, Mapping) or not str(key).isidentifier() for key, value in values.items()
    ):
        return dict(values)
    return rekeyed(values, optimizer.state.get(parameter) or probe(optimizer, parameter))


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


def _arrange(
    live: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    resolve: Callable[[str], str],
    *,
    fit: Fit,
) -> list[dict[str, Any]]:
    """Return the saved hyperparameters as one dict (without `params`) per live group.

    `names` are those of the parameters of each live group, as `params` are in the saved ones; `resolve` maps
    a saved name to the live one (a tied parameter has several). A live group that mixes parameters that were
    saved with different hyperparameters is refused.
    """
    owner = _check_members(names, saved, resolve, fit=fit)
    empty = [index for index, group in enumerate(saved) if not group.get("params")]
    arranged: list[dict[str, Any]] = []
    for index, (group, members) in enumerate(zip(live, names, strict=True)):
        sources = sorted({owner[name] for name in members if name in owner}) or empty[:1]
        first = saved[sources[0]] if sources else {}
        for source in sources[1:]:
            other = saved[source]
            keys = {*first, *other} - _IMPLEMENTATION - {"params"}
            differing = sorted(key for key in keys if not _same(first.get(key), other.get(key)))
            if differing:
                one, two = (
                    next(name for name in members if owner.get(name) == each) for each in (sources[0], source)
                )
                raise IncompatibleCheckpointError(
                    f"parameter group {index} of the live optimizer holds parameters that were saved in "
                    f"groups with different {', '.join(differing)}: {one} in group {sources[0]}, {two} "
                    f"in group {source}; build the optimizer with the groups that were saved",
                    mismatched=[f"{key}: {first.get(key)!r} != {other.get(key)!r}" for key in differing],
                )
        own = {key: value for key, value in group.items() if key != "params"}
        kept = {"params", *(_IMPLEMENTATION & own.keys())}
        given = {key: _of_kind(own.get(key), each) for key, each in first.items() if key not in kept}
        arranged.append(own | given)
    return arranged


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _of_kind(live: Any, saved: Any) -> Any:
    """Convert `saved` to a tensor where the live value is one, else to a number."""
    if isinstance(live, torch.Tensor) and isinstance(saved, int | float | torch.Tensor):
        return saved.to(live.device) if isinstance(saved, torch.Tensor) else torch.full_like(live, saved)
    if isinstance(live, int | float) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return saved.item()
    return saved


def _check_members(
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    resolve: Callable[[str], str],
    *,
    fit: Fit,
) -> dict[str, int]:
    """Map every parameter's live name to the index of its saved group; refuse others."""
    params = [group.get("params", ()) for group in saved]
    sizes = list(map(len, params)), list(map(len, names))
    if sizes[0] != sizes[1] and any(type(name) is int for own in params for name in own):
        raise IncompatibleCheckpointError(
            f"the checkpoint's optimizer numbers its parameters, in groups of {sizes[0]}, and the live one "
            f"has groups of {sizes[1]}: only with the same groups it is known which is which"
        )
    owner = {resolve(name): index for index, own in enumerate(params) for name in own}
    live = {name for group in names for name in group}
    missing = sorted(live - owner.keys()) if fit != "any" else []
    unexpected = sorted(owner.keys() - live) if fit == "same" else []
    if missing or unexpected:
        raise IncompatibleCheckpointError(
            "the checkpoint's optimizer trained other parameters: "
            f"not in the checkpoint: {', '.join(missing[:5]) or 'none'}; "
            f"not in the live optimizer: {', '.join(unexpected[:5]) or 'none'}",
            missing=missing,
            unexpected=unexpected,
        )
    return owner


def check_groups(
    model: nn.Module, optimizer: Any, state: Mapping[str, Any] | None, *, fit: Fit = "same"
) -> None:
    """Check that saved state is of the optimizer's kind and parameters.

    Tensors are not compared.
    """
    if state is None:
        return
    optimizer = unwrap_optimizer(optimizer)
    if CLASS in state and fit != "any":
        check_class(optimizer, state[CLASS])
    elif state.get("state") and fit != "any":
        _logger.warning(
            "the checkpoint does not record the class of its optimizer, as none of stock DCP does: that it "
            "was %s is not known, only that names fit, as those of Adam, AdamW and RAdam do to one another",
            type(optimizer).__name__,
        )
    if _fsdp1.is_fsdp1(model):
        return  # `load_optimizer_state` checks it; under FSDP1 a check is a collective
    names, state = Names(model), _nested(state)
    check_entries(optimizer, {path: None for path, _ in leaves(state)})
    members = names.of_groups(optimizer)
    _check_members(members, state.get("param_groups", ()), _resolver(names, members), fit=fit)


def check_class(optimizer: torch.optim.Optimizer, saved: Sequence[str]) -> None:
    """Check that a checkpoint is of this class of optimizer, or of a relative.

    That is the same class of torch, or one that inherits from the other. Classes are known by their own
    names: modules move.
    """
    live = class_names(optimizer)
    then, now = ([name.rpartition(".")[2] for name in names] for names in (saved, live))
    of_torch = saved[-1].startswith(_OF_TORCH) and live[-1].startswith(_OF_TORCH)
    if then[-1] != now[-1] if of_torch else then[0] not in now and now[0] not in then:
        raise IncompatibleCheckpointError(
            f"the checkpoint is of another kind of optimizer: {saved[0]} was saved, and the live one is "
            f"{live[0]}, to which the same values mean something else. Build the one that was saved, or load "
            "the rest without it",
            mismatched=[f"{saved[0]} != {live[0]}"],
        )


def check_entries(optimizer: torch.optim.Optimizer, saved: SavedEntries) -> None:
    """Check by names that a checkpoint is of this kind of optimizer; torch does not.

    New releases of torch add options, and so do schedulers and users; some options add names to the state. An
    optimizer of another kind has other options and other state.
    """
    options, state = (
        {str(path[2]) for path in saved if path[0] == key and len(path) > 2}
        for key in ("param_groups", "state")
    )
    others = _IMPLEMENTATION | _OF_SCHEDULERS
    missing = sorted(set(optimizer.defaults) - options - others)
    foreign = sorted(options.difference(optimizer.defaults, others, *optimizer.param_groups))
    # Before the first step there is no state to compare.
    differ = missing or foreign if state else missing and foreign
    if not options or not differ or (live := _state_names(optimizer)) == state:
        return
    missing += sorted((live or set()) - state)
    foreign += sorted(state - (live or set()))
    raise IncompatibleCheckpointError(
        f"the checkpoint is of another kind of optimizer than {type(optimizer).__name__}: it has "
        f"{', '.join(foreign) or 'nothing else'} and lacks {', '.join(missing) or 'nothing'}",
        missing=missing,
        unexpected=foreign,
    )


def _state_names(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the names of state that is there or a first step makes, if known."""
    kept = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    if not kept:
        try:
            kept = [probe(optimizer, next(p for group in optimizer.param_groups for p in group["params"]))]
        except Exception:  # noqa: BLE001 - of anyone's step, as for lack of a closure; its names stay unknown
            return None
    return {str(name) for state in kept for name in state}


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
    references = _references(model, optimizer)
    live = {name: dict(leaves(optimizer.state.get(each, {}))) for name, each in references.items()}

    @cache
    def probed(name: str) -> Mapping[Path, Any]:
        return dict(leaves(probe(optimizer, references[name])))

    tree: dict[str, Any] = {}
    for path, entry in saved.items():
        if (place := _place(path, references, optimizer)) is None:
            continue
        name, rest = place
        value = None
        if entry is not None and name is None:
            # A hyperparameter, which goes where the live one is when all is loaded.
            value = torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="cpu")
        elif entry is not None and name is not None:
            own = live[name].get(rest)
            made = partial(probed, name)
            if name.isdecimal():
                _check_numbered(path, entry, references[name], made=made)
            value = own if matches(own, entry) else _new_memory(references[name], rest, entry, made)
        put(tree, path, value)
    names = {str(path[1]) for path in saved if path[0] == "state" and len(path) > 1}
    if names and "state" not in tree and all(map(str.isdecimal, names)):
        raise IncompatibleCheckpointError(
            f"the checkpoint has optimizer state of {', '.join(sorted(names)[:5])}, which are no names of "
            f"parameters{_NUMBERED}",
            unexpected=sorted(names),
        )
    check_entries(optimizer, saved)
    return tree


def _check_numbered(
    path: Path, saved: SavedTensor, reference: torch.Tensor, *, made: Callable[[], Mapping[Path, Any]]
) -> None:
    """Refuse state that cannot be of the parameter with its number: no name tells."""
    if not saved.shape or saved.shape == shape_of(reference):
        return
    first = made().get(path[2:])
    if not isinstance(first, torch.Tensor) or shape_of(first) != saved.shape:
        raise IncompatibleCheckpointError(
            f"the checkpoint's optimizer numbers parameters, and {'.'.join(map(str, path))} has the shape "
            f"{saved.shape}, the live parameter {tuple(shape_of(reference))}: build the optimizer of the "
            "same parameters in the same order",
            mismatched=[".".join(map(str, path))],
        )


def _new_memory(
    reference: torch.Tensor, rest: Path, saved: SavedTensor, made: Callable[[], Mapping[Path, Any]]
) -> torch.Tensor:
    """Allocate state of a parameter; `made` tells what a first step makes."""
    dtype, fits = dtype_named(saved.dtype), saved.shape == shape_of(reference)
    if rest[-1] == "step" and not saved.shape:
        return torch.empty((), dtype=dtype, device="cpu")  # torch moves it, if it is to be on a device
    if saved.wrapped or (isinstance(reference, DTensor) and not fits):
        found = made().get(rest)
        if isinstance(found, torch.Tensor) and shape_of(found) == saved.shape:
            # What is made of other tensors, only the optimizer can make.
            return found if saved.wrapped else empty_like(found, dtype)
    elif fits:
        return empty_like(reference, dtype)
    return torch.empty(saved.shape, dtype=dtype, device=reference.device)


def _references(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Map what is trained, aliases and numbers too, to tensors like it.

    Under FSDP1, with flat parameters, they are the model's shards.
    """
    if _fsdp1.is_fsdp1(model):
        shards = model_state(model)
        return {name: shards[name] for own in _fsdp1.group_names(model, optimizer) for name in own}
    names = Names(model)
    members = names.of_groups(optimizer)
    trained = {name for own in members for name in own}
    named: dict[str, torch.Tensor] = {
        name: each for name, each in names.by_name.items() if names.own[each] in trained
    }
    return named | {number: named[name] for number, name in _numbered(names, members).items()}


def _place(
    path: Path, names: Collection[str], optimizer: torch.optim.Optimizer
) -> tuple[str | None, Path] | None:
    """Return a leaf's parameter, if any, and its place; None if not trained here."""
    first = str(path[0])
    if first.startswith(_STATE):
        found = _split(first, names)
        return None if found is None else (found[0], (found[1], *path[1:]))
    if first != "state" or len(path) < 3:
        return None, path
    name = str(path[1])
    if name in names:
        return name, path[2:]
    # Some optimizers have state of their own beside that of parameters.
    return (None, path) if name in optimizer.state else None
