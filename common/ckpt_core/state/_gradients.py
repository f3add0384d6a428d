"""`Gradients`: what has accumulated since the last optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ckpt_core.state._model import ParameterNames, model_state
from ckpt_core.state._tensor_sums import own_checksum
from ckpt_core.state._tensors import dtype_named, empty_like
from ckpt_core.types import SavedEntries

_ALL: Final = "all"
"""Key of the gradients that ranks share or are shards of; others are under the rank that holds them."""
_RANKS: Final = "ranks"
_OPTION: Final = "gradient"

_AT_THE_EDGE: Final = "save when the optimizer has made its step, or accumulate with synchronisation"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """The gradients of a model's parameters, by parameter name.

    Shards are saved as such, and gradients that are the same on every rank once. Those that ranks accumulate
    each by itself, as under DDP's `no_sync`, are saved by every rank, and fit the same number of ranks only.

    Attributes:
        model: the model.
        optimizers: torch optimizers whose gradients are saved, all of the model if there are none; FSDP1
            knows its parameters by them.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return live gradients, and what a load must know of them. Collective.

        Raises:
            ConfigError: gradients are where no checkpoint can reach them; the same on every rank.
        """
        problem, own = self._problem(), dict[str, torch.Tensor | None]()
        if problem is None and not _fsdp1.is_fsdp1(self.model):
            own = self._of_parameters()
        plain = {
            name: None if grad is None else own_checksum(grad)
            for name, grad in own.items()
            if _is_plain(grad)
        }
        of_ranks: list[tuple[str | None, dict[str, bytes | None]]] = _gathered((problem, plain))
        if problems := [f"rank {rank}: {each}" for rank, (each, _) in enumerate(of_ranks) if each]:
            raise ConfigError(f"gradients cannot be saved here ({problems[0]}): {_AT_THE_EDGE}")
        differing = _differing([digests for _, digests in of_ranks])
        if _fsdp1.is_fsdp1(self.model):
            own = dict(self._of_flat_parameters())
        tree: dict[str, dict[str, Any]] = {}
        for name, grad in own.items():
            if grad is not None:
                tree.setdefault(_own_key() if name in differing else _ALL, {})[name] = grad.detach()
        return tree, {_RANKS: len(of_ranks) if differing else 0}

    def target(self, entries: SavedEntries, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return memory for the saved gradients of this rank.

        Raises:
            IncompatibleCheckpointError: they were accumulated on another number of ranks, each by itself.
        """
        _, size = place_in_job()
        if facts.get(_RANKS, 0) not in {0, size}:
            raise IncompatibleCheckpointError(
                f"it was saved within an accumulation window, with gradients that {facts[_RANKS]} ranks had "
                f"each by itself, and there are {size} now: resume on {facts[_RANKS]}, or without "
                "gradients=True, so that the window begins again"
            )
        is_flat = _fsdp1.is_fsdp1(self.model)
        references = model_state(self.model) if is_flat else ParameterNames.of(self.model).by_name
        tree: dict[str, dict[str, Any]] = {}
        for (kind, *rest), entry in entries.items():
            name = ".".join(map(str, rest))
            if kind in {_ALL, _own_key()} and entry is not None and name in references:
                tree.setdefault(str(kind), {})[name] = empty_like(references[name], dtype_named(entry.dtype))
        return tree

    def put_back(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace every gradient by the loaded one; None where there was none.

        A parameter that is frozen now gets none: an optimizer would move it.

        Raises:
            IncompatibleCheckpointError: a parameter refuses its gradient.
        """
        loaded = {name: grad for each in tree.values() for name, grad in each.items()}
        for parameter in self.model.parameters():
            parameter.grad = None
        try:
            if _fsdp1.is_fsdp1(self.model):
                self._put_back_flat(loaded)
                return
            names = ParameterNames.of(self.model)
            for name, grad in loaded.items():
                if names.by_name[name].requires_grad:
                    names.by_name[name].grad = grad
        except RuntimeError as error:
            raise IncompatibleCheckpointError(f"a parameter refused its gradient: {error}") from error

    def _of_parameters(self) -> dict[str, torch.Tensor | None]:
        names = ParameterNames.of(self.model).own.items()
        trained = {parameter for each in self.optimizers for parameter in _parameters(each)}
        return {
            name: parameter.grad
            for parameter, name in names
            if parameter.requires_grad and (parameter in trained or not trained)
        }

    def _of_flat_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield shards by name, converted by FSDP like optimizer state. Collective."""
        for optimizer in self.optimizers:
            state = {
                index: {_OPTION: parameter.grad}
                for index, parameter in enumerate(_parameters(optimizer))
                if parameter.grad is not None
            }
            for name, values in _fsdp1.by_name(self.model, optimizer, state)["state"].items():
                yield name, values[_OPTION]

    def _put_back_flat(self, loaded: Mapping[str, Any]) -> None:
        for optimizer in self.optimizers:
            groups = optimizer.state_dict()["param_groups"]
            members = _fsdp1.group_names(self.model, optimizer)
            named = {
                "state": {name: {_OPTION: loaded[name]} for own in members for name in own if name in loaded},
                "param_groups": [
                    {**group, "params": own} for group, own in zip(groups, members, strict=True)
                ],
            }
            shards = _fsdp1.to_index_form(self.model, optimizer, named)["state"]
            for index, parameter in enumerate(_parameters(optimizer)):
                # A rank without a part of a parameter has no gradient of it.
                if index in shards and parameter.numel() and parameter.requires_grad:
                    parameter.grad = shards[index][_OPTION].reshape(parameter.shape)

    def _problem(self) -> str | None:
        """Return why the gradients cannot be saved now, on this rank."""
        flat = _fsdp1.is_fsdp1(self.model)
        if flat and not self.optimizers:
            return "FSDP1 names the parameters of optimizers only, and there is none"
        if any(holds_unreduced_gradients(module) for module in self.model.modules()):
            return "FSDP2 accumulates them without synchronisation, in memory of its own"
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is None:
                continue
            if flat and grad.numel() != parameter.numel():
                return "FSDP1 accumulates them without synchronisation, in memory of its own"
            if grad.layout != torch.strided:
                return f"one of shape {tuple(grad.shape)} is sparse"
            if isinstance(grad, DTensor) and (
                not isinstance(parameter, DTensor) or grad.placements != parameter.placements
            ):
                return f"one of shape {tuple(grad.shape)} is not placed as its parameter: {grad.placements}"
        return None


def _is_plain(grad: torch.Tensor | None) -> bool:
    return not isinstance(grad, DTensor)


def _differing(of_ranks: Sequence[Mapping[str, bytes | None]]) -> set[str]:
    """Return the names whose values differ between ranks that have them."""
    first: dict[str, bytes | None] = {}
    for digests in of_ranks:
        first = {**digests, **first}
    return {name for digests in of_ranks for name, each in digests.items() if each != first[name]}


def _gathered(value: Any) -> list[Any]:
    _, size = place_in_job()
    if size == 1:
        return [value]
    values = [None] * size
    dist.all_gather_object(values, value)
    return values


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _own_key() -> str:
    return f"rank-{place_in_job()[0]}"
