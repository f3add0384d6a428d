"""Resume of the position in the data: loaders, counters, random numbers."""

from __future__ import annotations

import math
from typing import Any, final

from ckpt_core.disclosure import logger_of
from ckpt_core.state import derive_rng, load_rng_state
from lightning_ckpt._state import LoadedCheckpoint
from lightning_ckpt.loops import position_in

_logger = logger_of(__name__)
_TRAINING, _VALIDATION = "training", "validation"


@final
class DataResume:
    """Puts back the position in the data of one fit.

    A loader goes on from its position when its next iterator is made, which draws nothing from the global
    generators if the epoch has begun; and everything as usual if a new one begins.
    """

    def __init__(self, trainer: Any, loaded: LoadedCheckpoint) -> None:
        self._trainer = trainer
        self._loaded = loaded
        self._prepared: dict[str, int] = {_TRAINING: 0, _VALIDATION: 0}
        self._dealt: dict[int, tuple[int, int]] = {}
        self._finished = False

    @property
    def has_prepared(self) -> bool:
        """Whether the training loaders were made after the checkpoint was read.

        `estimated_stepping_batches` in `configure_optimizers` makes them before there is anything to resume.
        """
        return self._prepared[_TRAINING] > 0

    def prepare(self, loader: Any) -> None:
        """Put back the position in a loader whose iterator is about to be made."""
        kind = _TRAINING if self._trainer.training else _VALIDATION
        if kind == _TRAINING and self._finished:
            return  # loaders that Lightning makes again for a later epoch
        number = self._prepared[kind]
        self._prepared[kind] = number + 1
        states = self._loaded.positions.get(kind, ())
        if number < len(states):
            self._put_back(loader, states[number], None if kind == _VALIDATION else number)
        elif kind == _TRAINING and not states:
            _set_sampler_epoch(self._trainer, loader)
        if kind == _TRAINING and self._loaded.ended_epoch:
            self._load_rng()

    def _put_back(self, loader: Any, state: Any, number: int | None) -> None:
        position = position_in(loader)
        if position is None or state is None:
            if number is not None and not self._loaded.ended_epoch:
                _logger.warning(
                    "a %s cannot tell its position, so its epoch begins again: use a torch DataLoader, or "
                    "give it state_dict and load_state_dict",
                    type(loader).__name__,
                )
            return
        same_ranks = self._loaded.saved.world_size in {None, self._trainer.world_size}
        for note in position.restore(state, same_ranks=same_ranks):
            if self._trainer.is_global_zero:
                _logger.warning("%s", note)
        if number is not None and (dealt := position.dealt) is not None:
            self._dealt[number] = dealt
        if number is not None and self._loaded.ended_epoch:
            _set_sampler_epoch(self._trainer, loader)

    def finish(self, *, iterators_are_new: bool) -> None:
        """Go on right before the first batch.

        Args:
            iterators_are_new: whether they were made, or will be, after `prepare`.
        """
        fit_loop = self._trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        if fetcher is not None and not iterators_are_new:
            for loader in fit_loop._combined_loader.flattened:
                self.prepare(loader)
            fit_loop._load_combined_loader_states()
            iter(fetcher)
        if self._loaded.prefetched and fetcher is not None:
            fetcher.batches[:0] = self._loaded.prefetched
        self._finished = True
        self._note_consumed()
        self._count_batches()
        if self._loaded.ended_epoch and fit_loop.epoch_loop.restarted_on_train_batch_end:
            _begin_epoch(self._trainer)
        else:
            self._load_rng()

    def _note_consumed(self) -> None:
        combined = self._trainer.fit_loop._combined_loader
        consumed = self._loaded.positions.get("consumed")
        if combined is not None and consumed and not self._loaded.ended_epoch:
            combined._iterator._consumed = list(consumed)

    def _count_batches(self) -> None:
        """Count batches as if the present ranks had made those before."""
        fit_loop = self._trainer.fit_loop
        progress, batches = fit_loop.epoch_loop.batch_progress.current, fit_loop.max_batches
        if batches == math.inf:
            return
        if self._loaded.ended_epoch:
            done = batches
        elif self._dealt:
            done = self._done_of(batches)
        else:
            return
        unfinished = progress.ready - progress.completed
        progress.ready = progress.started = progress.processed = done
        progress.completed = done - unfinished

    def _done_of(self, batches: int) -> int:
        """Return after how many batches the epoch ends with the last one dealt."""
        combined = self._trainer.fit_loop._combined_loader
        lengths = {number: len(combined.flattened[number]) for number in self._dealt}
        decides = min if combined._mode == "min_size" else max
        number = decides(lengths, key=lengths.__getitem__)
        done, rest = self._dealt[number]
        left = batches - rest if batches == lengths[number] else done
        return int(min(batches, max(0, left)))

    def _load_rng(self) -> None:
        notes: list[str] = []
        if self._loaded.rng is not None:
            notes += load_rng_state(self._loaded.rng)
        elif self._loaded.seed is not None:
            derive_rng(self._loaded.seed, self._trainer.global_rank)
        for note in notes:
            _logger.warning("%s", note)


def _set_sampler_epoch(trainer: Any, loader: Any) -> None:
    """Set the epoch of samplers before they shuffle; Lightning does it afterwards."""
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_progress.current
    ended = fit_loop.epoch_loop.batch_progress.is_last_batch and progress.processed < progress.started
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(progress.processed + int(ended))  # type: ignore[union-attr]


def _begin_epoch(trainer: Any) -> None:
    """Begin the epoch after the saved one, where its length is unknown.

    Lightning would take the next epoch for the old one, which is over, and skip it.
    """
    if trainer.num_training_batches != math.inf:
        return
    epoch_loop = trainer.fit_loop.epoch_loop
    optimizer_progress = epoch_loop.automatic_optimization.optim_progress
    for progress in (epoch_loop.batch_progress, epoch_loop.scheduler_progress, optimizer_progress):
        progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
    # Lightning is about to count the last batch as completed; it belongs to the epoch before.
    epoch_loop.batch_progress.current.completed = -1
