"""What the manifest says of a fit: samples seen, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.types import DataPosition
from lightning_ckpt.loops._positions import position_in

_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")


def positions_in_samples(fit_loop: Any, saved: Mapping[str, Any] | None) -> dict[str, DataPosition]:
    """Return how far a fit is in its training data, by loader.

    Args:
        fit_loop: of the Trainer.
        saved: the positions of its loaders, as they are saved; None before it has loaders.
    """
    if saved is None:
        return {}
    states, epoch = saved["training"], max(0, fit_loop.epoch_progress.current.started - 1)
    found = {
        "training" if len(states) == 1 else f"training.{number}": position.in_samples(state, epoch=epoch)
        for number, (loader, state) in enumerate(
            zip(fit_loop._combined_loader.flattened, states, strict=True)
        )
        if state is not None and (position := position_in(loader)) is not None
    }
    return {name: position for name, position in found.items() if position is not None}


def configuration_of(trainer: Any) -> dict[str, Any]:
    """Return what a fit was configured with: hyperparameters, and what decides steps."""
    return {
        "module": dict(getattr(trainer.lightning_module, "hparams", {})),
        "data": dict(getattr(trainer.datamodule, "hparams", {})),
        **{name: getattr(trainer, name, None) for name in _OF_TRAINER},
    }
