"""Names of parameters as a checkpoint spells them: those of the bare model, whatever wraps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_core.errors import ConfigError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(model: nn.Module, name: str) -> str:
    """`name`, as `named_parameters` gives it, without the parts that DDP, compile and the like put in."""
    kept: list[str] = []
    owner: Any = model
    for part in name.split("."):
        # "module" is a fair name for anything but DDP's own child, so the owner decides.
        if part not in _WRAPPERS and not (part == "module" and isinstance(owner, DistributedDataParallel)):
            kept.append(part)
        owner = getattr(owner, part)
    return ".".join(kept)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNames:
    """The parameters of a model by name; a tied parameter has several, the first of which is its own."""

    by_name: dict[str, nn.Parameter]
    own: dict[nn.Parameter, str]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        """Name every parameter of `model`."""
        by_name: dict[str, nn.Parameter] = {}
        own: dict[nn.Parameter, str] = {}
        for raw, parameter in model.named_parameters(remove_duplicate=False):
            name = canonical_name(model, raw)
            by_name[name] = parameter
            own.setdefault(parameter, name)
        return cls(by_name=by_name, own=own)

    def resolve(self, name: str) -> str:
        """The own name of the parameter called `name`; `name` itself if no parameter is."""
        parameter = self.by_name.get(name)
        return name if parameter is None else self.own[parameter]

    def of_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The own names of the optimizer's parameters, group by group.

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


def parameter_names(model: nn.Module) -> frozenset[str]:
    """All names of all parameters in `model_state(model)`; its other entries are buffers and extra state."""
    return frozenset(ParameterNames.of(model).by_name)
