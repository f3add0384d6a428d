"""The position of a fit in its data: saved, told in samples, and put back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast, final

from torch.utils.data import DataLoader

from ckpt_core.data import LoaderPosition, hidden_position, track
from ckpt_core.disclosure import logger_of
from ckpt_core.state import NotEncodableError, derive_rng, encode, load_rng_state
from ckpt_core.types import DataPosition, SavedState

if TYPE_CHECKING:
    from lightning_ckpt._state import LightningState

POSITIONS: Final = "lightning.positions"
PREFETCHED: Final = "lightning.prefetched"
RNG: Final = "rng"
SEED: Final = "rng_seed"
_TRAINING, _VALIDATION = "training", "validation"
_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")

_logger = logger_of(__name__)


def positions(fit_loop: Any, *, in_hand: int) -> dict[str, Any]:
    """Return the positions in a fit's loaders, and batches drawn ahead of them."""
    combined = fit_loop._combined_loader
    if combined is None:
        return {}
    draws_again = _can_draw_again(combined)
    in_hand = in_hand if draws_again else 0
    training = [position_in(loader) for loader in combined.flattened]
    evaluated = fit_loop.epoch_loop.val_loop._combined_loader
    validation = [position_in(each) for each in (() if evaluated is None else evaluated.flattened)]
    ended = bool(fit_loop.epoch_loop.batch_progress.is_last_batch) and not in_hand
    ahead = [] if ended else list(getattr(fit_loop._data_fetcher, "batches", ()))
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


def _can_draw_again(combined: Any) -> bool:
    found = [position_in(loader) for loader in combined.flattened]
    return all(each is not None and each.replayable for each in found)


def follow(loaders: Iterable[Any]) -> None:
    """Track torch loaders from now on, before they are iterated."""
    for loader in loaders:
        if isinstance(loader, DataLoader):
            track(loader)


def position_in(loader: Any) -> LoaderPosition | None:
    follow([loader])
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


def positions_in_samples(fit_loop: Any, saved: Mapping[str, Any] | None) -> dict[str, DataPosition]:
    """Return how far a fit is in its training data, by loader."""
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


@final
class DataResume:
    """Puts back the position in the data of one fit, right before its first batch.

    A loader goes on from its position when its next iterator is made, which draws nothing from the global
    generators if the epoch has begun; and everything as usual if a new one begins.

    Args:
        loaded: the checkpoint that was read.
    """

    def __init__(self, trainer: Any, loaded: LightningState) -> None:
        self._trainer = trainer
        self._loaded = loaded
        self._saved = cast("SavedState", loaded.saved)
        self._validation = loaded.positions.get(_VALIDATION, ())

    def prepare_validation(self, loaders: Iterable[Any]) -> None:
        """Put back the positions in the first loaders that validate."""
        states, self._validation = self._validation, ()
        for loader, state in zip(loaders, states, strict=False):
            self._put_back(loader, state)

    def finish(self) -> None:
        """Put back the positions in the training loaders, and make the iterators of this epoch."""
        loaded, fit_loop = self._loaded, self._trainer.fit_loop
        fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
        states = loaded.positions.get(_TRAINING, ())
        found = [
            self._put_back(loader, state, trains=not loaded.ended_epoch)
            for loader, state in zip(combined.flattened, states, strict=False)
        ]
        if loaded.ended_epoch or not states:
            for loader in combined.flattened:
                _set_sampler_epoch(self._trainer, loader)
        if not loaded.ended_epoch:
            iter(fetcher)
            if loaded.prefetched:
                fetcher.batches[:0] = loaded.prefetched
            if consumed := loaded.positions.get("consumed"):
                combined._iterator._consumed = list(consumed)
        # Lightning's own restart makes no iterators for the epoch after one whose end had begun.
        epochs = fit_loop.epoch_progress.current
        begins = loaded.ended_epoch and epochs.processed == epochs.started
        self._count_batches({number: each for number, each in enumerate(found) if each is not None})
        self._load_rng()
        if begins and (loaded.training is None or loaded.training["following"] is None):
            iter(fetcher)

    def _put_back(self, loader: Any, state: Any, *, trains: bool = False) -> tuple[int, int] | None:
        """Put back a position; return its batches, done and to come, if ranks have changed."""
        position = position_in(loader)
        if position is None or state is None:
            if trains:
                _logger.warning(
                    "a %s cannot tell its position, so its epoch begins again: use a torch DataLoader, or "
                    "give it state_dict and load_state_dict",
                    type(loader).__name__,
                )
            return None
        same_ranks = self._saved.world_size in {None, self._trainer.world_size}
        for note in position.restore(state, same_ranks=same_ranks):
            if self._trainer.is_global_zero:
                _logger.warning("%s", note)
        return position.dealt

    def _count_batches(self, dealt: Mapping[int, tuple[int, int]]) -> None:
        """Count batches as if the present ranks had made those before."""
        fit_loop = self._trainer.fit_loop
        progress, batches = fit_loop.epoch_loop.batch_progress.current, fit_loop.max_batches
        if batches == math.inf or not (self._loaded.ended_epoch or dealt):
            return
        done = batches
        if not self._loaded.ended_epoch:
            # The epoch ends with the last batch dealt.
            combined = fit_loop._combined_loader
            lengths = {number: len(combined.flattened[number]) for number in dealt}
            decides = min if combined._mode == "min_size" else max
            number = decides(lengths, key=lengths.__getitem__)
            before, rest = dealt[number]
            done = int(min(batches, max(0, batches - rest if batches == lengths[number] else before)))
        unfinished = progress.ready - progress.completed
        progress.ready = progress.started = progress.processed = done
        progress.completed = done - unfinished

    def _load_rng(self) -> None:
        state, seed = self._saved.per_rank.get(RNG), self._saved.shared.get(SEED)
        if state is not None:
            for note in load_rng_state(state):
                _logger.warning("%s", note)
        elif seed is not None:  # of other ranks
            derive_rng(seed, self._trainer.global_rank)


def _set_sampler_epoch(trainer: Any, loader: Any) -> None:
    """Set the epoch of samplers before they shuffle; Lightning does it afterwards."""
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_progress.current
    ended = fit_loop.epoch_loop.batch_progress.is_last_batch and progress.processed < progress.started
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(progress.processed + int(ended))  # type: ignore[union-attr]
