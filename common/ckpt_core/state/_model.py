"""The model's state: names without wrappers -> live tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ckpt_core._torch_internals import loads_itself
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state._fsdp1 import is_fsdp1
from ckpt_core.state._nested import Path, empty_like, matches, put_back_packed, shape_of, template
from ckpt_core.types import SavedEntries, SavedState, SavedTensor

_logger = logger_of(__name__)
_EXTRA_STATE: Final = "_extra_state"
_COMPILED: Final = "_orig_mod."
_ACTIVATIONS: Final = "_checkpoint_wrapped_module"
_WRAPPERS: Final = frozenset({"_orig_mod", _ACTIVATIONS, "_fsdp_wrapped_module"})

Models: TypeAlias = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]


@final
class Names:
    """The names of a model in checkpoints: those of the bare model, without wrappers.

    Attributes:
        modules: by their names with wrappers.
        by_name: the parameters, under each of their names.
        own: the first name of each, of a tied one, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.by_name: dict[str, nn.Parameter] = {}
        self.own: dict[nn.Parameter, str] = {}
        self._prefixes: dict[str, str] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            self.modules[raw] = module
            parent, _, part = raw.rpartition(".")
            # "module" may be the name of any child; only DDP's own child is a wrapper.
            of_ddp = part == "module" and isinstance(self.modules[parent], DistributedDataParallel)
            own = "" if not raw or part in _WRAPPERS or of_ddp else f"{part}."
            prefix = self._prefixes[raw] = self._prefixes.get(parent, "") + own
            if isinstance(module, FSDPModule):
                # After a forward pass without a backward, as in an evaluation, FSDP2 leaves whole parameters
                # in the root, which are not the optimizer's.
                module.reshard()
            for leaf, parameter in self.modules[raw].named_parameters(recurse=False, remove_duplicate=False):
                self.by_name[prefix + leaf] = parameter
                self.own.setdefault(parameter, prefix + leaf)

    @property
    def bare(self) -> nn.Module:
        """The model without wrappers around the whole of it."""
        return [module for raw, module in self.modules.items() if not self._prefixes[raw]][-1]

    def name(self, raw: str) -> str:
        """Return the name of a key of `state_dict`, whose hooks may remove wrappers."""
        prefix, _, leaf = raw.rpartition(".")
        while prefix not in self._prefixes:
            prefix, _, part = prefix.rpartition(".")
            leaf = leaf if part in _WRAPPERS else f"{part}.{leaf}"
        return self._prefixes[prefix] + leaf

    def resolve(self, name: str) -> str:
        """Return the own name of the parameter called `name`; `name` if there is none."""
        parameter = self.by_name.get(name)
        return name if parameter is None else self.own[parameter]

    def of_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the own names of the optimizer's parameters, group by group.

        Raises:
            ConfigError: the optimizer holds a parameter that the model does not.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        strangers = [
            f"group {index}: parameter of shape {tuple(parameter.shape)}"
            for index, group in enumerate(groups)
            for parameter in group
            if parameter not in self.own
        ]
        if strangers:
            raise ConfigError(
                "the optimizer holds parameters that the model does not, so they have no name in a "
                f"checkpoint; give every model that the optimizer trains ({'; '.join(strangers)})"
            )
        return [[self.own[parameter] for parameter in group] for group in groups]


def as_module(models: Models) -> nn.Module:
    """Combine `models` into one module, so that one optimizer may train several.

    Names become `name.parameter`.

    Raises:
        ConfigError: a name cannot be that of a child module, or a value is no module.
    """
    if isinstance(models, nn.Module):
        return models
    named = models if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    given: Mapping[str, object] = named
    strangers = [name for name, model in given.items() if not isinstance(model, nn.Module)]
    if strangers or not named:
        raise ConfigError(f"model takes modules, at least one; these are none: {', '.join(strangers) or '-'}")
    try:
        return nn.ModuleDict(dict(named))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a model has a name that torch does not allow for a module: {error}") from error


def owner(models: Models, optimizer: Any) -> nn.Module:
    """Return the model that an optimizer trains, or all as one if it trains several.

    Raises:
        ConfigError: there is no model.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = [models] if isinstance(models, nn.Module) else models
    for model in given.values() if isinstance(given, Mapping) else given:
        if trained <= {id(parameter) for parameter in model.parameters()}:
            return model
    return as_module(models)


def model_state(model: nn.Module, *, names: Names | None = None) -> dict[str, Any]:
    """Return parameters, buffers and extra state by name.

    The tensors are the live ones, except under FSDP1, which returns copies of its shards.
    """
    if is_fsdp1(model):
        # Of a compiled module within FSDP1 torch reads the bare names, but returns others.
        return {name.replace(_COMPILED, ""): value for name, value in get_model_state_dict(model).items()}
    # Torch's function takes half a second for a few thousand parameters, at every save.
    names = names or Names(model)
    return {names.name(key): value for key, value in model.state_dict().items()}


def local_buffers(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    part: str = "",
    prefix: str = "model.",
    names: Names | None = None,
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the rank-local buffers in `state`, for `CapturedState.local`.

    They are the plain buffers, which may differ between ranks.
    """
    parameters = (names or Names(model)).by_name
    return {
        (part, prefix + name): value
        for name, value in state.items()
        if name not in parameters and type(value) is torch.Tensor
    }


