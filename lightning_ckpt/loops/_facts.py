"""The loaders of a fit and its configuration: positions, also in samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ckpt_core.data import LoaderPosition, hidden_position, track
from ckpt_core.disclosure import logger_of
from ckpt_core.types import DataPosition

_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")
_logger = logger_of(__name__)


def position_in(loader: Any) -> LoaderPosition | None:
    """Return the position in a loader; None if it cannot tell any."""
    if isinstance(loader, DataLoader):
        track(loader)
    return LoaderPosition(loader) if hidden_position(loader) is None else None


def tell_of_hidden(loaders: Iterable[Any], told: set[str]) -> None:
    """Warn once of each kind of loader that hides its position."""
    for loader in loaders:
        why, kind = hidden_position(loader), type(loader).__name__
        if why is not None and kind not in told:
            told.add(kind)
            _logger.warning(
                "the position in a %s cannot be saved: %s. A resume in the middle of an epoch begins its "
                "data again: use a torch DataLoader that hands out each batch as it is drawn, or give it "
                "state_dict and load_state_dict",
                kind,
                why,
            )


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
