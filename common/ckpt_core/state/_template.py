"""Load targets for optimizer state, also for an optimizer without state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import _fsdp1, _groups
from ckpt_core.state._groups import probe
from ckpt_core.state._model import model_state
from ckpt_core.state._nested import Path, leaves, put
from ckpt_core.state._optimizer import unwrap_optimizer
from ckpt_core.state._parameter_names import ParameterNames
from ckpt_core.state._tensors import dtype_named, empty_like, matches, shape_of
from ckpt_core.types import SavedEntries, SavedTensor

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
