"""Where in Lightning's loops a save is made, and from where a resume continues.

The save of a step is made between two steps of Lightning, where nothing is half done: after a batch with its
validation and its schedulers, or after an epoch with all hooks of its end. Lightning has no hook there, and
its restart leaves out what follows. So methods of its loops call a listener at these points, and a resume
continues with what follows. What others save inside a hook is resumed by Lightning's own restart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, final

import torch

_MID_EPOCH: Final = "restarted_mid_epoch"
_BETWEEN: Final = {None, "on_train_end"}


class Following(StrEnum):
    """What Lightning does next."""

    BATCH = "batch"
    """The next batch; after the last one, the hooks of the epoch's end."""

    EPOCH = "epoch"
    """The hooks of the next epoch's start."""


@final
class TrainingLoops:
    """The two training loops of a Trainer, for the time of one fit.

    Concurrency: the thread that trains.

    Attributes:
        trainer: the Trainer.
        listener: the `Pacing` that is called between steps; its StopIteration ends training. None outside.
        holds_iterators: whether the iterators of the loaders are made by the next epoch only.
        validation_is_due: whether the validation of the last batch is left to the resume, by a preemption.
        makes_up: whether a resumed fit has such a validation to make.
    """

    def __init__(self, trainer: Any) -> None:
        self.listener: Any = None
        self.holds_iterators = self.validation_is_due = self.makes_up = False
        self.trainer = trainer
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._resumed: Following | None = None
        self._between: Following | None = None
        self._before_stop: tuple[int | None, int | None, bool] | None = None
        self._stock = type(trainer.fit_loop)
        self._epoch_loop.on_advance_end = self._advance_epoch
        self._epoch_loop.val_loop.run = self._validate
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
    def in_hand(self) -> int:
        """How many batches, 0 or 1, are drawn and not done: a restart begins with them."""
        progress = self._epoch_loop.batch_progress.current
        return max(0, int(progress.ready - progress.processed))

    @property
    def following(self) -> Following | None:
        """What follows a save made now; None inside a hook and after an exception."""
        return self._between if self.hook in _BETWEEN else None

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

    def failed(self) -> None:
        """Note that an exception has ended the training, anywhere in a step."""
        self._between = None

    def resume(self, following: Following, *, ended_epoch: bool, left: bool, validates: bool) -> None:
        """Continue with `following` once Lightning has restored its counters.

        If the epoch's last batch is done, no iterator is made before the next epoch begins, as in an
        uninterrupted run.
        """
        self._resumed, self.makes_up, self.holds_iterators = following, validates, ended_epoch
        if left and following is Following.BATCH:
            # The step may be the last one, after which Lightning would not begin.
            names = {"__module__": self._stock.__module__, "done": False}
            self._fit_loop.__class__ = type(self._stock.__name__, (self._stock,), names)
        self._fit_loop.reset = self._reset_fit
        if ended_epoch:
            self.hold_iterators()

    def release(self) -> None:
        self._fit_loop.__class__ = self._stock
        if self._before_stop is not None:
            self._fit_loop.min_epochs, self._epoch_loop.min_steps, _ = self._before_stop
        own = ("on_advance_end", "reset", "_load_combined_loader_states", "on_save_checkpoint")
        for loop, names in (
            (self._fit_loop, own),
            (self._epoch_loop, ("on_advance_end", "reset", "on_run_start")),
            (self._epoch_loop.val_loop, ("run",)),
        ):
            for name in names:
                vars(loop).pop(name, None)

    def hold_iterators(self) -> None:
        """Let the setup of the loaders make no iterators."""
        self._fit_loop._load_combined_loader_states = self._hold_iterators

    def _hold_iterators(self) -> None:
        """Let the next `iter` of the combined loader make no iterators; right before it."""
        vars(self._fit_loop).pop("_load_combined_loader_states")
        loader = self._fit_loop._combined_loader
        loader.__class__ = _held(type(loader))

    def _advance_epoch(self, data_fetcher: Any) -> None:
        listener, loop = self.listener, self._epoch_loop
        self._between = Following.BATCH
        if listener is not None:
            listener.after_batch()
        type(loop).on_advance_end(loop, data_fetcher)
        if listener is not None:
            listener.after_step()

    def _validate(self) -> Any:
        loop, connector = self._epoch_loop.val_loop, self.trainer._logger_connector
        listener, first = self.listener, connector._first_loop_iter
        if listener is None or self.trainer.sanity_checking:
            return type(loop).run(loop)
        listener.before_validation()
        results = type(loop).run(loop)
        self.trainer.training, connector._first_loop_iter = True, first  # as Lightning does next
        listener.after_validation()
        return results

    def _advance_fit(self) -> None:
        listener, loop = self.listener, self._fit_loop
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
        if self._resumed is Following.EPOCH:
            # Iterators are made where an uninterrupted run makes them.
            fit_loop._resuming_from_checkpoint = False
            if every := self.trainer.reload_dataloaders_every_n_epochs:
                ended = fit_loop.epoch_progress.current.processed - 1
                fit_loop._last_train_dl_reload_epoch = ended - ended % every
            return
        fit_loop._restart_stage = _MID_EPOCH
        epoch_loop.reset = lambda: vars(epoch_loop).pop("reset")
        epoch_loop.on_run_start = self._run_epoch

    def _run_epoch(self, data_fetcher: Any) -> None:
        """Begin in the middle of an epoch, with the validation that was left out."""
        loop = self._epoch_loop
        vars(loop).pop("on_run_start")
        self._fit_loop.__class__ = self._stock
        type(loop).on_run_start(loop, data_fetcher)
        if not self.makes_up:
            return
        if self.trainer._val_check_time_interval is not None:
            self.trainer._last_val_time = -float("inf")
        loop.on_advance_end(data_fetcher)
        self.makes_up = False


def _held(stock: type[Any]) -> type[Any]:
    """Return the class of a combined loader that is iterated once for its length only."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - it is a method of the class below
        self.__class__ = stock
        modes = sys.modules[stock.__module__]._SUPPORTED_MODES
        self._iterator = modes[self._mode]["iterator"](self.flattened, self._limits)
        return iter(())

    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "__iter__": __iter__})
