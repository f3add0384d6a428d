"""`LightningModule.load_from_checkpoint` on checkpoints of ours."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from ckpt_core.coordination import Solo
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnsafeCheckpointError
from ckpt_core.hosting import CheckpointPath, Kind
from ckpt_core.manager import CheckpointManager
from ckpt_core.state import base_names, template, under
from ckpt_core.storage import open_storage
from ckpt_core.types import CapturedState, SavedState
from lightning_ckpt._state import LARGE, MODEL, PART, plain_items
from lightning_ckpt._stock import kind_at, path_of

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

    Raises:
        UnsafeCheckpointError: it holds pickles, and they are not allowed.
        CheckpointError: see `CheckpointManager.load`.
    """
    place = _found(path)
    weights = _Weights()
    with CheckpointManager(place.root, coordinator=Solo(), allow_pickle=allow_pickle) as manager:
        manager.load(weights, name=place.name or None)
    if weights.bases:
        _logger.warning(
            "%s holds only what was trained: call load_from_checkpoint(..., strict=False) for a module whose "
            "__init__ makes the base that it was trained on (%s). Here nobody compares that base; a fit does",
            path,
            ", ".join(weights.bases),
        )
    if not allow_pickle:
        _refuse_foreign_instantiators(os.fspath(path), weights.checkpoint)
    device = _device(map_location)
    if device is not None:
        state = weights.checkpoint["state_dict"]
        weights.checkpoint["state_dict"] = {name: _moved(value, device) for name, value in state.items()}
    return weights.checkpoint


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


@final
class _Weights:
    """A `StateSource` that takes all weights of a checkpoint."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}
        self.bases: list[str] = []

    def capture(self) -> CapturedState:
        """Refuse: there is nothing live to save."""
        raise ConfigError("this only loads")

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        """Return new memory for every tensor of the model and the hyperparameters."""
        entries = saved.sharded.get(PART, {})
        items = {item: under(entries, item) for item in (MODEL, LARGE)}
        return {PART: {item: template({}, found) for item, found in items.items() if found}}

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Take what was read."""
        tree, self.bases = loaded[PART], base_names(saved)
        self.checkpoint = plain_items(saved, tree.get(LARGE, {}))
        self.checkpoint["state_dict"] = dict(tree.get(MODEL, {}))
        return ()


def _device(map_location: Any) -> torch.device | None:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None or callable(map_location) else torch.device(map_location)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
