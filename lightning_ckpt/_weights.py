"""`LightningModule.load_from_checkpoint` on checkpoints of ours."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_core.coordination import Solo
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError
from ckpt_core.hosting import CheckpointPath, Kind
from ckpt_core.manager import CheckpointManager
from ckpt_core.state import base_names
from ckpt_core.storage import open_storage
from lightning_ckpt._ckpt_path import kind_at, path_of
from lightning_ckpt._state import LARGE, MODEL, NewMemory, plain_items

_logger = logger_of(__name__)

_WRAPPED = "_ckpt_wrapped"
_INSTANTIATOR = "_instantiator"
_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def read_our_directories(saving: Any) -> None:
    """Let `load_from_checkpoint` of one package read our checkpoints; idempotent."""
    stock = saving.pl_load
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def load(path_or_url: Any, **options: Any) -> Any:
        if path_or_url == "":
            raise CheckpointNotFoundError(
                'the path of the checkpoint is "", as best_model_path is while none is committed, or has the '
                "metric of KeepBest"
            )
        if not _is_ours(path_or_url):
            return stock(path_or_url, **options)
        allow_pickle = options.get("weights_only") is False
        return read(path_or_url, map_location=options.get("map_location"), allow_pickle=allow_pickle)

    setattr(load, _WRAPPED, True)
    saving.pl_load = load


def _found(path: str | os.PathLike[str]) -> CheckpointPath:
    """Return the checkpoint or the root at a path."""
    return path_of(path, kind_at(os.fspath(path), open_storage))


def _is_ours(path: Any) -> bool:
    if not isinstance(path, str | os.PathLike) or os.fspath(path).startswith("http"):
        return False
    try:
        return kind_at(os.fspath(path), open_storage) is not Kind.STOCK
    except (CheckpointError, OSError):
        return False  # Lightning will raise it


def read(path: str | os.PathLike[str], *, map_location: Any, allow_pickle: bool) -> dict[str, Any]:
    """Read what Lightning's own file would hold, without optimizers.

    A root stands for its newest checkpoint.

    Not collective: every process that asks reads the whole of the weights.
    """
    place = _found(path)
    weights = NewMemory(MODEL, LARGE)
    with CheckpointManager(place.root, coordinator=Solo(), allow_pickle=allow_pickle) as manager:
        manager.load(weights, name=place.name or None)
    if bases := base_names(weights.saved):
        _logger.warning(
            "%s holds only what was trained: call load_from_checkpoint(..., strict=False) for a module whose "
            "__init__ makes the base that it was trained on (%s). Here nobody compares that base; a fit does",
            path,
            ", ".join(bases),
        )
    checkpoint = plain_items(weights.saved, weights.tree.get(LARGE, {}))
    if not allow_pickle:
        _refuse_foreign_instantiators(os.fspath(path), checkpoint)
    state, device = weights.tree.get(MODEL, {}), _device(map_location)
    checkpoint["state_dict"] = {name: _moved(value, device) for name, value in state.items()}
    return checkpoint


def _refuse_foreign_instantiators(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuse hyperparameters that name a foreign function to import and call.

    Lightning itself began to refuse them with 2.6.
    """
    for key, value in checkpoint.items():
        named = value.get(_INSTANTIATOR) if isinstance(value, Mapping) else None
        if named is not None and named not in _INSTANTIATORS:
            raise UnsafeCheckpointError(
                f"{path}: {key!r} names {named!r:.200} to be imported and called, which is none of "
                "Lightning's own instantiators; it may be an attack and was not executed. If you trust "
                "who wrote this checkpoint, load it with weights_only=False"
            )


def _device(map_location: Any) -> torch.device | None:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None or callable(map_location) else torch.device(map_location)


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, torch.Tensor) else value