def model_target(
    model: nn.Module, saved: SavedEntries, of: SavedState | None = None, *, base: Collection[str] = ()
) -> dict[str, Any]:
    """Build the load target: the selected live tensors, and None for plain values.

    Missing names, and names on other ranks, are checked where all ranks are known. Without a checkpoint `of`
    which they are, everything is selected; it may lack the names of the `base`, whose values the model has.
    """
    lacking = set(base) - {path[0] for path in saved}
    live = {name: v for name, v in model_state(model).items() if name not in lacking and not is_lazy(v)}
    if of is not None:
        live = {name: value for name, value in live.items() if of.wants(("model", name))}
    target: dict[str, Any] = {name: each for name, each in live.items() if isinstance(each, torch.Tensor)}
    by_name: dict[str, dict[Path, SavedTensor | None]] = {}
    for path, entry in saved.items():
        by_name.setdefault(str(path[0]), {})[path] = entry
    for name in of_own_loaders(model, saved, target) if of is None or not of.include else ():
        value = target.pop(name, None)
        memory = None if value is None else empty_like(value, value.dtype)
        target |= template({name: memory}, by_name.get(name, {}))
    for name in by_name.keys() & live.keys():
        odd = any(each is not None and not matches(live[name], each) for each in by_name[name].values())
        # Extra state, and what modules pack for their state_dict, may have another form than the saved one.
        if name.endswith(_EXTRA_STATE) or (odd and _is_packed(name, live)):
            target[name] = template({name: live[name]}, by_name[name])[name]
    return target


def of_own_loaders(model: nn.Module, saved: SavedEntries, target: Mapping[str, Any]) -> set[str]:
    """Return the names that modules with ways of their own to load must be given.

    Such a module may take other names and shapes than it has, and may swap them: what is below it gets
    memory of its own. It decides when the rest has been read. Where everything fits, nothing is special.
    """
    names = {str(path[0]) for path in saved} | set(target)
    plain = {name for name in names if not name.endswith(_EXTRA_STATE)}
    shapes = {str(path[0]): entry.shape for path, entry in saved.items() if entry and len(path) == 1}
    odd = {name for name in plain if name not in target or shape_of(target[name]) != shapes.get(name)}
    found = set[str]()
    of_model = Names(model)
    for raw, module in of_model.modules.items() if odd and not is_fsdp1(model) else ():
        if loads_itself(module, is_root=not raw):
            prefix = of_model.name(f"{raw}." if raw else "")
            below = {name for name in names if name.startswith(prefix)}
            found |= below if odd & below else set()
    return found


def _is_packed(name: str, live: Mapping[str, Any]) -> bool:
    """Return whether an entry belongs to another one, as that of a 4-bit weight."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in live for end in range(1, len(parts)))


def load_model_state(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, base: Collection[str] = ()
) -> None:
    """Put loaded values back; tensors that were loaded in place are not copied again.

    With `strict` every name of the model must be there, but for those of the `base`, whose values stay.

    Raises:
        IncompatibleCheckpointError: names or shapes differ from the model's.
    """
    try:
        if is_fsdp1(model):
            live = model_state(model) if base else {}
            whole = {**{name: live[name] for name in base if name in live}, **state}
            set_model_state_dict(model, whole, options=StateDictOptions(strict=strict))
        else:
            _put_back(model, state, strict=strict, base=base)
    except RuntimeError as error:
        raise IncompatibleCheckpointError(f"the loaded state does not fit the model: {error}") from error


def _put_back(model: nn.Module, state: Mapping[str, Any], *, strict: bool, base: Collection[str]) -> None:
    """Restore what `model_state` captured, under the same names."""
    names, remaining = Names(model), dict(state)
    values: dict[str, Any] = {}
    for key, live in model.state_dict().items():
        name = names.name(key)
        if name in state:
            values[key] = remaining.pop(name, state[name])
        elif strict and key.endswith(_EXTRA_STATE) and isinstance(live, Mapping):
            values[key] = {}  # empty extra state is not recorded in a checkpoint
    # For a module with a load of its own; checkpoint wrappers put in their prefix themselves.
    raw_of = {names.name(f"{raw}."): f"{raw}." for raw in names.modules if raw and _ACTIVATIONS not in raw}
    others: dict[str, Any] = {}
    for name, value in remaining.items():
        parent = max((each for each in raw_of if name.startswith(each)), key=len, default="")
        others[raw_of.get(parent, "") + name.removeprefix(parent)] = value
    found: Any = model.load_state_dict({**values, **others}, strict=False)
    if found is None or not strict:
        return  # a method of the model's own, which raises its own errors
    # Torch reports a loaded key as unexpected if the parameter's own name has a dot.
    unexpected = [key for key in found.unexpected_keys if key not in values]
    missing = [key for key in found.missing_keys if not base or names.name(key) not in base]
    packed = {key: values[key] for key in found.unexpected_keys if isinstance(values.get(key), torch.Tensor)}
    if left := put_back_packed(model, packed):
        _logger.warning("the model's load_state_dict does not put back %s, which its state_dict has", left)
    if unexpected or missing:
        raise RuntimeError(f"missing: {missing}; unexpected: {unexpected}")
