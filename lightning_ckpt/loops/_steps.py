"""Where in Lightning's loops a save is made, and from where a resume continues.

Lightning saves inside hooks, in the middle of what it does for a batch or an epoch, and its restart leaves
out the rest: a due validation, plateau schedulers, the hooks of an epoch's end and of the next one's start.
Here methods of the two training loops call a listener at the points between which nothing is half done; what
follows the save is saved with it; and a resume continues with that.

Lightning has no hook at these points.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final, Protocol, final

import torch

from lightning_ckpt.loops._positions import can_draw_again

_MID_EPOCH: Final = "restarted_mid_epoch"
_START_OF_BATCH: Final = "on_train_batch_start"
_END_OF_BATCH: Final = "on_train_batch_end"
_END_OF_VALIDATION: Final = "on_validation_end"
_END_OF_EPOCH: Final = "on_train_epoch_end"
_EXCEPTION: Final = "on_exception"
BETWEEN: Final = {None, "on_train_end"}


class Following(StrEnum):
    """What Lightning does next."""

    VALIDATION = "validation"
    """The validation of the batch, if it is due; then as `UPDATE`."""

    UPDATE = "update"
    """The update of plateau schedulers and counters for the batch; then as `BATCH`."""

    BATCH = "batch"
    """The next batch; after the last one, the hooks of the epoch's end."""

    EPOCH_UPDATE = "epoch update"
    """The update of plateau schedulers and counters for the epoch; then as `EPOCH`."""

    EPOCH = "epoch"
    """The hooks of the next epoch's start."""


class Listener(Protocol):
    """What the loops call between their steps; StopIteration ends training."""

    def after_batch(self) -> None:
        """Act before a validation may be made for the batch."""

    def after_step(self) -> None:
        """Act when nothing is left to do for the batch."""

    def before_epoch_end(self) -> None:
        """Act before the hooks of the epoch's end."""

    def after_epoch(self) -> None:
        """Act when nothing is left to do for the epoch."""


