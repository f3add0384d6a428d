"""The parts of a resume inside an epoch that Lightning leaves out."""

from __future__ import annotations

import math
from typing import Any

from ckpt_core.disclosure import logger_of
from ckpt_core.state import derive_rng, load_rng_state
from lightning_ckpt._state import LoadedCheckpoint

_logger = logger_of(__name__)


def before_iterators(trainer: Any, loader: Any, loaded: LoadedCheckpoint) -> None:
    """Prepare a loader whose iterator is about to be made.

    Its samplers learn the epoch, which Lightning sets only afterwards. If an epoch is about to begin, the
    generators get the state that an uninterrupted run has at this point: the iterator will draw its seed.
    """
    _set_sampler_epoch(trainer, loader)
    if loaded.ended_epoch:
        _load_rng(trainer, loaded)


def go_on(trainer: Any, loaded: LoadedCheckpoint, *, iterators_are_new: bool) -> None:
    """Load data position and random numbers, right before the first batch.

    Args:
        trainer: the Trainer.
        loaded: what it resumes from.
        iterators_are_new: whether they were made after `loaded`. `estimated_stepping_batches` in
            `configure_optimizers` makes them before there is anything to resume.
    """
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    if fetcher is not None and not iterators_are_new:
        for loader in fit_loop._combined_loader.flattened:
            before_iterators(trainer, loader, loaded)
        fit_loop._load_combined_loader_states()
        iter(fetcher)
    if loaded.prefetched and fetcher is not None:
        fetcher.batches[:0] = loaded.prefetched
    if loaded.ended_epoch and fit_loop.epoch_loop.restarted_on_train_batch_end:
        _begin_epoch(trainer)
    else:
        _load_rng(trainer, loaded)


def _set_sampler_epoch(trainer: Any, loader: Any) -> None:
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


def _load_rng(trainer: Any, loaded: LoadedCheckpoint) -> None:
    notes: list[str] = []
    if loaded.rng is not None:
        notes += load_rng_state(loaded.rng)
    elif loaded.seed is not None:
        derive_rng(loaded.seed, trainer.global_rank)
    for note in notes:
        _logger.warning("%s", note)


def warn_of_hidden_order(trainer: Any) -> None:
    """Warn of samples whose order is not saved: Lightning hides it in its sampler."""
    loader = trainer.fit_loop._combined_loader
    for each in () if loader is None else loader.flattened:
        stateful = callable(getattr(each, "state_dict", None))
        if stateful and type(getattr(each, "sampler", None)).__name__ == "DistributedSamplerWrapper":
            _logger.warning(
                "%s(shuffle=True) got a sampler from Lightning whose order is not saved, so that a resume in "
                "the middle of an epoch sees other samples: give it torchdata's StatefulDistributedSampler",
                type(each).__name__,
            )
