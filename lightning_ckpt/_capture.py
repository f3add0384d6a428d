"""Lightning's checkpoint dictionary, taken apart into the items of a checkpoint of ours."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.state import (
    NotEncodableError,
    encode,
    local_buffers,
    rng_seed,
    rng_state,
    stable_tensors,
)
from ckpt_core.types import CapturedState
from lightning_ckpt._hoist import hoist

PART = ""
MODEL = "model"
OPTIMIZER = "optimizer"
LARGE = "lightning"
"""Item of the large tensors that callbacks and hooks put into the dictionary."""

PREFIX = "lightning."
"""In front of the dictionary's own keys, so that none is taken for an item of the core."""

LOADERS = "lightning.dataloaders"
PREFETCHED = "lightning.prefetched"
_CORES = {"state_dict", "optimizer_states", "callbacks"}
RNG = "rng"
SEED = "rng_seed"

_logger = logger_of(__name__)


def capture(trainer: Any, checkpoint: Mapping[str, Any]) -> CapturedState:
    """What `checkpoint`, as Lightning collected it on this rank, is in a checkpoint of ours.

    Callbacks and the data module may differ between ranks, which Lightning forgets: theirs is kept per rank,
    and rank 0's also for all, for ranks that come later.
    """
    rest = dict(checkpoint)
    tree: dict[str, Any] = {MODEL: rest.pop("state_dict")}
    optimizers = rest.pop("optimizer_states", [])
    if optimizers:
        tree[OPTIMIZER] = _one_or_several(optimizers)
    per_rank = _take_position(trainer, rest)
    if "lr_schedulers" in rest:
        rest["lr_schedulers"] = [_without_functions(state) for state in rest["lr_schedulers"]]
    large: dict[str, torch.Tensor] = {}
    small = {f"{PREFIX}{key}": hoist(value, str(key), large) for key, value in rest.items()}
    if large:
        tree[LARGE] = large
    own = {f"{PREFIX}{key}" for key in ("callbacks", _datamodule_key(trainer))}
    per_rank |= {key: value for key, value in small.items() if key in own}
    # Last: a loader may draw from the global generator when asked for its state.
    per_rank[RNG] = rng_state()
    strategy = trainer.strategy
    return CapturedState(
        sharded={PART: tree},
        per_rank=per_rank,
        shared={**small, SEED: rng_seed(per_rank[RNG])},
        local=local_buffers(strategy.model, tree[MODEL]),
        stable=stable_tensors(strategy.model, strategy.optimizers),
        optimizers=strategy.optimizers,
    )


def _one_or_several(states: list[Any]) -> Any:
    """As the core's own training state spells it, so that either reads the other's checkpoints."""
    return states[0] if len(states) == 1 else {str(index): state for index, state in enumerate(states)}


def _take_position(trainer: Any, rest: dict[str, Any]) -> dict[str, Any]:
    """Take the position in the data out of the loops: every rank has its own."""
    fit_loop = dict(rest["loops"]["fit_loop"])
    own = dict(fit_loop.get("state_dict", {}))
    states = own.pop("combined_loader", None)
    if not states:
        return {}
    fit_loop["state_dict"] = own
    rest["loops"] = {**rest["loops"], "fit_loop": fit_loop}
    return {LOADERS: states, PREFETCHED: _prefetched(trainer)}


def _prefetched(trainer: Any) -> list[Any]:
    """Batches that Lightning drew ahead of a loader without a length; the loader is ahead by them."""
    batches = list(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
    try:
        encode(batches)
    except NotEncodableError as error:
        _logger.warning(
            "a resume will skip %d batch(es) that Lightning drew ahead of a loader without a length: %s. "
            "Use plain tensors, or give the dataset a length",
            len(batches), error,
        )  # fmt: skip
        return []
    return batches


def unstorable(checkpoint: Mapping[str, Any]) -> list[str]:
    """What to say of the callbacks and hooks whose part of Lightning's dictionary cannot be stored."""
    parts = {f"the state of callback {key}": state for key, state in checkpoint.get("callbacks", {}).items()}
    parts |= {f"{key!r} in the checkpoint": value for key, value in checkpoint.items() if key not in _CORES}
    problems = ((what, _problem_of(value)) for what, value in parts.items())
    return [
        f"{what} cannot be stored: {problem}. Leave it out of state_dict() or on_save_checkpoint(), or make "
        "plain data of it. Other objects are stored as pickles, which load with allow_pickle=True only"
        for what, problem in problems
        if problem is not None
    ]


def _problem_of(value: Any) -> str | None:
    try:
        encode(hoist(value, "", {}))
    except NotEncodableError:
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001 - pickle calls code of the user's; the caller is told
            return f"{type(error).__name__}: {error}"
    return None


def _datamodule_key(trainer: Any) -> str:
    return "" if trainer.datamodule is None else type(trainer.datamodule).__qualname__


def _without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    """The live scheduler was built with its own functions."""
    return {key: value for key, value in state.items() if not isinstance(value, FunctionType | MethodType)}