@final
class TrainingLoops:
    """The two training loops of a Trainer, for the time of one fit.

    Concurrency: the thread that trains.

    Attributes:
        trainer: the Trainer.
        listener: what is called; None if nobody listens.
        resumed: what a resumed fit begins with; None once it is done.
        first_batch: whether the last batch was the first; Lightning forgets it in a validation.
        before_validation: is called right before one.
        holds_iterators: whether the iterators of the loaders are made by the next epoch only.
    """

    def __init__(self, trainer: Any) -> None:
        self.listener: Listener | None = None
        self.resumed: Following | None = None
        self.holds_iterators = False
        self.trainer = trainer
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self.first_batch: bool | None = None
        self.before_validation: Callable[[], None] = lambda: None
        self._between: Following | None = None
        self._before_stop: tuple[int | None, int | None, bool] | None = None
        self._stock = type(trainer.fit_loop)
        self._epoch_loop.on_advance_end = self._advance_epoch
        self._fit_loop.on_advance_end = self._advance_fit
        self._fit_loop.on_save_checkpoint = (
            dict  # loaders are asked by us, and may draw random numbers for it
        )

    @property
    def hook(self) -> str | None:
        """The hook that is running; None between hooks."""
        name: str | None = self.trainer.lightning_module._current_fx_name
        return name

    @property
    def holds_batch(self) -> bool:
        """Whether a batch is drawn, and its optimizer step perhaps not made."""
        progress, fetcher = self._epoch_loop.batch_progress.current, self._fit_loop._data_fetcher
        drawn = fetcher is None or fetcher.fetched > progress.completed  # None after a fit that failed
        return bool(progress.processed < progress.ready and drawn)

    @property
    def at_batch_start(self) -> bool:
        """Whether the batch in hand has done nothing yet."""
        return self.holds_batch and self.hook == _START_OF_BATCH

    @property
    def in_hand(self) -> int:
        """How many batches count as not trained on: those of a step that is being made.

        They are the batch in hand and, unless gradients are those of before it, the rest of its window.
        """
        if not self.holds_batch or not can_draw_again(self._fit_loop):
            return 0
        return 1 if self.at_batch_start else 1 + self.in_window

    @property
    def in_window(self) -> int:
        """How many batches of Lightning's window are done, and wait for its step."""
        progress, holds = self._epoch_loop.batch_progress.current, self.holds_batch
        if not self.trainer.lightning_module.automatic_optimization or (self.epoch_is_over and not holds):
            return 0
        done = progress.completed if holds else progress.ready
        return int(done % self.trainer.accumulate_grad_batches)

    @property
    def following(self) -> Following | None:
        """What follows a save made now; None where it is not known."""
        hook, batches, epochs = self.hook, self._epoch_loop.batch_progress, self._fit_loop.epoch_progress
        failed = hook == _EXCEPTION
        if self.holds_batch:
            return Following.BATCH
        if hook == _END_OF_BATCH or (failed and batches.current.completed < batches.current.processed):
            return Following.VALIDATION
        if hook == _END_OF_VALIDATION:
            return Following.UPDATE if self._between is Following.VALIDATION else None
        if hook == _END_OF_EPOCH or (failed and epochs.current.completed < epochs.current.processed):
            return Following.EPOCH_UPDATE if self.epoch_is_over else None
        if epochs.current.started < epochs.current.ready:
            return Following.EPOCH
        return self._between if hook in BETWEEN or failed or self.trainer.validating else None

    @property
    def stops(self) -> bool:
        """Whether Lightning, a callback or the module has decided to end the training."""
        return bool(self.trainer.should_stop if self._before_stop is None else self._before_stop[2])

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last batch of the epoch is done."""
        return bool(self._epoch_loop._num_ready_batches_reached())

    def ends_at(self, step: int) -> bool:
        """Return whether Lightning makes no step after `step`, the present one."""
        loop = self._fit_loop
        if step == self._epoch_loop.max_steps or (self.trainer.should_stop and loop._can_stop_early):
            return True
        return bool(self.epoch_is_over and loop.epoch_progress.current.processed == loop.max_epochs)

    def stop(self) -> None:
        """End training after this step, whatever the least number of steps is."""
        fit_loop, loop = self._fit_loop, self._epoch_loop
        if self._before_stop is None:
            self._before_stop = fit_loop.min_epochs, loop.min_steps, self.trainer.should_stop
        self.trainer.should_stop = True
        fit_loop.min_epochs = loop.min_steps = 0

    def resume(self, following: Following, *, ended_epoch: bool, left: bool) -> None:
        """Continue with `following` once Lightning has restored its counters.

        If the epoch's last batch is done, no iterator is made before the next epoch begins, as in an
        uninterrupted run.

        Args:
            following: what was still to come.
            ended_epoch: whether the epoch's last batch is done.
            left: whether training was left at this point, before what follows, by a preemption.
        """
        self.resumed = following
        self.holds_iterators = ended_epoch
        if following in {Following.VALIDATION, Following.UPDATE} or (left and following is Following.BATCH):
            # The step may be the last one, after which Lightning would not begin.
            names = {"__module__": self._stock.__module__, "done": False}
            self._fit_loop.__class__ = type(self._stock.__name__, (self._stock,), names)
        self._fit_loop.reset = self._reset_fit
        if ended_epoch:
            self._fit_loop._load_combined_loader_states = self._hold_iterators

    def release(self) -> None:
        """Give the loops back; idempotent."""
        self._fit_loop.__class__ = self._stock
        if self._before_stop is not None:
            self._fit_loop.min_epochs, self._epoch_loop.min_steps, _ = self._before_stop
        own = ("on_advance_end", "reset", "_load_combined_loader_states", "on_save_checkpoint")
        for loop, names in (
            (self._fit_loop, own),
            (self._epoch_loop, ("on_advance_end", "reset", "on_run_start")),
        ):
            for name in names:
                vars(loop).pop(name, None)

    def _hold_iterators(self) -> None:
        """Let the next `iter` of the combined loader make no iterators; right before it."""
        vars(self._fit_loop).pop("_load_combined_loader_states")
        loader = self._fit_loop._combined_loader
        loader.__class__ = _held(type(loader))

    def _advance_epoch(self, data_fetcher: Any) -> None:
        listener, loop = self.listener, self._epoch_loop
        self._between = Following.VALIDATION
        self.first_batch = self.trainer._logger_connector._first_loop_iter
        if listener is not None:
            listener.after_batch()
        if loop._should_check_val_fx(data_fetcher):
            self.before_validation()
        type(loop).on_advance_end(loop, data_fetcher)
        self._between = Following.BATCH
        if listener is not None:
            listener.after_step()

    def _advance_fit(self) -> None:
        listener, loop = self.listener, self._fit_loop
        self._between = None
        if listener is not None:
            listener.before_epoch_end()
        over = self.epoch_is_over
        type(loop).on_advance_end(loop)
        self._between = Following.EPOCH if over else None
        if listener is not None:
            listener.after_epoch()

    def _reset_fit(self) -> None:
        """Take the counters as they were saved, instead of guessing from them."""
        fit_loop, epoch_loop = self._fit_loop, self._epoch_loop
        vars(fit_loop).pop("reset")
        torch.set_grad_enabled(True)
        optimization = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
        for loop in (fit_loop, epoch_loop, epoch_loop.val_loop, *optimization):
            loop._restarting = loop._loaded_from_state_dict = False
        if self.resumed in {Following.EPOCH, Following.EPOCH_UPDATE}:
            # Iterators are made where an uninterrupted run makes them.
            fit_loop._resuming_from_checkpoint = False
            if every := self.trainer.reload_dataloaders_every_n_epochs:
                ended = fit_loop.epoch_progress.current.processed - 1
                fit_loop._last_train_dl_reload_epoch = ended - ended % every
            return
        fit_loop._restart_stage = _MID_EPOCH
        epoch_loop.reset = lambda: vars(epoch_loop).pop("reset")
        epoch_loop.on_run_start = self._run_epoch

    def catch_up(self) -> None:
        """Make up for the update that follows the hooks of an epoch's end."""
        if self.resumed is Following.EPOCH_UPDATE:
            progress = self._fit_loop.epoch_progress
            progress.current.completed -= 1  # as it was, and again is after the update
            self._epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            progress.increment_completed()
            self._epoch_loop._results.reset()
        if self.resumed in {Following.EPOCH, Following.EPOCH_UPDATE, Following.BATCH}:
            self.resumed = None

    def _run_epoch(self, data_fetcher: Any) -> None:
        """Begin in the middle of an epoch, with what was left to do for its last batch."""
        loop, progress = self._epoch_loop, self._epoch_loop.batch_progress
        vars(loop).pop("on_run_start")
        self._fit_loop.__class__ = self._stock
        type(loop).on_run_start(loop, data_fetcher)
        if progress.current.completed < progress.current.processed:
            progress.increment_completed()  # the save was made inside the hooks of the batch
        if self.resumed is None:
            return
        if self.resumed is Following.UPDATE:
            loop._skip_next_val = True
        elif self.trainer._val_check_time_interval is not None:
            self.trainer._last_val_time = -float("inf")
        loop.on_advance_end(data_fetcher)
        self.resumed = None


def as_completed(fit_loop: Mapping[str, Any], in_hand: int) -> dict[str, Any]:
    """Return the state of a fit loop without halves of an epoch or batch.

    Args:
        fit_loop: as Lightning has collected it, perhaps in the middle of a batch.
        in_hand: see `TrainingLoops.in_hand`.
    """
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    done = {
        kind: dict.fromkeys(("ready", "started", "processed", "completed"), batches[kind]["ready"] - in_hand)
        for kind in ("total", "current")
    }
    return {
        **fit_loop,
        "epoch_progress": {kind: {**each, "ready": each["started"]} for kind, each in epochs.items()},
        "epoch_loop.batch_progress": done | {"is_last_batch": batches["is_last_batch"] and not in_hand},
    }


def _held(stock: type[Any]) -> type[Any]:
    """Return the class of a combined loader that is iterated once for its length only."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - it is a method of the class below
        self.__class__ = stock
        modes = sys.modules[stock.__module__]._SUPPORTED_MODES
        self._iterator = modes[self._mode]["iterator"](self.flattened, self._limits)
        return iter(())

    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "__iter__": __iter__})
