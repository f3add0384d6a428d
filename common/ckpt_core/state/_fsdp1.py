"""Optimizer state of FSDP1 models, converted by FSDP itself.

Torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` are deliberately not used: they step an
optimizer without state, per rank, and a rank whose shards are all empty never gets any.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from ckpt_core._torch_internals import is_wrapped
from ckpt_core.errors import ConfigError

_COMPILED = "_orig_mod."


def is_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return state and groups by name, with sharded tensors; a collective."""
    # Refused on all ranks if one of them has it, or the conversion would hang.
    state = (value for values in optimizer.state.values() for value in values.values())
    first = FullyShardedDataParallel.fsdp_modules(model)[0]
    found = torch.tensor(int(any(map(is_wrapped, state))), device=first.compute_device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=_group(model))
    if found.item():
        raise ConfigError(
            f"{type(optimizer).__name__} keeps state made of other tensors (quantised, for example), which "
            "FSDP1 cannot convert to names of parameters; use FSDP2's fully_shard"
        )
    return by_name(model, optimizer, optimizer.state_dict()["state"])


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the parameter names of each group; a small collective."""
    return [group["params"] for group in by_name(model, optimizer, {})["param_groups"]]


def by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Convert values by index to sharded tensors by name, with groups; collective."""
    named = _convert(model, optimizer, state)
    return {
        "state": {str(name).replace(_COMPILED, ""): values for name, values in named["state"].items()},
        "param_groups": [
            {**group, "params": [name.replace(_COMPILED, "") for name in group["params"]]}
            for group in named["param_groups"]
        ],
    }


def to_index_form(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Convert values by name to this rank's shards, by index; a collective.

    With the hyperparameters of each group, if they are given.
    """
    groups = _convert(model, optimizer, {})["param_groups"]
    raw = {name.replace(_COMPILED, ""): name for group in groups for name in group["params"]}
    named = {
        "state": {raw[name]: dict(values) for name, values in state.items() if name in raw},
        "param_groups": [{**group, **own} for group, own in zip(groups, options or groups, strict=True)],
    }
    with _sharded(model):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, named, group=_group(model))


def _convert(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    packed = {"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]}
    with _sharded(model):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer, packed, group=_group(model))


@contextmanager
def _sharded(model: nn.Module) -> Generator[None]:
    with warnings.catch_warnings():
        # FSDP1 warns of its deprecation at every call; the user has chosen it knowingly.
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ):
            yield


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that hold the shards; None (all) for hybrid sharding."""
    first = FullyShardedDataParallel.fsdp_modules(model)[0]
    group = first.process_group
    hybrid = "HYBRID" in str(first.sharding_strategy)
    return group if isinstance(group, dist.ProcessGroup) and not hybrid else None
