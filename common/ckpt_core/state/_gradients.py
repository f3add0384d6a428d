"""`Gradients`: what has accumulated since the last optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import holds_unreduced_gradients
from ckpt_core.coordination import place_in_job
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import _fsdp1
from ckpt_core.state._model import Names, model_state
from ckpt_core.state._nested import dtype_named, empty_like
from ckpt_core.state._tensor_sums import own_checksum
from ckpt_core.types import SavedEntries

_ALL: Final = "all"
"""Key of the gradients that ranks share or are shards of; others are under the rank that holds them."""
_RANKS: Final = "ranks"
_OPTION: Final = "gradient"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """The gradients of a model's parameters, by parameter name.

    Shards are saved as such, and gradients that are the same on every rank once. Those that ranks accumulate
    each by itself, as under DDP's `no_sync`, are saved by every rank, and fit the same number of ranks only.
    Those of the torch `optimizers` are saved, without any all; FSDP1 knows its parameters by them.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return live gradients, and what a load must know of them. Collective.

        Raises:
            ConfigError: gradients are where no checkpoint can reach them; the same on every rank.
        """
        rank, size = place_in_job()
        own, is_flat = dict[str, torch.Tensor | None](), _fsdp1.is_fsdp1(self.model)
        problem = self._problem()
        if problem is None and not is_flat:
            trained = {parameter for each in self.optimizers for parameter in _parameters(each)}
            own = {
                name: parameter.grad
                for parameter, name in Names(self.model).own.items()
                if parameter.requires_grad and (parameter in trained or not trained)
            }
        plain = {
            name: None if grad is None else own_checksum(grad)
            for name, grad in own.items()
            if not isinstance(grad, DTensor)
        }
        of_ranks: list[Any] = [(problem, plain)] * size
        if size > 1:
            dist.all_gather_object(of_ranks, (problem, plain))
        if problems := [f"rank {number}: {each}" for number, (each, _) in enumerate(of_ranks) if each]:
            raise ConfigError(
                f"gradients cannot be saved here ({problems[0]}): save when the optimizer has made its step, "
                "or accumulate with synchronisation"
            )
        first = {name: each for _, sums in reversed(of_ranks) for name, each in sums.items()}
        differing = {name for _, sums in of_ranks for name, each in sums.items() if each != first[name]}
        for optimizer in self.optimizers if is_flat else ():
            found = {number: {_OPTION: each.grad} for number, each in enumerate(_parameters(optimizer))}
            held = {number: each for number, each in found.items() if each[_OPTION] is not None}
            named = _fsdp1.by_name(self.model, optimizer, held)["state"]
            own |= {name: values[_OPTION] for name, values in named.items()}
        tree: dict[str, dict[str, Any]] = {}
        for name, grad in own.items():
            if grad is not None:
                tree.setdefault(f"rank-{rank}" if name in differing else _ALL, {})[name] = grad.detach()
        return tree, {_RANKS: size if differing else 0}

    def target(self, entries: SavedEntries, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return memory for the saved gradients of this rank.

        Raises:
            IncompatibleCheckpointError: they were accumulated on another number of ranks, each by itself.
        """
        rank, size = place_in_job()
        if facts.get(_RANKS, 0) not in {0, size}:
            raise IncompatibleCheckpointError(
                f"it was saved within an accumulation window, with gradients that {facts[_RANKS]} ranks had "
                f"each by itself, and there are {size} now: resume on {facts[_RANKS]}, or without "
                "gradients=True, so that the window begins again"
            )
        is_flat = _fsdp1.is_fsdp1(self.model)
        references = model_state(self.model) if is_flat else Names(self.model).by_name
        tree: dict[str, dict[str, Any]] = {}
        for (kind, *rest), entry in entries.items():
            name = ".".join(map(str, rest))
            if kind in {_ALL, f"rank-{rank}"} and entry is not None and name in references:
                tree.setdefault(str(kind), {})[name] = empty_like(references[name], dtype_named(entry.dtype))
        return tree

    def put_back(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace every gradient by the loaded one; None where there was none.

        A parameter that is frozen now gets none: an optimizer would move it.
        """
        loaded = {name: grad for each in tree.values() for name, grad in each.items()}
        for parameter in self.model.parameters():
            parameter.grad = None
        found: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            if not _fsdp1.is_fsdp1(self.model):
                names = Names(self.model).by_name
                found = [(names[name], grad) for name, grad in loaded.items()]
            else:
                named = {name: {_OPTION: grad} for name, grad in loaded.items()}
                for optimizer in self.optimizers:
                    shards = _fsdp1.to_index_form(self.model, optimizer, named)["state"]
                    # A rank without a part of a parameter has no gradient of it.
                    found += [
                        (each, shards[number][_OPTION].reshape(each.shape))
                        for number, each in enumerate(_parameters(optimizer))
                        if number in shards and each.numel()
                    ]
            for parameter, grad in found:
                if parameter.requires_grad:
                    parameter.grad = grad
        except RuntimeError as error:
            raise IncompatibleCheckpointError(f"a parameter refused its gradient: {error}") from error

    def _problem(self) -> str | None:
        """Return why the gradients cannot be saved now, on this rank."""
        is_flat = _fsdp1.is_fsdp1(self.model)
        if is_flat and not self.optimizers:
            return "FSDP1 names the parameters of optimizers only, and there is none"
        if any(holds_unreduced_gradients(module) for module in self.model.modules()):
            return "FSDP2 accumulates them without synchronisation, in memory of its own"
        for parameter in self.model.parameters():
            if (grad := parameter.grad) is None:
                continue
            if is_flat and grad.numel() != parameter.numel():
                return "FSDP1 accumulates them without synchronisation, in memory of its own"
            if grad.layout != torch.strided:
                return f"one of shape {tuple(grad.shape)} is sparse"
            if isinstance(grad, DTensor) and (
                not isinstance(parameter, DTensor) or grad.placements != parameter.placements
            ):
                return f"one of shape {tuple(grad.shape)} is not placed as its parameter: {grad.placements}"
        return None


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
