"""What Lightning leaves out when it resumes in the middle of an epoch."""

from __future__ import annotations

import logging
from typing import Any

from ckpt_core.state import derive_rng, load_rng_state
from lightning_ckpt._state import Loaded

_logger = logging.getLogger(__name__)


def set_sampler_epoch(trainer: Any, loader: Any) -> None:
    """Tell a loader's samplers the epoch before its iterator is made; Lightning does so only afterwards."""
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_progress.current
    ended = fit_loop.epoch_loop.batch_progress.is_last_batch and progress.processed < progress.started
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(progress.processed + int(ended))  # type: ignore[union-attr]


def go_on(trainer: Any, loaded: Loaded) -> None:
    """Put data position and random numbers where they were, right before the first batch is drawn."""
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    if loaded.ended_epoch:
        # An uninterrupted run makes the next epoch's iterator here, and draws the loader's seed for it.
        _load_rng(trainer, loaded)
        if fetcher is not None:
            iter(fetcher)
        return
    if fit_loop._combined_loader_states_to_load and fetcher is not None:
        # `estimated_stepping_batches` has made the iterator before there was anything to resume.
        for loader in fit_loop._combined_loader.flattened:
            set_sampler_epoch(trainer, loader)
        fit_loop._load_combined_loader_states()
        iter(fetcher)
    if loaded.prefetched and fetcher is not None:
        fetcher.batches[:0] = loaded.prefetched
    _load_rng(trainer, loaded)


def _load_rng(trainer: Any, loaded: Loaded) -> None:
    notes: list[str] = []
    if loaded.rng is not None:
        notes += load_rng_state(loaded.rng)
    elif loaded.seed is not None:
        derive_rng(loaded.seed, trainer.global_rank)
    for note in notes:
        _logger.warning("%s", note)


def warn_of_hidden_order(trainer: Any) -> None:
    """Warn where the order of samples is not saved because Lightning has hidden it in its own sampler."""
    loader = trainer.fit_loop._combined_loader
    for each in () if loader is None else loader.flattened:
        stateful = callable(getattr(each, "state_dict", None))
        if stateful and type(getattr(each, "sampler", None)).__name__ == "DistributedSamplerWrapper":
            _logger.warning(
                "%s(shuffle=True) got a sampler from Lightning whose order is not saved, so that a resume in "
                "the middle of an epoch sees other samples: give it torchdata's StatefulDistributedSampler",
                type(each).__name__,
            )
