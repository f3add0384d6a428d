"""Parameter names in a checkpoint: those of the bare model, without wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ckpt_core.errors import ConfigError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Prefixes:
    """Canonical prefixes of a model's modules, by the prefixes with wrappers."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._canonical: dict[str, str] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            self.modules[raw] = module
            self._canonical[raw] = self._extended(raw) if raw else ""
            if isinstance(module, FSDPModule):
                # After a forward pass without a backward, as in an evaluation, FSDP2 leaves whole parameters
                # in the root, which are not the optimizer's.
                module.reshard()

    def _extended(self, raw: str) -> str:
        parent, _, part = raw.rpartition(".")
        # "module" may be the name of any child; only DDP's own child is a wrapper.
        wraps = part in _WRAPPERS or (
            part == "module" and isinstance(self.modules[parent], DistributedDataParallel)
        )
        return self._canonical[parent] + ("" if wraps else f"{part}.")

    def name(self, raw: str) -> str:
        """Return the canonical name of a key of `state_dict`.

        Its hooks may have removed wrappers already.
        """
        prefix, _, leaf = raw.rpartition(".")
        while prefix not in self._canonical:
            prefix, _, part = prefix.rpartition(".")
            leaf = leaf if part in _WRAPPERS else f"{part}.{leaf}"
        return self._canonical[prefix] + leaf

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter under each of its names."""
        for raw, module in self.modules.items():
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                yield self._canonical[raw] + leaf, parameter


def bare(model: nn.Module) -> nn.Module:
    """Return the model without wrappers around the whole of it."""
    while True:
        children = dict(model.named_children())
        inner = next((children[name] for name in _WRAPPERS if name in children), None)
        if inner is None and isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNames:
    """The parameters of a model by name; the first name of a tied one is its own."""

    by_name: dict[str, nn.Parameter]
    own: dict[nn.Parameter, str]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        """Name every parameter of `model`."""
        by_name: dict[str, nn.Parameter] = {}
        own: dict[nn.Parameter, str] = {}
        for name, parameter in Prefixes(model).parameters():
            by_name[name] = parameter
            own.setdefault(parameter, name)
        return cls(by_name=by_name, own=own)

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
