"""Positions in the loaders of a fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch.utils.data import DataLoader

from ckpt_core.data import LoaderPosition, hidden_position, track
from ckpt_core.disclosure import logger_of
from ckpt_core.state import NotEncodableError, encode

POSITIONS: Final = "lightning.positions"
PREFETCHED: Final = "lightning.prefetched"

_logger = logger_of(__name__)


def positions(fit_loop: Any, *, in_hand: int) -> dict[str, Any]:
    """Return the positions in a fit's loaders, and batches drawn ahead of them.

    Args:
        fit_loop: of the Trainer.
        in_hand: batches that were drawn, but count as not seen, if they can be drawn again.
    """
    combined = fit_loop._combined_loader
    if combined is None:
        return {}
    training = [position_in(loader) for loader in combined.flattened]
    evaluated = fit_loop.epoch_loop.val_loop._combined_loader
    validation = [position_in(each) for each in (() if evaluated is None else evaluated.flattened)]
    ended = bool(fit_loop.epoch_loop.batch_progress.is_last_batch) and not in_hand
    ahead = [] if ended else list(getattr(fit_loop._data_fetcher, "batches", ()))
    draws_again = can_draw_again(fit_loop)
    return {
        POSITIONS: {
            "training": [
                each and each.state(ended=ended, ahead=len(ahead) + in_hand, kept=not draws_again)
                for each in training
            ],
            "validation": [each and each.state(ended=True) for each in validation],
            # A loader that is cycled has been through; the epoch ends when all have.
            "consumed": list(getattr(combined._iterator, "_consumed", ())),
        },
        PREFETCHED: [] if draws_again else _storable(ahead),
    }


def can_draw_again(fit_loop: Any) -> bool:
    """Return whether batches that were handed out may count as not seen."""
    found = [position_in(loader) for loader in fit_loop._combined_loader.flattened]
    return all(each is not None and each.replayable for each in found)


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


def _storable(batches: list[Any]) -> list[Any]:
    """Return batches that Lightning drew ahead of a loader without a length."""
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
